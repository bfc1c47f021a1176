"""Start the ranks that run a function, wait for them and stop them."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_fn.errors import RankError
from accel_fn.launcher.function.child import CALL, RAISED, VALUE, Raised
from accel_fn.launcher.function.notebook import NO_PIPE
from accel_fn.launcher.processes.failures import Failure, cause, read_crash
from accel_fn.launcher.processes.private_folder import parent_of_store, store_variables
from accel_fn.launcher.processes.reaper import Reaper, kill_left

_POLL_S, _SETTLE_S, _STOP_WITHIN_S = 0.02, 0.5, 3.0
"""A rank that lost a peer often ends before that peer has written its own error, which takes less than
half a second; ranks get three seconds to save their work after SIGTERM."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One process, and the folder into which it writes its result."""

    number: int
    folder: Path
    process: subprocess.Popen[bytes]

    def has_ended(self) -> bool:
        """Has it exited, or written why it will?"""
        return self.process.poll() is not None or (self.folder / RAISED).exists()

    def has_failed(self) -> bool:
        """Has it ended without a result?"""
        return self.has_ended() and not (self.folder / VALUE).exists()

    def raised(self) -> Raised | None:
        """Its exception; None if it was killed or exited."""
        try:
            found: Raised = pickle.loads((self.folder / RAISED).read_bytes())
        except FileNotFoundError:
            return None
        return found


class RankTraceback(Exception):  # noqa: N818 - it is the cause of an error, and none itself
    """The traceback of an error in the rank that raised it."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def run_ranks(
    call: bytes,
    variables: Sequence[Mapping[str, str]],
    cpus: Sequence[str],
    displays: int | None = None,
) -> list[Any]:
    """Run a pickled call on a rank for each set of variables; return the results in rank order.

    If ranks fail, raise the error of the rank that caused it, once all have ended. In a notebook,
    rank 0 sends what it displays to `displays`.
    """
    reaper = Reaper(variables[0]["TORCHELASTIC_RUN_ID"])
    folder = reaper.make_folder(tempfile.gettempdir())
    store = reaper.make_folder(parent_of_store(os.environ))
    met = store_variables(store, 0, variables[0]["MASTER_PORT"], os.environ)
    ranks: list[Rank] = []
    try:
        (folder / CALL).write_bytes(call)
        for number, own in enumerate(variables):
            ranks.append(_start(number, {**own, **met}, cpus[number], folder, displays))
            # One at a time: if this process is killed here, no started rank is left behind.
            reaper.watch([ranks[-1].process.pid])
        failed_at = _wait(ranks)
        if failed_at is not None:
            raise _failure(ranks, failed_at)
        # Not a comprehension, which is a frame in some Pythons: `_result` counts frames to warn.
        return list(map(_result, ranks))
    finally:
        _stop(ranks)
        kill_left([rank.process.pid for rank in ranks], reaper.run_id)
        reaper.finish()


def _start(
    number: int, variables: Mapping[str, str], cpus: str, folder: Path, displays: int | None
) -> Rank:
    own = folder / str(number)
    own.mkdir()
    code = (
        f"import sys; sys.path[:] = {[str(each) for each in sys.path]!r}; "
        "from accel_fn.launcher.function.child import main; main(*sys.argv[1:])"
    )
    pipe = "" if displays is None else str(NO_PIPE if number else displays)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(os.getpid()), cpus, str(folder), pipe],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        pass_fds=[] if displays is None or number else [displays],
        # Ctrl-C on a terminal reaches the caller alone, which stops the ranks.
        start_new_session=True,
    )
    return Rank(number, own, process)


def _wait(ranks: Sequence[Rank]) -> float | None:
    """Wait until all have ended, or `_SETTLE_S` after one has failed; return when it failed."""
    failed_at = None
    while not all(rank.has_ended() for rank in ranks):
        if failed_at is None and any(rank.has_failed() for rank in ranks):
            failed_at = time.time()
        if failed_at is not None and time.time() > failed_at + _SETTLE_S:
            return failed_at
        time.sleep(_POLL_S)
    return failed_at or (time.time() if any(rank.has_failed() for rank in ranks) else None)


def _failure(ranks: Sequence[Rank], failed_at: float) -> Exception:
    """Stop all ranks; return the error of the rank whose failure caused the others'."""
    running = {rank.number for rank in ranks if not rank.has_ended()}
    _stop(ranks)
    failures = []
    for rank in ranks:
        if rank.has_failed():
            raised = rank.raised()
            failures.append(
                Failure(
                    rank=rank.number,
                    host=socket.gethostname(),
                    pid=rank.process.pid,
                    exit_code=rank.process.returncode,
                    time=raised.time if raised else failed_at,
                    stack=read_crash(rank.folder),
                    exception=raised.last_line if raised else "",
                    stopped=rank.number in running and not raised,
                )
            )
    first = cause(failures)
    where = f"rank {first.rank} of {len(ranks)} ({first.host}, pid {first.pid})"
    raised = ranks[first.rank].raised()
    if raised is None:
        how = f"ended before fn returned, with {first.last_line}; see what it printed"
        if first.signal_name:
            how = f"was killed by {first.last_line}"
        killed = RankError(f"launch: {where} {how}")
        killed.__cause__ = RankTraceback(first.stack) if first.stack else None
        return killed
    try:
        error: Exception = pickle.loads(raised.error)
    except Exception:
        # The type of the error can only be loaded in a rank.
        error = RankError(raised.last_line)
    error.__cause__ = RankTraceback(raised.traceback)
    error.add_note(f"on {where}")
    return error


def _result(rank: Rank) -> Any:
    code = rank.process.wait()
    if code:
        warnings.warn(
            f"launch: rank {rank.number} ended with exit code {code} after fn had returned",
            RuntimeWarning,
            stacklevel=4,
        )
    return pickle.loads((rank.folder / VALUE).read_bytes())


def _stop(ranks: Sequence[Rank]) -> None:
    """Stop ranks that still run, and the processes that they have started."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        running = [rank.process for rank in ranks if rank.process.poll() is None]
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, sent)
        deadline = time.monotonic() + _STOP_WITHIN_S
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
