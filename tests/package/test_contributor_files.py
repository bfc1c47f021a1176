"""Files for contributors: the sessions, versions and paths that they name exist."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOXFILE = (ROOT / "noxfile.py").read_text()
DEFINED = re.findall(r"^@nox\.session.*\n(?:@.*\n)?def (\w+)\(", NOXFILE, re.MULTILINE)
SESSIONS = {*DEFINED, *re.findall(r'^    "(\w+)": Row\(', NOXFILE, re.MULTILINE)}
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))


@pytest.mark.parametrize(
    "path", [ROOT / ".ci/run", GITHUB / "CONTRIBUTING.md", *WORKFLOWS], ids=str
)
def test_sessions_that_are_named_exist(path):
    runs = re.findall(r'nox -s "?([\w ]+)', path.read_text())
    jobs = yaml.safe_load(path.read_text())["jobs"].values() if path.suffix == ".yml" else ()
    matrices = (job.get("strategy", {}).get("matrix", {}).get("session", []) for job in jobs)
    named = {name for run in runs for name in run.split()}.union(*matrices)
    assert named
    assert named <= SESSIONS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_the_hash_of_a_commit_with_the_version_beside_it(path):
    used = re.findall(r"uses: (.+)", path.read_text())
    assert used
    for each in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", each), each


def test_pythons_of_the_workflows_are_those_of_the_classifiers():
    change = yaml.safe_load((GITHUB / "workflows/change.yml").read_text())["jobs"]
    [setup] = [step for step in change["change"]["steps"] if "with" in step]
    pythons = {setup["with"]["python-version"], *change["pythons"]["strategy"]["matrix"]["python"]}
    classifiers = "\n".join(PROJECT["classifiers"])
    assert pythons == set(re.findall(r"Python :: (3\.\d+)", classifiers))
    assert PROJECT["requires-python"].removeprefix(">=") in pythons


def test_the_citation_has_the_version_of_the_package():
    citation = yaml.safe_load((GITHUB / "CITATION.cff").read_text())
    version = re.search(r'__version__ = "(.+)"', (ROOT / "accel_fn/__init__.py").read_text())[1]
    assert citation["version"] == version
    assert citation["license"] == PROJECT["license"]


def test_the_page_of_versions_names_the_bounds_of_the_package_and_of_the_sessions():
    page = (ROOT / "docs/versions.md").read_text()
    [torch] = [each for each in PROJECT["dependencies"] if each.startswith("torch")]
    tested = re.search(r'^TORCH = "torch==(.+?)"', NOXFILE, re.MULTILINE)[1]
    lowest = re.search(r'"torch==(2\.\d+)\.\*"', NOXFILE)[1]
    assert torch == f"torch>={lowest}"
    assert f"| {tested} |" in page
    assert re.search(rf"^\| {re.escape(lowest)}", page, re.MULTILINE)
    assert f"Python {PROJECT['requires-python'].removeprefix('>=')} or newer" in page


def test_each_folder_that_plain_pytest_leaves_out_is_named_by_a_session():
    """pytest drops such a folder also from a run of the folder above it."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    left_out = re.findall(r"--ignore=(\S+)", options["addopts"])
    assert len(left_out) >= 6
    assert [folder for folder in left_out if f'"{folder}"' not in NOXFILE] == []
