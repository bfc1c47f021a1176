"""The error that `launch` raises for ranks that failed."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from accel_fn.errors import RankError
from accel_fn.launcher.function.child import CRASH, RAISED, Raised
from accel_fn.launcher.processes.failures import Failure, cause


class RankTraceback(Exception):  # noqa: N818 - it is the cause of an error, and none itself
    """The traceback of an error in the rank that raised it."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def failure_of(
    folder: Path, *, rank: int, pid: int, exit_code: int, failed_at: float, stopped: bool
) -> Failure:
    """Describe a rank that returned nothing, from the files in its folder."""
    raised, crash = _read(folder), folder / CRASH
    return Failure(
        rank=rank,
        host=socket.gethostname(),
        pid=pid,
        exit_code=exit_code,
        time=failed_at if raised is None else raised.time,
        stack=crash.read_text(errors="replace") if crash.is_file() else "",
        exception="" if raised is None else raised.last_line,
        stopped=stopped and raised is None,
    )


def error_of(failures: Sequence[Failure], folders: Mapping[int, Path]) -> Exception:
    """The error of the rank whose failure caused the others'."""
    first = cause(failures)
    where = f"rank {first.rank} of {len(folders)} ({first.host}, pid {first.pid})"
    raised = _read(folders[first.rank])
    if raised is None:
        how = f"ended before fn returned, with {first.last_line}; what it printed may say why"
        if first.signal_name:
            how = f"was killed by {first.last_line}"
        killed = RankError(f"launch: {where} {how}")
        killed.__cause__ = RankTraceback(first.stack) if first.stack else None
        return killed
    try:
        error: Exception = pickle.loads(raised.error)
    except Exception:  # its type can only be loaded in a rank
        error = RankError(raised.last_line)
    error.__cause__ = RankTraceback(raised.traceback)
    error.add_note(f"on {where}")
    return error


def _read(folder: Path) -> Raised | None:
    try:
        found: Raised = pickle.loads((folder / RAISED).read_bytes())
    except FileNotFoundError:
        return None
    return found
