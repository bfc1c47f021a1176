"""Writing a checkpoint while the run goes on: from a copy, in a thread of each rank.

The threads enter no collective, which would meet those of the run: each tells in a file of the
draft what it has written, and rank 0's gives the checkpoint its name when it has heard of all.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accel_fn.base.state import DistState
from accel_fn.checkpoint.background.acknowledge import hear, tell_failure, tell_written
from accel_fn.checkpoint.background.commit import Draft
from accel_fn.checkpoint.format.shard_plan import Part
from accel_fn.checkpoint.format.write import Share
from accel_fn.comm.primitives import exchange
from accel_fn.errors import CheckpointError

_PINS = ("cuda", "xpu")
"""Devices that copy to pinned memory of the host without waiting."""
Room = dict[tuple[str, tuple[int, ...]], Tensor]
"""Host memory for the parts that this rank writes, kept from save to save."""


class Background:
    """What saving in the background keeps of a run, on one rank: room for a copy, and the writing."""

    def __init__(self) -> None:
        self._room: Room = {}
        self._writing: Writing | None = None

    def copy(self, share: Share, draft: Draft, state: DistState, held: object) -> Writing:
        """The writing of a copy of this share, not started yet: another rank may fail to copy its own.

        `held` lives as long as the writing takes.
        """
        self._room = _room_for(share.parts, self._room)
        parts, ready = _copied(share.parts, self._room)
        return Writing(replace(share, parts=parts), draft, state, ready, held)

    def start(self, writing: Writing) -> None:
        """Have it written."""
        writing.start()
        self._writing = writing

    def drop(self) -> None:
        """Wait for what was just started to come to nothing: another rank could not start its own."""
        if self._writing is not None:
            self._writing.finish()
            self._writing = None

    def finish(self, state: DistState, function: str) -> None:
        """Wait for what is being written; where that failed on one rank, all raise."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        failure = writing.finish()
        said = exchange(failure and (str(failure) or repr(failure)), state, function)
        failed = [f"on rank {rank}: {words}" for rank, words in enumerate(said) if words]
        if failed:
            if state.is_main:
                writing.draft.discard()  # others may have written into it until now
            raise CheckpointError(
                f"{function}: {writing.draft.final} must have been written in the background, but that "
                f"failed {'; '.join(failed)}"
            ) from failure


def finish_writing(notes: Mapping[str, Any], state: DistState, function: str) -> None:
    """Wait for what a run has in the background, if anything. Called on every rank."""
    if "background" in notes:
        notes["background"].finish(state, function)


class Writing:
    """A share that a thread writes. A process that ends waits for it, and says if it failed."""

    def __init__(
        self,
        share: Share,
        draft: Draft,
        state: DistState,
        ready: Sequence[torch.Event],
        held: object,
    ) -> None:
        self._share = share
        self.draft = draft
        self._world_size = state.world_size
        self._watch = state.watchdog
        self._ready = ready
        self._held = held
        self._failure: Exception | None = None
        self._owner = os.getpid()
        # No daemon: Python waits for such a thread before anything at exit.
        self._thread = threading.Thread(target=self._run, name="accel_fn save")

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def finish(self) -> Exception | None:
        """Wait until it is written; what went wrong."""
        self._thread.join()
        atexit.unregister(self._say_at_exit)
        return self._failure

    def _run(self) -> None:
        try:
            for copied in self._ready:
                copied.synchronize()
            written = self._share.write(self.draft.path)
            if self._share.rank:
                tell_written(self.draft.path, self._share.rank, written)
            else:
                others = hear(self.draft.path, range(1, self._world_size), self._watch)
                self.draft.publish([written, *others])
        except Exception as error:
            self._failure = error
            atexit.register(self._say_at_exit)
            if self._share.rank:
                tell_failure(self.draft.path, self._share.rank, error)
            else:
                self.draft.discard()
        finally:
            self._held = None

    def _say_at_exit(self) -> None:
        """The last chance to tell of a failure: no later call has. The exit code is then 1."""
        if os.getpid() != self._owner:  # a fork of it, which may end as it likes
            return
        failure = str(self._failure) or repr(self._failure)
        print(f"accel_fn: save: {self.draft.final} was not written: {failure}", file=sys.stderr)
        if __name__ not in vars(sys):  # which Python clears last of all
            vars(sys)[__name__] = _ExitCode()


class _ExitCode:
    """Ends the process with exit code 1 where it is let go of: handlers have run, files are closed."""

    def __del__(self, end: Callable[[int], None] = os._exit) -> None:
        end(1)


def _room_for(parts: Sequence[Part], room: Room) -> Room:
    """The room that is there where it fits, new memory where it does not."""
    found: Room = {}
    for part in parts:
        key, tensor = (part.name, part.offsets), part.tensor
        old = room.get(key)
        if old is None or (old.shape, old.dtype) != (tensor.shape, tensor.dtype):
            pinned = tensor.device.type in _PINS
            old = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        found[key] = old
    return found


def _copied(parts: Sequence[Part], room: Room) -> tuple[list[Part], list[torch.Event]]:
    """The parts in host memory, and the events after which they are there."""
    copies = [replace(part, tensor=room[part.name, part.offsets]) for part in parts]
    with torch.no_grad():
        for part, copy in zip(parts, copies, strict=True):
            copy.tensor.copy_(part.tensor, non_blocking=True)
    devices = {part.tensor.device for part in parts if not part.tensor.is_cpu}
    streams = map(torch.accelerator.current_stream, devices)
    return copies, [stream.record_event() for stream in streams]  # later kernels come after these
