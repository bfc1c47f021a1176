"""The reaper: a process that kills what is left of a run when the run's launcher ends.

It is a script that imports only the standard library. The launcher writes folders and ranks to its
standard input. When the launcher ends, in any way, the input closes, and the reaper kills the ranks
and removes the folders.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_TRIES, _WAIT_S = 20, 0.05


class Reaper:
    """The launcher's handle of the reaper: it starts the reaper, and registers ranks and folders."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, run_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # In a new session, the reaper does not get a Ctrl-C that ends the launcher.
            start_new_session=True,
        )

    def make_folder(self, parent: str) -> Path:
        """Make a temporary folder. Before that, send its path to the reaper, which removes it at the end."""
        folder = Path(parent, f"accel_fn_{os.urandom(8).hex()}")
        self._send(str(folder))
        folder.mkdir(mode=0o700)
        return folder

    def watch(self, ranks: Iterable[int]) -> None:
        """Register these ranks: at the end, the reaper kills all processes in their sessions."""
        self._send([*ranks])

    def _send(self, value: object) -> None:
        assert self._process.stdin is not None
        # The reaper may be gone, for example killed. The launch works without it.
        with suppress(OSError):
            self._process.stdin.write(f"{json.dumps(value)}\n".encode())
            self._process.stdin.flush()

    def finish(self) -> None:
        """Let the reaper clean up now, and wait for it."""
        with suppress(OSError):
            self._process.communicate()


def kill_left(ranks: Iterable[int], run_id: str) -> None:
    """Kill processes that are left in the sessions of these ranks, such as workers of loaders.

    A process that has opened its own session is left running: it was meant to stay.
    """
    sessions = {*ranks}
    # Repeat, since a process may have started another one while /proc was read.
    for _ in range(_TRIES):
        left = [pid for pid in _members(sessions) if _is_of(run_id, pid)]
        if not left:
            return
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_WAIT_S)


def _members(sessions: set[int]) -> list[int]:
    """List the living processes of these sessions."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            state, _, _, session, *_ = path.read_text().rpartition(")")[2].split()
            if int(session) in sessions and state not in "ZX":
                found.append(int(path.parent.name))
    return found


def _is_of(run_id: str, pid: int) -> bool:
    """Return whether a process belongs to this run: the system may have reused a rank's process id."""
    with suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return f"TORCHELASTIC_RUN_ID={run_id}".encode() in variables
    return False


def main(run_id: str) -> None:
    """Wait until the launcher's end of the pipe is closed, then clean up."""
    received = [json.loads(line) for line in sys.stdin]
    kill_left((rank for each in received if isinstance(each, list) for rank in each), run_id)
    for each in received:
        if isinstance(each, str):
            shutil.rmtree(each, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
