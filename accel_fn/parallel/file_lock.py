"""FileLock: one run at a time writes to a folder or a file.

The lock is a file of its own: NFS locks only what is open for writing, and the file holds the name of the
run that the error of a second one gives.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import suppress
from multiprocessing.util import register_after_fork
from pathlib import Path
from weakref import finalize

_TRIES, _WAIT_S = 60, 0.05


class FileLock:
    """A lock that is held until this is closed or deleted, or the process ends in whatever way."""

    __slots__ = ("__weakref__", "_close", "_file", "_path", "owner")

    def __init__(self, path: Path) -> None:
        self._path, flags = path, os.O_RDWR | os.O_NOFOLLOW
        try:
            self._file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            # Without O_CREAT, which Linux refuses for another user's file in a sticky folder.
            self._file = os.open(path, flags)
        self._close = finalize(self, os.close, self._file)
        # Whoever may save here may lock it. If it is another user's, that user has set its mode.
        with suppress(OSError):
            os.fchmod(self._file, path.parent.stat().st_mode & 0o666)
        # A worker that outlives a killed run would hold its folder.
        register_after_fork(self, FileLock.close)
        self.owner = None if self._acquire() else self._read_owner()
        """The run that holds the lock, if it is another one."""

    def holds(self) -> bool:
        """Return whether this is still the file at its path, and not one of a folder that was removed."""
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except OSError:
            return False

    def close(self) -> None:
        self._close()

    def _read_owner(self) -> str:
        owner = os.pread(self._file, 200, 0).decode(errors="replace") or "another process"
        return f"another step of this process ({owner})" if owner == _own_name() else owner

    def _acquire(self) -> bool:
        # Tried for 3 s: a run that was killed, and is restarted now, may still be ending.
        for left in reversed(range(_TRIES)):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if left:
                    time.sleep(_WAIT_S)
            except OSError:
                # The file system has no locks.
                return True
            else:
                os.truncate(self._file, 0)
                os.pwrite(self._file, _own_name().encode(), 0)
                return True
        return False


def _own_name() -> str:
    return f"{socket.gethostname()}, pid {os.getpid()}"
