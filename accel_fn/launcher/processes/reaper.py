"""The reaper: a process beside a launcher that kills what is left when the launcher ends.

It is run as a script that imports only the standard library. It reads folders of ranks from
its standard input until that closes, which happens however the launcher ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_TRIES, _WAIT_S = 20, 0.05


class Reaper:
    """The reaper of this process and of the ranks that it starts."""

    def __init__(self, run_id: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, run_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the launcher
        )

    def make_folder(self, parent: str) -> Path:
        """Make a temporary folder, which the reaper knows, and will remove, before it exists."""
        folder = Path(parent, f"accel_fn_{os.urandom(8).hex()}")
        self.watch(folder, remove=True)
        folder.mkdir(mode=0o700)
        return folder

    def watch(self, folder: Path, *, remove: bool = False) -> None:
        """Kill the ranks that have a folder in there when this process ends."""
        assert self._process.stdin is not None
        with suppress(OSError):  # a launch goes on without its reaper
            self._process.stdin.write(f"{'remove' if remove else 'keep'} {folder}\n".encode())
            self._process.stdin.flush()

    def finish(self) -> None:
        """Let it clean up now, and wait for it."""
        with suppress(OSError):
            self._process.communicate()


def kill_left(folder: Path, run_id: str) -> None:
    """Kill the processes that ranks left in their groups, such as workers of data loaders.

    A process that opened a new session is not in the group: it was meant to stay.
    """
    groups = set()
    for path in folder.rglob("pid"):
        with suppress(OSError, ValueError):
            groups.add(int(path.read_text()))
    for _ in range(_TRIES):
        left = [pid for pid in _members(groups) if _is_of(run_id, pid)]
        if not left:
            return
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_WAIT_S)


def _members(groups: set[int]) -> list[int]:
    """List the living processes of these groups."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            state, _, group, *_ = path.read_text().rpartition(")")[2].split()
            if int(group) in groups and state not in "ZX":
                found.append(int(path.parent.name))
    return found


def _is_of(run_id: str, pid: int) -> bool:
    """Is the process of this run? Its number may have been reused for a foreign one."""
    with suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return f"TORCHELASTIC_RUN_ID={run_id}".encode() in variables
    return False


def main(run_id: str) -> None:
    """Wait until the launcher's end of the pipe is closed, then clean up."""
    folders = [line.rstrip("\n").partition(" ") for line in sys.stdin]
    for _, _, folder in folders:
        kill_left(Path(folder), run_id)
        _tidy(Path(folder))
    for action, _, folder in folders:
        if action == "remove":
            shutil.rmtree(folder, ignore_errors=True)


def _tidy(folder: Path) -> None:
    """Remove numbers of processes and empty files from a folder of logs."""
    for path in (*folder.rglob("pid"), *folder.rglob("crash"), *folder.rglob("stopped")):
        with suppress(OSError):
            if path.name == "pid" or path.stat().st_size == 0:
                path.unlink()


if __name__ == "__main__":
    main(sys.argv[1])
