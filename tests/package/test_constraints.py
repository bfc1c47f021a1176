"""The constraints pin one release of each package, the same on every machine."""

import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
MAIN = ROOT / ".ci/constraints.txt"
TRACKERS = sorted(ROOT.glob(".ci/trackers/*.txt"))
DEEPSPEED = ROOT / ".ci/deepspeed.txt"
FILES = [MAIN, *TRACKERS, DEEPSPEED]
HASHED = sorted(ROOT.glob(".ci/hashes/*.txt"))


def releases_of(path):
    """The releases of a file, by their lines without hashes, each with its number of hashes."""
    blocks = re.split(r"\n(?! )", path.read_text().strip())[1:]
    return {each.partition(" \\")[0]: each.count("--hash=sha256:") for each in blocks}


PINS = {path: [*map(Requirement, releases_of(path))] for path in FILES}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
ASKED = sorted(
    {
        *PROJECT["project"]["dependencies"],
        *chain.from_iterable(
            requirements
            for name, requirements in EXTRAS.items()
            if name not in ("all", "deepspeed")
        ),
        *chain.from_iterable(PROJECT["dependency-groups"].values()),
    }
)
PYTHONS = ("3.11", "3.12", "3.13")


def pins_of(name, python):
    here = {**default_environment(), "sys_platform": "linux", "platform_machine": "x86_64"}
    here |= {"python_version": python, "python_full_version": f"{python}.0"}
    wanted = [pin for pin in PINS[MAIN] if canonicalize_name(pin.name) == canonicalize_name(name)]
    return [pin for pin in wanted if pin.marker is None or pin.marker.evaluate(here)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_line_pins_one_release_and_names_no_place(path):
    text = path.read_text()
    for line in text.splitlines()[1:]:
        assert re.fullmatch(r"[a-z0-9.-]+==[a-z0-9.]+( ; .+)?", line), line
    assert all(pin.url is None and not pin.extras for pin in PINS[path])
    assert not re.search(r"://|^-|\+|@", text, re.MULTILINE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_torch_and_what_it_needs_on_one_kind_of_machine_are_left_free(path):
    names = [canonicalize_name(pin.name) for pin in PINS[path]]
    assert [name for name in names if re.search(r"^(torch|triton)$|nvidia|cuda|triton", name)] == []


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_has_one_release_that_fits(python):
    for requirement in map(Requirement, ASKED):
        if requirement.name != "torch":
            [pin] = pins_of(requirement.name, python)
            [release] = pin.specifier
            assert requirement.specifier.contains(release.version), requirement


@pytest.mark.parametrize("path", HASHED, ids=lambda path: path.stem)
def test_a_lock_has_hashes_for_each_release_which_is_that_of_the_constraints(path):
    locked = releases_of(path)
    assert all(locked.values())
    names = {canonicalize_name(Requirement(line).name) for line in locked}
    assert not [name for name in names if re.search(r"^torch$|nvidia|cuda|triton", name)]
    constrained = {pin.name: str(pin.specifier) for pin in PINS[MAIN]}
    for pin in map(Requirement, locked):
        assert constrained[pin.name] == str(pin.specifier)


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_of_tests_has_all_that_they_and_the_build_ask_for(python):
    here = {**default_environment(), "sys_platform": "linux", "python_full_version": f"{python}.0"}
    pins = [*map(Requirement, releases_of(ROOT / ".ci/hashes/tests.txt"))]
    named = {pin.name for pin in pins if pin.marker is None or pin.marker.evaluate(here)}
    extras = ("testing", "examples", "float8", "migrate", "runs", "transformers")
    asked = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    asked += chain.from_iterable(EXTRAS[name] for name in extras)
    asked += PROJECT["dependency-groups"]["tests"]
    assert {canonicalize_name(Requirement(each).name) for each in asked} - named == {"torch"}


def test_no_dependency_has_an_upper_bound_without_the_break_that_it_guards():
    for line in (ROOT / "pyproject.toml").read_text().splitlines():
        if re.search(r'"[A-Za-z][\w\[\]-]*[^"]*(<|==|~=)', line):
            assert "#" in line, line


def test_the_extra_all_is_every_extra_but_those_of_the_examples_and_of_deepspeed():
    [everything] = EXTRAS["all"]
    assert Requirement(everything).name == PROJECT["project"]["name"]
    assert Requirement(everything).extras == set(EXTRAS) - {"all", "deepspeed", "examples"}
