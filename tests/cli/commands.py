"""Runs `accel-fn` as a user would, in an empty folder, with its own home: in a process or in this one."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import traceback
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from accel_fn.cli import main

ROOT = Path(__file__).parents[2]
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "node[0-1]",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}
"""The variables that srun sets for the second of two tasks on two nodes."""


def surroundings(folder: Path, **variables: str) -> dict[str, str]:
    """Return an environment whose home is in `folder`, without variables of a launch."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHED and not name.startswith(("ACCEL_FN_", "XDG_"))
    }
    ours = {"HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return {**inherited, **ours, **variables}


@dataclass(frozen=True)
class Ended:
    """The end of a command: its exit code, and what it printed."""

    exit_code: int
    stdout: str
    stderr: str


def command(folder: Path, *arguments: object, **variables: str) -> Ended:
    """Run `accel-fn ARGUMENTS` in this process, which has imported torch already."""
    out, err = io.StringIO(), io.StringIO()
    before = set(sys.modules), sys.path[:], sys.argv[:]
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGCHLD)}
    sys.argv = ["accel-fn", *map(str, arguments)]
    environment = mock.patch.dict(os.environ, surroundings(folder, **variables), clear=True)
    try:
        with environment, chdir(folder), redirect_stdout(out), redirect_stderr(err):
            main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except Exception:
        traceback.print_exc(file=err)
        code = 1
    finally:
        modules, sys.path[:], sys.argv = before
        for each in [*sys.modules.keys() - modules]:
            if str(folder.parent) in str(getattr(sys.modules[each], "__file__", "")):
                del sys.modules[each]  # a file of the user
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Ended(code, out.getvalue(), err.getvalue())


def run_python(
    folder: Path, *arguments: str, timeout_s: float = 500, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run python in a folder; return its output and its exit code."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=surroundings(folder, **variables),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def run_command(
    folder: Path, *arguments: str, timeout_s: float = 500, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `accel-fn ARGUMENTS` in a folder; return its output and its exit code."""
    return run_python(folder, "-m", "accel_fn", *arguments, timeout_s=timeout_s, **variables)
