"""The command line `accel-fn`: each command parses its options, calls the library, and prints."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from contextlib import suppress
from types import FrameType

from accel_fn.launcher.worker import open_streams


def main() -> None:
    """Run the command line."""
    open_streams()
    # Stop ignoring SIGCHLD, if the caller did: otherwise the system would drop the exit codes of
    # ranks, and all would be 0.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # A shell starts background commands with Ctrl-C ignored. Do not change that.
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if sys.argv[1:2] and not ignored:
        signal.signal(signal.SIGINT, _exit_on_ctrl_c)
        _find_temporary_folder()
    # Import click only now. The import takes time, and without a handler, a Ctrl-C in that time
    # would print a traceback.
    from accel_fn.cli.app import app

    app(prog_name="accel-fn")


def _find_temporary_folder() -> None:
    """Find the temporary folder with Ctrl-C blocked: an interrupted search may leave its test file behind."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        # Ignore an error here, since not every command needs a temporary folder.
        with suppress(OSError):
            tempfile.gettempdir()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _exit_on_ctrl_c(number: int, frame: FrameType | None) -> None:
    """Exit on Ctrl-C, until the command or torch's agent handles it.

    A KeyboardInterrupt would not work, since it may get lost in an import of torch.
    """
    try:
        os.write(2, f"accel-fn {sys.argv[1]}: stopped by Ctrl-C\n".encode())
    finally:
        os._exit(128 + number)
