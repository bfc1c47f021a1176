"""Examples that print their figures: each runs on one process and on two, as a user starts it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.commands import ROOT, run_command
from tests.examples.running import EXAMPLES

pytestmark = pytest.mark.timeout(3600)  # text_to_image takes minutes, beside other programs
PROGRAMS = (
    *("mnist", "nlp", "vision", "lora", "contrastive", "cross_validation", "detection"),
    *("diffusion", "early_stopping", "ppo", "nanogpt", "trackers", "text_to_image"),
)
RISES = {"cross_validation": ("accuracy", 0.9), "ppo": ("moves a game", 100)}
"""Of programs in which no loss falls: a figure, and the least that its last value is."""
PAGE = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
FIGURE = re.compile(r"-?\d+\.\d+")


@pytest.fixture(scope="module", params=PROGRAMS)
def printed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a program prints on one process and on two."""
    name = request.param
    folders = [tmp_path_factory.mktemp(name) for _ in range(2)]
    return [output_of(name, folder=folder, size=size) for size, folder in enumerate(folders, 1)]


def output_of(
    name: str, *arguments: str, folder: Path, size: int = 1, options: tuple[str, ...] = ()
) -> str:
    program = ("launch", "-n", str(size), "--cpu", *options, str(EXAMPLES / f"{name}.py"))
    done = run_command(folder, *program, *arguments, timeout_s=1500)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_two_processes_print_the_figures_of_one(printed: list[str]) -> None:
    compare(*printed)


def compare(one: str, two: str) -> None:
    assert FIGURE.split(one) == FIGURE.split(two)
    figures = [list(map(float, FIGURE.findall(each))) for each in (one, two)]
    # Rounding of float32 may move the last of the four decimals.
    assert figures[0] == pytest.approx(figures[1], rel=0, abs=1.01e-4)


@pytest.mark.slow
def test_page_of_examples_shows_the_last_figures(
    printed: list[str], request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["printed"]
    [row] = re.findall(rf"^\| `{name}\.py` .* \| (.*) \| (.*) \|$", PAGE, re.MULTILINE)
    for cell, each in zip(row, printed, strict=True):
        texts = cell, each.splitlines()[-1]
        shown, last = (list(map(float, FIGURE.findall(text))) for text in texts)
        # Another CPU rounds otherwise in every step.
        assert shown == pytest.approx(last, rel=0.1, abs=0.01)


@pytest.mark.slow
def test_program_learns(printed: list[str], request: pytest.FixtureRequest) -> None:
    """The loss falls, or where none does, another figure rises."""
    name, least = RISES.get(request.node.callspec.params["printed"], ("loss", None))
    figures = list(map(float, re.findall(rf"{name} (-?\d+\.\d+)", printed[0])))
    assert figures[-1] < 0.9 * figures[0] if least is None else figures[-1] > least


@pytest.mark.slow
def test_gpt_that_is_sharded_over_two_processes_resumes_on_one(tmp_path: Path) -> None:
    def losses(num_updates: int, *arguments: str, size: int = 1) -> str:
        options = ("--max-iters", str(num_updates), "--eval-interval", "20", *arguments)
        printed = output_of("nanogpt", *options, folder=tmp_path, size=size)
        return "\n".join(line for line in printed.splitlines() if "train loss" in line)

    stopped = losses(40, "--fsdp", size=2)
    compare(losses(60, "--out", "whole"), f"{stopped}\n{losses(60)}")


@pytest.mark.slow
def test_lora_resumes_from_a_checkpoint_of_its_adapters(tmp_path: Path) -> None:
    whole = output_of("lora", "--out", "whole", folder=tmp_path)
    stopped = output_of("lora", "--epochs", "2", folder=tmp_path)
    resumed = output_of("lora", folder=tmp_path)
    assert whole.splitlines() == stopped.splitlines() + resumed.splitlines()[1:]


@pytest.mark.slow
def test_local_sgd_that_averages_every_update_prints_the_figures_of_wrap_ddp(
    tmp_path: Path,
) -> None:
    alone, two = (output_of("local_sgd", folder=tmp_path, size=size) for size in (1, 2))
    by_ddp, every_update, seldom = (line.split("  ", 1)[1].strip() for line in two.splitlines())
    compare(by_ddp, every_update)
    compare(by_ddp, alone.splitlines()[0].split("  ", 1)[1].strip())
    apart = [float(FIGURE.findall(each)[-1]) for each in (every_update, seldom)]
    assert apart[0] < 1e-4 < 1e-2 < apart[1]


@pytest.mark.slow
def test_profile_names_the_slow_rank_and_what_it_waits_for(tmp_path: Path) -> None:
    printed = output_of("profiling", "--slow-ms", "200", folder=tmp_path, size=2)
    assert "rank 1 is the straggler: its data takes" in printed
    found = {path.name for path in (tmp_path / "runs" / "profiling").iterdir()}
    assert found == {"phases.txt", "rank0.json.gz", "rank1.json.gz"}
