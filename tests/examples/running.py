"""Runs the examples in real processes, as a user starts them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.forked_ranks import run_worlds

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Run:
    """A finished run: its exit code, its folder, and the output of every rank."""

    exit_code: int
    out: Path
    stdout: list[str]
    stderr: list[str]

    def curves(self) -> Any:
        """Read the losses that every example writes to a file."""
        (file,) = self.out.glob("*.json")
        return json.loads(file.read_text())

    def __str__(self) -> str:
        said = zip(self.stdout, self.stderr, strict=True)
        return f"exit code {self.exit_code}\n" + "\n".join(
            f"--- rank {rank}\n{stdout}\n{stderr}" for rank, (stdout, stderr) in enumerate(said)
        )


_FORKED = """
import runpy, sys

sys.path.insert(0, {folder!r})
sys.argv = {argv!r}
runpy.run_path({argv!r}[0], run_name="__main__")
"""


def run_forked(
    name: str, *arguments: str, folder: Path, num_processes: int = 1, timeout_s: float = 500
) -> Run:
    """Run an example in a fork that has imported torch, which takes most of the time of a short
    run."""
    argv = _argv(name, folder, arguments)
    script = _FORKED.format(folder=str(EXAMPLES), argv=argv)
    (ranks,) = run_worlds(
        {name: script}, folder, num_processes=num_processes, timeout_s=timeout_s
    ).values()
    codes, stdout, stderr = zip(
        *[(each.exit_code, each.stdout, each.stderr) for each in ranks], strict=True
    )
    return Run(next(filter(None, codes), 0), folder / "out", list(stdout), list(stderr))


def _argv(name: str, folder: Path, arguments: tuple[str, ...]) -> list[str]:
    return [
        str(EXAMPLES / f"{name}.py"),
        "--device",
        "cpu",
        "--out",
        str(folder / "out"),
        *arguments,
    ]


def finished(run: Run) -> Run:
    """Return the run if it ended well; otherwise fail with its output."""
    assert run.exit_code == 0, str(run)
    return run
