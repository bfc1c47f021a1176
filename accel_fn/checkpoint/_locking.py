"""One run at a time saves to a folder."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from accel_fn._errors import CheckpointError

_NAME = ".lock"
_TRIES, _WAIT_S = 60, 0.05


def lock_folder(folder: Path) -> IO[str]:
    """A file that holds the folder as long as it is open, which ends with this process at the latest."""
    file = (folder / _NAME).open("a+")
    for left in reversed(
        range(_TRIES)
    ):  # a run that was killed may have workers that are still ending
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if left:
                time.sleep(_WAIT_S)
        except OSError:
            return file  # a file system without locks
        else:
            file.truncate(0)
            file.write(f"{socket.gethostname()}, pid {os.getpid()}")
            file.flush()
            return file
    with suppress(OSError):
        file.seek(0)
    owner = file.read() or "another process"
    file.close()
    raise CheckpointError(
        f"save: {folder} must be saved to by one run at a time, got a second one beside {owner}; "
        "give each run a folder of its own"
    )
