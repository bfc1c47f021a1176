"""README.md: its programs run as printed, and its figures are those of the pages that measure them."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.test_examples import ROOT, side

README = (ROOT / "README.md").read_text(encoding="utf-8")
CHANGE, RESUMING = re.findall(r"^```diff\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
BY_HAND, PROGRAM = side(CHANGE, "-"), side(CHANGE, "+")


def resumed(program: str) -> str:
    """Return the program of README.md with its second diff applied."""
    old = side(RESUMING, "-")
    assert program.count(old) == 1
    return program.replace(old, side(RESUMING, "+"))


@pytest.fixture(scope="module")
def printed_alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Run the program of README.md in an empty folder; return what it prints."""
    return run_program(PROGRAM, tmp_path_factory.mktemp("alone"), [])


def run_program(program: str, folder: Path, launcher: list[str]) -> str:
    (folder / "train.py").write_text(program, encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launcher, "train.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\S+)", printed)]


def test_the_file_that_the_readme_names_is_its_program() -> None:
    text = (ROOT / "examples" / "circle.py").read_text(encoding="utf-8")
    assert text.partition('"""\n\n')[2] == PROGRAM


@pytest.mark.slow
def test_both_programs_of_the_readme_learn(printed_alone: str, tmp_path: Path) -> None:
    for printed in (run_program(BY_HAND, tmp_path, []), printed_alone):
        assert len(losses(printed)) == 5
        assert losses(printed)[-1] < losses(printed)[0] / 2


@pytest.mark.slow
def test_program_of_the_readme_prints_the_same_on_two_processes(
    printed_alone: str, tmp_path: Path
) -> None:
    launcher = ["-m", "accel_fn", "launch", "-n", "2", "--cpu"]
    assert run_program(PROGRAM, tmp_path, launcher) == printed_alone


@pytest.mark.slow
def test_a_run_of_the_readme_continues_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run stops within an epoch, after its first checkpoint, and starts again."""
    program = resumed(PROGRAM).replace("epoch, 50)", "epoch, 8)")
    stepping = "        state, report = step(state, batch)\n"
    assert program.count(stepping) == 1
    stopping = program.replace(
        stepping, stepping + "        if state.step == 120:\n            raise SystemExit\n"
    )
    ends = []
    for name, programs in (("whole", [program]), ("stopped", [stopping, program])):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        for each in programs:
            variables: dict[str, Any] = {}
            with contextlib.suppress(SystemExit):
                exec(each, variables)
            gc.collect()  # releases the lock of the run's folder
        assert variables["state"].step == 128
        ends.append(variables["model"].state_dict())
        assert [path.name for path in Path("runs/a").glob("step_*")] == ["step_00000100"]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_the_first_diff_of_the_readme_is_short() -> None:
    assert len(re.findall(r"^[+-]", CHANGE, re.MULTILINE)) <= 15


def test_links_of_the_readme_lead_to_files() -> None:
    linked = set(re.findall(r"\]\(([^)#]+)", README))
    assert "docs/index.md" in linked
    assert not [link for link in linked if not (ROOT / link).is_file()]


def outcome(name: str) -> str:
    """Return the row of an outcome of the readme."""
    [row] = re.findall(rf"^\| .*{name}.*$", README, re.MULTILINE)
    return str(row)


def test_the_losses_of_the_readme_are_those_of_its_picture() -> None:
    """test_pictures.py measures the picture again."""
    picture = (ROOT / "docs" / "_static" / "promise.svg").read_text(encoding="utf-8")
    drawn = re.findall(r"<title>(\w+) on \d: (\S+)</title>", picture)
    shown = [
        ", ".join(f"{float(loss):.2f}" for each, loss in drawn if each == library)
        for library in ("accelerate", "accel_fn")
    ]
    assert outcome("Result").split(" | ")[1:] == [shown[0], f"{shown[1]} |"]


def test_the_times_of_the_readme_are_those_of_the_benchmarks() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    ratios = re.findall(
        r"^\| (tiny|middle), (?:default|fused), [^|]* \|[^|]* us \| +(\S+) \|[^|]*\|[^|]*\| +(\S+) \|$",
        text,
        re.MULTILINE,
    )
    assert len(ratios) == 16

    def span(column: int, model: str) -> str:
        found = [each[column] for each in ratios if each[0] == model]
        return f"{min(found)} to {max(found)}"

    shown = [f"tiny model {span(at, 'tiny')}, middle {span(at, 'middle')}" for at in (1, 2)]
    assert outcome("Speed").split(" | ")[1:] == [shown[0], f"{shown[1]} |"]


def test_the_times_on_a_gpu_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    names = ("torch", "accelerate", "accel_fn")
    assert re.findall(r"\d+\.\d ms", outcome("GPT-2")) == [
        f"{ms} ms" for name in names for ms in re.findall(rf"{name} (\d+\.\d) ms", page)
    ]


def test_the_resumed_samples_of_the_readme_are_those_of_the_differences() -> None:
    """test_differences_in_accelerate.py measures the row."""
    page = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8")
    [(repeated, samples, never)] = re.findall(
        r"mid-epoch resume \| (\d+) of (\d+) samples repeated, (\d+) never seen", page
    )
    row = outcome("Resume")
    assert f"an epoch of {samples} samples | {repeated} samples repeated, {never} never seen" in row
