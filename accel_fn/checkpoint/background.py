"""Save asynchronously: write a checkpoint from a copy, in a thread of each rank.

The threads run no collective: another rank could match it with a collective of the training loop.
Instead, the threads of all ranks but rank 0 put a list of their files into the folder when these
are written. Rank 0's thread commits the checkpoint when all lists are there.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from accel_fn.checkpoint.manifest import read_as
from accel_fn.checkpoint.names import rename
from accel_fn.checkpoint.tensors import (
    PAGEABLE,
    Buffers,
    Part,
    Share,
    Written,
    new_buffers,
    write_error,
)
from accel_fn.core.primitives import exchange
from accel_fn.core.state import DistState, Watchdog
from accel_fn.errors import CheckpointError

# A slow disk may block for minutes under many GB, so wait long for a rank that writes nothing. If a
# rank is known to be lost, wait briefly: its files never come.
_TIMEOUT_S, _TIMEOUT_AFTER_LOSS_S = 600.0, 10.0
_POLL_S, _LONGEST_POLL_S = 0.002, 0.1
_REPORT_AFTER_S = 60.0
_LOG = logging.getLogger(__name__)


class Work(Protocol):
    """A job that writes the files of one rank."""

    @property
    def rank(self) -> int: ...
    def write(self, folder: Path) -> Written: ...


class Target(Protocol):
    """Files that several ranks write; readers find them only after the main rank has committed them."""

    @property
    def function(self) -> str:
        """Return the name of the public function that writes."""
        ...

    @property
    def path(self) -> Path:
        """Return the folder that the ranks write into."""
        ...

    @property
    def final(self) -> Path:
        """Return the path of the files after the commit."""
        ...

    def acknowledgement(self, rank: int) -> Path:
        """Return the path of the file by which a rank reports that it has written."""
        ...

    def files_of(self, rank: int) -> Iterable[Path]:
        """Return the files to remove after the rank's write has failed."""
        ...

    def commit(self, written: Sequence[Written]) -> None: ...
    def discard(self) -> None: ...


class Background:
    """Copies and writes one rank's share of each background save; keeps the copy's buffers for the next."""

    def __init__(self) -> None:
        self._buffers: Buffers = {}
        self._writing: Writing | None = None

    def copy(self, share: Share, checkpoint: Target, state: DistState, locks: object) -> Writing:
        """Copy this share, and return a thread that will write it.

        The caller starts the thread after all ranks have copied their shares: a copy may fail on one rank.
        The thread refers to `locks` until it has written, so that no other run can save to the folder.
        """
        self._buffers = _fitting_buffers(share.parts, self._buffers)
        parts, copied = _copied(share.parts, self._buffers)
        return Writing(replace(share, parts=parts), checkpoint, state, copied, locks)

    def start(self, writing: Writing) -> None:
        writing.start()
        self._writing = writing

    def drop(self) -> None:
        """End the thread that was just started, because another rank could not start one."""
        writing, self._writing = self._writing, None
        if writing is not None:
            while writing.is_alive():
                # The folder cannot be removed if the thread adds a file meanwhile, so try again
                # until the thread has ended.
                writing.checkpoint.discard()
                writing.join(_POLL_S)
            writing.finish()

    def finish(self, state: DistState, function: str) -> None:
        """Wait until the thread of the last save has ended; if it failed on one rank, raise on all ranks."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        failure = writing.finish()
        failures = exchange(failure and (str(failure) or repr(failure)), state, function)
        failed = [f"on rank {rank}: {each}" for rank, each in enumerate(failures) if each]
        if failed:
            if state.is_main:
                # Rank 0's thread has removed the folder, but other ranks may have added files
                # since. Now that all threads have ended, remove it again.
                writing.checkpoint.discard()
            raise CheckpointError(
                f"{function}: {writing.checkpoint.final} must have been written in the background, but that "
                f"failed {'; '.join(failed)}"
            ) from failure


def finish_writing(notes: Mapping[str, Any], state: DistState, function: str) -> None:
    """Wait on every rank until the run's save in the background has ended."""
    if "background" in notes:
        notes["background"].finish(state, function)


