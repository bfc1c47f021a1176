"""Runs the examples in real processes, as a user starts them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_ranks import run_worlds

EXAMPLES = Path(__file__).parents[2] / "examples"
_FORKED = """
import runpy, sys

sys.path.insert(0, {folder!r})
sys.argv = {argv!r}
runpy.run_path({argv!r}[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Run:
    """A run that ended well: its folder, and what every rank printed."""

    out: Path
    stdout: list[str]
    stderr: list[str]

    def curves(self) -> Any:
        """Read the losses that every example writes to a file."""
        (file,) = self.out.glob("*.json")
        return json.loads(file.read_text())


def run_forked(
    name: str, *arguments: str, folder: Path, num_processes: int = 1, timeout_s: float = 500
) -> Run:
    """Run an example in a fork that has imported torch, which takes most of the time of a short run."""
    out = folder / "out"
    argv = [str(EXAMPLES / f"{name}.py"), "--device", "cpu", "--out", str(out), *arguments]
    script = _FORKED.format(folder=str(EXAMPLES), argv=argv)
    (ranks,) = run_worlds(
        {name: script}, folder, num_processes=num_processes, timeout_s=timeout_s
    ).values()
    assert not any(each.exit_code for each in ranks), "\n".join(
        f"--- rank {rank}: exit code {each.exit_code}\n{each.stdout}\n{each.stderr}"
        for rank, each in enumerate(ranks)
    )
    return Run(out, [each.stdout for each in ranks], [each.stderr for each in ranks])


def run_once(name: str, *arguments: str, num_processes: int, timeout_s: float = 500) -> Any:
    """A fixture: the run of an example that the tests of a module share."""

    @pytest.fixture(scope="module")
    def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
        folder = tmp_path_factory.mktemp(name)
        return run_forked(
            name, *arguments, folder=folder, num_processes=num_processes, timeout_s=timeout_s
        )

    return run
