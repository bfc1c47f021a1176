"""Worlds of real processes, each rank forked from one process that has imported torch.

The import is most of the time of a short world. A rank runs its script as `python script.py`
would: its errors, its exit code and what happens at exit are its own. Worlds may run several
at once.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
_HELPERS = """
import os, time

def say(*words):  # in one piece: lines of several processes do not mix
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def mark():
    say(time.time())
"""
_IMPORTS = (
    "torch._dynamo",
    "torch.utils.data",
    "accel_fn.parallel.world",
    "accel_fn.core.step",
    "accel_fn.parallel.ddp",
    "accel_fn.parallel.fsdp.fsdp",
)


@dataclass(frozen=True)
class EndedRank:
    """Exit of a rank: output, errors and code."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    """From the last `mark()` of any rank of its world to its own last line on stderr."""


@dataclass(frozen=True)
class Request:
    """Scripts to run, each on some ranks; `NAME.py` is in `folder`."""

    folder: str
    names: list[str]
    num_processes: int
    num_at_once: int
    timeout_s: float


def run_worlds(
    scripts: Mapping[str, str],
    folder: Path,
    *,
    num_processes: int = 2,
    num_at_once: int = 4,
    timeout_s: float = 500,
    imports: tuple[str, ...] = (),
) -> dict[str, list[EndedRank]]:
    """Run each script on its ranks, several at once; return how each rank ended, by name.

    A script may `say` a line and `mark` the time. Ranks that run for longer are killed. `imports`
    are modules that ranks find imported.
    """
    for name, script in scripts.items():
        (folder / f"{name}.py").write_text(_HELPERS + textwrap.dedent(script))
    request = Request(str(folder), list(scripts), num_processes, num_at_once, timeout_s)
    server = _server(imports)
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(asdict(request)) + "\n")
    server.stdin.flush()
    exit_codes = json.loads(server.stdout.readline())
    return {name: _collect(folder, name, exit_codes[name]) for name in scripts}


def line_of(script: str, text: str) -> int:
    """Return the number of the line of the running file that holds this text."""
    lines = (_HELPERS + textwrap.dedent(script)).splitlines()
    (found,) = [number for number, line in enumerate(lines, start=1) if text in line]
    return found


@functools.cache
def _server(imports: tuple[str, ...]) -> subprocess.Popen[str]:
    """Start the process that forks; it ends with this one."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.forked_ranks", *imports],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.kill)
    return server


def _collect(folder: Path, name: str, exit_codes: list[int]) -> list[EndedRank]:
    ranks = range(len(exit_codes))
    files = [[folder / f"{name}.{rank}.{stream}" for stream in (1, 2)] for rank in ranks]
    start = max(map(_last_mark, [stdout for stdout, _ in files]))
    return [
        EndedRank(code, stdout.read_text(), stderr.read_text(), stderr.stat().st_mtime - start)
        for code, (stdout, stderr) in zip(exit_codes, files, strict=True)
    ]


def _last_mark(file: Path) -> float:
    times = [float(line) for line in file.read_text().splitlines() if _is_number(line)]
    return max(times, default=0.0)


def _is_number(line: str) -> bool:
    return line.replace(".", "", 1).isdigit()


def _serve() -> None:
    """Run the requests that arrive on stdin, one a line, until it closes or the parent ends."""
    for name in (*_IMPORTS, *sys.argv[1:]):
        importlib.import_module(name)
    gc.freeze()  # else the end of each rank would collect all that was imported
    parent = os.getppid()
    while os.getppid() == parent:  # other processes may hold the other end of stdin
        if not select.select([sys.stdin], [], [], 1.0)[0]:
            continue
        line = sys.stdin.readline()
        if not line:
            return
        exit_codes = _run(Request(**json.loads(line)), parent)
        print(json.dumps(exit_codes), flush=True)


def _run(request: Request, parent: int) -> dict[str, list[int]]:
    waiting, running, ended = request.names[::-1], {}, {}
    while waiting or running:
        while waiting and len(running) < request.num_at_once:
            name = waiting.pop()
            running[name] = time.monotonic() + request.timeout_s, _start(request, name)
        for name, (deadline, pids) in list(running.items()):
            is_late = time.monotonic() > deadline or os.getppid() != parent
            ends = ended.setdefault(name, {})
            ends.update(_reaped(pids - ends.keys(), kill=is_late))
            if ends.keys() == pids:
                del running[name]
        time.sleep(0.01)
    return {name: [ends[pid] for pid in sorted(ends)] for name, ends in ended.items()}


def _start(request: Request, name: str) -> set[int]:
    """Fork the ranks of a new world; each runs its script and never returns here."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = set()
    for rank in range(request.num_processes):
        pid = os.fork()
        if pid == 0:
            _become(request, name, rank, port)
            sys.exit()
        pids.add(pid)
    return pids


def _become(request: Request, name: str, rank: int, port: int) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (1, 2):
        path = Path(request.folder) / f"{name}.{rank}.{number}"
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    random.seed()  # separate processes would draw different numbers too
    np.random.seed()
    if request.num_processes > 1:
        _tell_world(rank, request.num_processes, port)
    runpy.run_path(str(Path(request.folder) / f"{name}.py"), run_name="__main__")


def _tell_world(rank: int, world_size: int, port: int) -> None:
    numbers = {"RANK": rank, "WORLD_SIZE": world_size}
    numbers |= {f"LOCAL_{name}": number for name, number in numbers.items()}
    os.environ.update({key: str(value) for key, value in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _reaped(pids: set[int], *, kill: bool) -> dict[int, int]:
    """Collect the exit codes of ranks that have ended."""
    found = {}
    for pid in pids:
        if kill:
            os.kill(pid, signal.SIGKILL)
        done, status = os.waitpid(pid, 0 if kill else os.WNOHANG)
        if done:
            found[pid] = os.waitstatus_to_exitcode(status)
    return found


if __name__ == "__main__":
    _serve()
