"""Many worlds of real processes at once, each rank forked from one process that has imported torch.

The import is most of the time of a short world. A rank runs its script as `python script.py`
would: its errors, its exit code and what happens at exit are its own.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_MARK = """
import os, time

def mark():
    os.write(1, f"{time.time()}\\n".encode())
"""


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    """From the last `mark()` of any rank of its world to its own last word on stderr."""


def run_worlds(
    scripts: Mapping[str, str], folder: Path, *, num_at_once: int = 4, timeout_s: float = 40
) -> dict[str, list[Ended]]:
    """Run each script on two ranks, several at once; how each rank ended, by name."""
    for name, script in scripts.items():
        (folder / f"{name}.py").write_text(_MARK + textwrap.dedent(script))
    found = subprocess.run(
        [sys.executable, "-m", "tests.distributed.forking"],
        input=json.dumps([str(folder), list(scripts), num_at_once, timeout_s]),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout_s * len(scripts),
        check=True,
    )
    ends = json.loads(found.stdout)
    return {name: _collect(folder, name, ends[name]) for name in scripts}


def line_of(script: str, text: str) -> int:
    """The number of the line, in the file that is run, that holds this text."""
    lines = (_MARK + textwrap.dedent(script)).splitlines()
    (found,) = [number for number, line in enumerate(lines, start=1) if text in line]
    return found


def _collect(folder: Path, name: str, exit_codes: list[int]) -> list[Ended]:
    files = [[folder / f"{name}.{rank}.{stream}" for stream in (1, 2)] for rank in (0, 1)]
    marks = [float(line) for stdout, _ in files for line in stdout.read_text().splitlines()]
    start = max(marks, default=0.0)
    return [
        Ended(code, stdout.read_text(), stderr.read_text(), stderr.stat().st_mtime - start)
        for code, (stdout, stderr) in zip(exit_codes, files, strict=True)
    ]


def _main() -> None:
    folder, names, num_at_once, timeout_s = json.load(sys.stdin)
    for name in ("torch._dynamo", "accel_fn._world", "accel_fn._step", "accel_fn.transforms._ddp"):
        importlib.import_module(name)
    gc.freeze()  # else a rank that ends goes through all that was imported
    waiting, running, ended = list(names)[::-1], {}, {}
    while waiting or running:
        while waiting and len(running) < num_at_once:
            name = waiting.pop()
            running[name] = time.monotonic() + timeout_s, _start(Path(folder), name)
        for name, (deadline, pids) in list(running.items()):
            ends = ended.setdefault(name, {})
            ends.update(_reaped(pids - ends.keys(), kill=time.monotonic() > deadline))
            if ends.keys() == pids:
                del running[name]
        time.sleep(0.01)
    json.dump(
        {name: [ends[pid] for pid in sorted(ends)] for name, ends in ended.items()}, sys.stdout
    )


def _start(folder: Path, name: str) -> set[int]:
    """The ranks of a new world, each of which goes on in its script instead of coming back here."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = set()
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            _become(folder, name, rank, port)
            sys.exit()
        pids.add(pid)
    return pids


def _become(folder: Path, name: str, rank: int, port: int) -> None:
    for number in (1, 2):
        os.dup2(os.open(folder / f"{name}.{rank}.{number}", os.O_WRONLY | os.O_CREAT), number)
    numbers = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({key: str(value) for key, value in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    runpy.run_path(str(folder / f"{name}.py"), run_name="__main__")


def _reaped(pids: set[int], *, kill: bool) -> dict[int, int]:
    """Exit codes of those that have ended."""
    found = {}
    for pid in pids:
        if kill:
            os.kill(pid, signal.SIGKILL)
        done, status = os.waitpid(pid, 0 if kill else os.WNOHANG)
        if done:
            found[pid] = os.waitstatus_to_exitcode(status)
    return found


if __name__ == "__main__":
    _main()
