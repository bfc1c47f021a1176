"""The examples as they are started: real processes, and what each of them said."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forking import run_worlds

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Run:
    """One finished run: its exit code, the folder it wrote to, and what every rank printed."""

    exit_code: int
    out: Path
    stdout: list[str]
    stderr: list[str]

    def curves(self) -> Any:
        """The machine-readable file of losses that every example writes."""
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
    """Run an example where torch is imported already, which is most of a short run."""
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
    """The run, if it ended well; else everything it said."""
    assert run.exit_code == 0, str(run)
    return run