class Writing(threading.Thread):
    """A thread that writes a rank's share. The process waits for it before its end, and reports a failure."""

    def __init__(
        self,
        share: Work,
        checkpoint: Target,
        state: DistState,
        copied: Sequence[torch.Event],
        locks: object,
    ) -> None:
        super().__init__(name="accel_fn save")
        self.checkpoint = checkpoint
        self._share, self._state, self._copied, self._locks = share, state, copied, locks
        self._failure: Exception | None = None
        self._owner = os.getpid()

    def finish(self) -> Exception | None:
        """Wait until the share is written, warn if that takes long, and return any error."""
        self.join(_REPORT_AFTER_S)
        if self.is_alive():
            _LOG.warning(
                "%s has been waited for for more than %g s: it is being written in the background; does its "
                "file system answer?",
                self.checkpoint.final,
                _REPORT_AFTER_S,
            )
            self.join()
        atexit.unregister(self._report_at_exit)
        return self._failure

    def run(self) -> None:
        checkpoint, rank = self.checkpoint, self._share.rank
        try:
            for event in self._copied:
                event.synchronize()
            written = self._share.write(checkpoint.path)
            if rank:
                _put(checkpoint, rank, asdict(written))
            else:
                ranks = range(1, self._state.world_size)
                others = _wait_for_ranks(checkpoint, ranks, self._state.watchdog)
                checkpoint.commit([written, *others])
        except Exception as error:
            self._failure = error
            atexit.register(self._report_at_exit)
            if rank:
                report_failure(checkpoint, rank, error)
            else:
                checkpoint.discard()
        finally:
            self._locks = None

    def _report_at_exit(self) -> None:
        """Log, at exit, a failure that no later call has raised, and make the exit code 1."""
        # A forked child inherits this exit handler, but only the parent reports the failure.
        if os.getpid() != self._owner:
            return
        failure = str(self._failure) or repr(self._failure)
        checkpoint = self.checkpoint
        _LOG.error("%s: %s was not written: %s", checkpoint.function, checkpoint.final, failure)
        # Store an `_ExitCode` in `sys`. Python deletes the attributes of `sys` at its very end, and
        # the deleted `_ExitCode` then ends the process with exit code 1.
        if __name__ not in vars(sys):
            vars(sys)[__name__] = _ExitCode()


class _ExitCode:
    """Ends the process with exit code 1 when Python deletes it, after exit handlers have run."""

    def __del__(self, end: Callable[[int], None] = os._exit) -> None:
        end(1)


def _fitting_buffers(parts: Sequence[Part], buffers: Buffers) -> Buffers:
    """Return a buffer for each part: the one of the last save if it fits, else a new one."""
    found: Buffers = {}
    missing: dict[bool, list[Part]] = {True: [], False: []}
    for part in parts:
        key, tensor = (part.name, part.offsets), part.tensor
        buffer = buffers.get(key)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            missing[tensor.device.type not in PAGEABLE].append(part)
        else:
            found[key] = buffer
    for pinned, each in missing.items():
        found |= new_buffers(each, pinned=pinned)
    return found


def _copied(parts: Sequence[Part], buffers: Buffers) -> tuple[list[Part], list[torch.Event]]:
    """Start to copy the parts to host memory; return the copies, and events after which they are complete."""
    copies = [replace(part, tensor=buffers[part.name, part.offsets]) for part in parts]
    with torch.no_grad():
        for part, copy in zip(parts, copies, strict=True):
            copy.tensor.copy_(part.tensor, non_blocking=True)
    devices = {part.tensor.device for part in parts if not part.tensor.is_cpu}
    streams = map(torch.accelerator.current_stream, devices)
    # The events are recorded after these copies, so waiting for them waits for the copies.
    return copies, [stream.record_event() for stream in streams]


# An acknowledgement is a small file in which a rank reports that it has written its files, or that
# it failed. It is removed before the commit.


def report_failure(target: Target, rank: int, error: Exception) -> None:
    """Report that this rank failed; remove its files first, since the disk may be full."""
    with suppress(OSError, CheckpointError):
        for path in target.files_of(rank):
            path.unlink()
        _put(target, rank, {"failure": str(error) or repr(error)})


def _wait_for_ranks(
    target: Target, ranks: Sequence[int], watchdog: Watchdog | None
) -> list[Written]:
    """Wait until all these ranks have written, and return the list of files of each.

    Raises if a rank reports a failure, or if the folder has not grown for ten minutes (for ten
    seconds, once a collective of this rank has found that a rank is lost).
    """
    found: dict[int, Written] = {}
    size, poll_s, since = -1, _POLL_S, 0.0
    while True:
        for rank in ranks:
            path = target.acknowledgement(rank)
            if rank not in found and path.exists():
                content = json.loads(path.read_text())
                path.unlink()
                if "failure" in content:
                    raise CheckpointError(f"rank {rank}: {content['failure']}")
                found[rank] = read_as(Written, content, path.name)
        missing = [rank for rank in ranks if rank not in found]
        if not missing:
            return [found[rank] for rank in ranks]
        before, size = size, _size_of(target.path)
        if size != before:
            since = time.monotonic()
        has_lost_rank = watchdog is not None and watchdog.has_lost_rank
        timeout_s = _TIMEOUT_AFTER_LOSS_S if has_lost_rank else _TIMEOUT_S
        if time.monotonic() > since + timeout_s:
            raise CheckpointError(
                f"{target.function}: every rank must write its share, got nothing of {missing} for "
                f"{timeout_s:g} s"
            )
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)


def _put(target: Target, rank: int, content: Mapping[str, Any]) -> None:
    path = target.acknowledgement(rank)
    half = path.with_suffix(".half")
    try:
        half.write_text(json.dumps(content))
        rename(half, path)
    except OSError as error:
        raise write_error(target.path, error) from error


def _size_of(folder: Path) -> int:
    size = 0
    try:
        for path in folder.iterdir():
            with suppress(FileNotFoundError):
                # Another rank may have renamed the file since `iterdir` listed it.
                size += path.stat().st_size
    except OSError as error:
        raise write_error(folder, error) from error
    return size
