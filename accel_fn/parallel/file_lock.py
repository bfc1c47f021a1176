"""FileLock: only one run at a time writes to a folder or a file.

The lock is a separate file, since NFS locks only files that are open for writing. The run that
holds the lock writes its name to this file, so that the error of a second run can show the name.
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
    """A lock that is held until the object is closed or deleted, or the process ends."""

    __slots__ = ("__weakref__", "_close", "_file", "_path", "owner")

    def __init__(self, path: Path) -> None:
        self._path, flags = path, os.O_RDWR | os.O_NOFOLLOW
        try:
            self._file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            # Open the file without O_CREAT, with which Linux refuses another user's file in a
            # sticky folder.
            self._file = os.open(path, flags)
        self._close = finalize(self, os.close, self._file)
        # Let every user who may save in the folder lock the file. Only the owner can change the
        # mode. If the owner is another user, that user's run has changed it.
        with suppress(OSError):
            os.fchmod(self._file, path.parent.stat().st_mode & 0o666)
        # Close the file in forked workers: a worker that outlives a killed run would keep the lock.
        register_after_fork(self, FileLock.close)
        self.owner = None if self._acquire() else self._read_owner()
        """The name of the other run that holds the lock; None if this run does."""

    def holds(self) -> bool:
        """Return whether the locked file is still at its path: its folder may have been removed."""
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
        # Try for 3 s: after a restart, the killed run may still be ending.
        for left in reversed(range(_TRIES)):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if left:
                    time.sleep(_WAIT_S)
            except OSError:
                # The file system has no locks, so the run continues without one.
                return True
            else:
                os.truncate(self._file, 0)
                os.pwrite(self._file, _own_name().encode(), 0)
                return True
        return False


def _own_name() -> str:
    return f"{socket.gethostname()}, pid {os.getpid()}"
