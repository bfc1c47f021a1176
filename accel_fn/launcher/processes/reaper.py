"""No process outlives a launcher: a guard sees it end, however it ends, and kills what is left.

Run as a script beside the launcher, of the standard library alone. It reads folders
of ranks from its input until that ends, which is when the launcher does.
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
    """The guard of this process and the ranks that it starts."""

    def __init__(self, run_id: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, run_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the launcher
        )

    def make_folder(self, parent: str) -> Path:
        """A temporary folder, watched before it is there: whenever this process ends, none is left."""
        folder = Path(parent, f"accel_fn_{os.urandom(8).hex()}")
        self.watch(folder, temporary=True)
        folder.mkdir(mode=0o700)
        return folder

    def watch(self, folder: Path, *, temporary: bool) -> None:
        """From now on, the ranks with a folder in there end with this process."""
        assert self._process.stdin is not None
        with suppress(OSError):  # without its guard a launch goes on
            self._process.stdin.write(f"{'remove' if temporary else 'keep'} {folder}\n".encode())
            self._process.stdin.flush()

    def finish(self) -> None:
        """Have it clean up now, and wait for it."""
        with suppress(OSError):
            self._process.communicate()


def kill_left(folder: Path, run_id: str) -> None:
    """Kill what ranks left behind: the processes of their groups, such as data loaders' workers.

    Whoever opened a session of its own is not in the group: it was meant to stay.
    """
    groups = set()
    for path in folder.rglob("pid"):
        with suppress(OSError, ValueError):
            groups.add(int(path.read_text()))
    for _ in range(_TRIES):
        left = [pid for pid in _members(groups) if _runs(pid, run_id)]
        if not left:
            return
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_WAIT_S)


def _members(groups: set[int]) -> list[int]:
    """The processes of these groups that are not dead."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            state, _, group, *_ = path.read_text().rpartition(")")[2].split()
            if int(group) in groups and state not in "ZX":
                found.append(int(path.parent.name))
    return found


def _runs(pid: int, run_id: str) -> bool:
    """Is it of this run? Numbers of processes are used again, also for a stranger's."""
    with suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return f"TORCHELASTIC_RUN_ID={run_id}".encode() in variables
    return False


def main(run_id: str) -> None:
    """Reaper a launcher until its end of the pipe is closed."""
    folders = [line.rstrip("\n").partition(" ") for line in sys.stdin]
    for _, _, folder in folders:
        kill_left(Path(folder), run_id)
        _tidy(Path(folder))
    for kept, _, folder in folders:
        if kept == "remove":
            shutil.rmtree(folder, ignore_errors=True)


def _tidy(folder: Path) -> None:
    """Leave only what says something in a folder of logs."""
    for path in (*folder.rglob("pid"), *folder.rglob("crash"), *folder.rglob("stopped")):
        with suppress(OSError):
            if path.name == "pid" or path.stat().st_size == 0:
                path.unlink()


if __name__ == "__main__":
    main(sys.argv[1])
