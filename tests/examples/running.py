"""The examples as a user starts them: real processes, and what each of them said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
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


def run_forked(name: str, *arguments: str, folder: Path, num_processes: int = 1) -> Run:
    """Run an example where torch is imported already, which is most of a short run."""
    argv = _argv(name, folder, arguments)
    script = _FORKED.format(folder=str(EXAMPLES), argv=argv)
    (ranks,) = run_worlds(
        {name: script}, folder, num_processes=num_processes, timeout_s=100
    ).values()
    codes, stdout, stderr = zip(
        *[(each.exit_code, each.stdout, each.stderr) for each in ranks], strict=True
    )
    return Run(next(filter(None, codes), 0), folder / "out", list(stdout), list(stderr))


def run_example(
    name: str, *arguments: str, folder: Path, num_processes: int = 1, timeout_s: float = 100
) -> Run:
    """Run an example to its end as a user starts it, or kill it with all that it started."""
    out, script = folder / "out", _argv(name, folder, arguments)
    if num_processes == 1:
        exit_code, stdout, stderr = _run([sys.executable, *script], timeout_s)
        return Run(exit_code, out, [stdout], [stderr])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    launcher += [str(num_processes), "--redirects", "3", "--log-dir", str(folder / "logs")]
    exit_code, _, agent = _run([sys.executable, *launcher, *script], timeout_s)
    stdout, stderr = (
        [_said(folder, rank, stream) for rank in range(num_processes)]
        for stream in ("stdout", "stderr")
    )
    assert all(stderr) or exit_code == 0, agent  # before any rank could say something
    return Run(exit_code, out, stdout, stderr)


def _argv(name: str, folder: Path, arguments: tuple[str, ...]) -> list[str]:
    return [
        str(EXAMPLES / f"{name}.py"),
        "--device",
        "cpu",
        "--out",
        str(folder / "out"),
        *arguments,
    ]


def _said(folder: Path, rank: int, stream: str) -> str:
    (file,) = folder.glob(f"logs/*/attempt_0/{rank}/{stream}.log")
    return file.read_text()


def _run(command: list[str], timeout_s: float) -> tuple[int, str, str]:
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that the whole group can be killed, launcher and ranks
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(f"no end within {timeout_s:g} s\n{stdout}\n{stderr}") from None
    return process.returncode, stdout, stderr


def finished(run: Run) -> Run:
    """The run, if it ended well; else everything it said."""
    assert run.exit_code == 0, str(run)
    return run
