"""prefetch: read the next batches and move them to the device while the loop works."""

from __future__ import annotations

import itertools
import queue
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Generic, overload

import torch
from torch import Tensor

from accel_fn.core.batch import map_tensors
from accel_fn.core.given_batches import carry_mark
from accel_fn.core.state import DistState, check_state
from accel_fn.core.warn import LIBRARIES, warn_user
from accel_fn.core.weights import remember_source
from accel_fn.data.loader import Batch, Epoch, Numbered, ShardedLoader, Source
from accel_fn.data.sampled_batches import SampledBatches
from accel_fn.errors import ArgumentTypeError, check_count, message
from accel_fn.parallel.hang_report import Stack

# On these devices, memory belongs to no stream, so the reading thread copies and waits.
_COPIED = ("mps", "meta")
_REPORT_AFTER_S = 60.0
# At the end of the program, wait this long for a batch that is being read.
_PATIENCE_S = 1.0


@overload
# mypy warns that these overloads overlap. The first match decides, and the narrower type stands
# first.
def prefetch(  # type: ignore[overload-overlap]
    loader: ShardedLoader[Batch], state: DistState, depth: int = 2
) -> ShardedLoader[Batch]: ...
@overload
def prefetch(  # type: ignore[overload-overlap]
    loader: Epoch[Batch], state: DistState, depth: int = 2
) -> Epoch[Batch]: ...
@overload
def prefetch(loader: Iterable[Batch], state: DistState, depth: int = 2) -> Prefetched[Batch]: ...
def prefetch(
    loader: ShardedLoader[Batch] | Epoch[Batch] | Iterable[Batch], state: DistState, depth: int = 2
) -> ShardedLoader[Batch] | Epoch[Batch] | Prefetched[Batch]:
    """Read the next batches, and move them to `state.device`, in a background thread.

    The loop gets the same batches in the same order, and an exception at the place of its batch. A
    pass starts its thread with its first batch. After the loop has ended, by its end, a `break` or
    an error, the thread ends after the batch that it is reading. In a world of several ranks, it
    ends after `depth` more batches, so that all ranks have read equally far.

    Law: the identity on batches and positions. A state counts batches that the loop
    was given, so a resumed run neither loses nor repeats those read ahead.
    Tests: `tests/laws/law08_prefetch.py`.

    Args:
        loader: from `shard_loader` or `group_batches`, one of its epochs, a `DataLoader`,
            or anything else that can be iterated.
        state: this rank's state, which has the device.
        depth: how many batches may be ready before the loop takes them, >= 1.

    Returns:
        The same kind of loader, to be used in its place: `len`, `epochs`, `indices`.

    Raises:
        ValueError: `depth` is not an integer >= 1 (also a TypeError if it is not an integer).
        TypeError: `loader` cannot be iterated, or `state` is not a `DistState`.

    Cost: one thread per pass, one handover between two threads per batch, and the memory of `depth`
    more batches, on the device too. Integer tensors stay in host memory as long as their copies
    live, so that `count_labels` does not wait. Your own sampler is read `depth` batches further, in
    the thread of the loop. On an accelerator (except MPS) a copy is made from pinned memory, on a
    separate stream; the loop's stream waits for it, not the host. On a CPU nothing is copied.
    Without workers, the data set runs in the training's process at the same time, so its draws from
    global random generators are not reproducible: give the `DataLoader` workers, or the data set
    its own generators.

    >>> import torch, accel_fn as af
    >>> data = torch.utils.data.TensorDataset(torch.arange(6))
    >>> state = af.DistState()
    >>> loader = af.shard_loader(torch.utils.data.DataLoader(data, batch_size=4), state)
    >>> [batch[0].tolist() for batch in af.prefetch(loader, state)]
    [[0, 1, 2, 3], [4, 5]]
    """
    check_state("prefetch", state)
    ahead = _Ahead(check_count("prefetch", "depth", depth), state.device, state.world_size > 1)
    if isinstance(loader, ShardedLoader):
        return loader.view(PrefetchedSource(loader._source, ahead))
    if isinstance(loader, Epoch):
        return replace(loader, loader=prefetch(loader.loader, state, depth))
    if not isinstance(loader, Iterable):
        rule = "be a loader, or anything else that can be iterated"
        raise ArgumentTypeError(message("prefetch", "loader", rule, type(loader).__name__))
    return Prefetched(loader, ahead)


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A prefetch's depth and device, and whether all ranks must read equally many batches."""

    depth: int
    device: torch.device
    together: bool

    def mover(self) -> Mover:
        """Make the function that moves the batches of one pass to the device."""
        if self.device.type == "cpu":
            return Mover(self.device)
        return _Copy(self.device) if self.device.type in _COPIED else _SideStream(self.device)


class Prefetched(Generic[Batch]):
    """An iterable that is read ahead. Made by `prefetch`."""

    def __init__(self, loader: Iterable[Batch], ahead: _Ahead) -> None:
        self._loader = loader
        self._ahead = ahead

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        return _Pass(iter(self._loader), self._ahead)


class PrefetchedSource(Generic[Batch]):
    """A `Source` whose passes are read ahead."""

    def __init__(self, source: Source[Batch], ahead: _Ahead) -> None:
        self._source = source
        self._ahead = ahead
        self.num_batches = source.num_batches
        self.facts = source.facts
        self.position = source.position
        self.indices = source.indices
        self.global_indices = source.global_indices

    def batches(
        self, epoch: int | None, first_batch: int, *, by_loop: bool = False
    ) -> Iterator[Batch]:
        return _Pass(self._source.batches(epoch, first_batch, by_loop=by_loop), self._ahead)

    def numbered(self, epoch: int | None, first_batch: int) -> Iterator[Numbered[Batch]]:
        return _Pass(self._source.numbered(epoch, first_batch), self._ahead)


@dataclass(frozen=True, slots=True)
class _End:
    """The end of the batches, with the error if one ended them."""

    error: BaseException | None


class _Handover:
    """Passes batches from the reading thread, which reads one for each permit, to the loop."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.permits = threading.Semaphore(depth)
        self.ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.taken = 0
        """The number of batches that the loop has taken."""
        self.num_reads: int | None = None
        """The number of batches after which the thread ends; None until the loop has ended."""


class Reader(threading.Thread):
    """Reads one pass.

    The thread does not refer to the loop's iterator. So if the loop drops its iterator, Python
    deletes the iterator, and its finalizer ends the thread.
    """

    def __init__(self, batches: Iterator[Any], handover: _Handover, mover: Mover) -> None:
        super().__init__(
            target=_read, args=(batches, handover, mover), name="accel_fn.prefetch", daemon=True
        )


def _read(batches: Iterator[Any], handover: _Handover, mover: Mover) -> None:
    try:
        with mover.around():
            for number in itertools.count():
                handover.permits.acquire()
                if handover.num_reads is not None and number >= handover.num_reads:
                    break
                batch = next(batches, handover)
                # The handover object marks the end: no batch is this object.
                if batch is handover:
                    break
                handover.ready.put(mover.move(batch))
                # Delete the batch, which this frame would otherwise keep in memory while the next
                # one is read.
                del batch
    except BaseException as error:
        handover.ready.put(_End(error))
    else:
        handover.ready.put(_End(None))


class _Pass(Iterator[Any]):
    """The iterator that the loop gets for one pass. It takes batches that a thread has read."""

    def __init__(self, batches: Iterator[Any], ahead: _Ahead) -> None:
        self._batches = batches
        self._ahead = ahead
        self._mover = ahead.mover()
        self._handover = _Handover(ahead.depth)
        self._parts, self._num_each = None, 0
        if isinstance(batches, SampledBatches):
            self._parts, self._num_each = batches.parts, batches.num_each
        self._close: weakref.finalize[..., _Pass] | None = None

    def __next__(self) -> Any:
        handover = self._handover
        if self._close is None:
            self._take_samples(handover.depth)
            reader = Reader(self._batches, handover, self._mover)
            reader.start()
            # Use a finalizer: it runs also if the loop drops this iterator, or the program ends.
            self._close = weakref.finalize(self, _stop, reader, handover, self._ahead.together)
            # From here on, only the thread refers to the batches, so their workers end when it
            # ends.
            del self._batches
            self._reader = reader
        if not self._close.alive:
            raise StopIteration
        try:
            found = handover.ready.get(timeout=_REPORT_AFTER_S)
        except queue.Empty:
            _report(self._reader)
            found = handover.ready.get()
        if isinstance(found, _End):
            self._close()
            if self._parts is not None and found.error is not None:
                self._parts.send_error(found.error)
            try:
                raise StopIteration if found.error is None else found.error
            finally:
                # Delete the reference: otherwise this frame and the error's traceback would keep
                # each other alive.
                del found
        handover.taken += 1
        # Take samples before releasing the permit: the thread may then read the next batch at once,
        # and needs its samples.
        self._take_samples(1)
        handover.permits.release()
        return self._mover.hand_over(found)

    def _take_samples(self, num_batches: int) -> None:
        """Take samples in the thread of the loop, since the loop may change the sampler."""
        if self._parts is not None:
            self._parts.take_ahead(num_batches * self._num_each)


def _report(reader: Reader) -> None:
    """Warn that a batch takes long, and name the line that the reading thread executes."""
    stack = Stack.of_thread(sys._current_frames().get(reader.ident or 0))
    place = stack.place(LIBRARIES)
    warn_user(
        f"prefetch: a batch should come soon, got none for more than {_REPORT_AFTER_S:g} s: its thread is at "
        f"{place or 'a line of the library'}"
    )


def _stop(reader: Reader, handover: _Handover, together: bool) -> None:
    """Make the reading thread end, and wait for it."""
    # If the main thread has ended, this finalizer runs because the program ends.
    ending = not threading.main_thread().is_alive()
    # If ranks exchange messages for each batch, all must read the same number: a rank that stopped
    # early would leave its peers waiting.
    handover.num_reads = handover.taken + handover.depth if together and not ending else 0
    handover.permits.release()
    # The garbage collector may run this in the reading thread, which cannot wait for itself.
    if reader is not threading.current_thread():
        reader.join(_PATIENCE_S if ending else None)


class Mover:
    """Moves batches to a device: `move` runs in the reading thread, `hand_over` in the loop.

    On a CPU, batches stay where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def around(self) -> AbstractContextManager[Any]:
        """Return a context in which the reading thread runs."""
        return nullcontext()

    def move(self, batch: Any) -> Any:
        """Start to move a batch to the device."""
        return batch

    def hand_over(self, moved: Any) -> Any:
        """Return the batch, ready for the loop."""
        return moved


class _Copy(Mover):
    """Copies in the reading thread, which waits for each copy."""

    def move(self, batch: Any) -> Any:
        return map_tensors(self._copied, batch)

    def _copied(self, tensor: Tensor) -> Tensor:
        moved = tensor.to(self.device)
        carry_mark(moved, tensor)
        if tensor.is_cpu:
            remember_source(moved, tensor)
        return moved


class _SideStream(Mover):
    """Copies from pinned memory on a second stream of the accelerator."""

    def __init__(self, device: torch.device) -> None:
        # `device` may have no index. The device of a tensor has one.
        super().__init__(torch.empty(0, device=device).device)
        self.stream = torch.Stream(self.device)

    def around(self) -> AbstractContextManager[Any]:
        # Set the device in the reading thread: otherwise it would pin memory for device 0.
        return torch.accelerator.device_index(self.device.index)

    def move(self, batch: Any) -> tuple[Any, torch.Event]:
        with self.stream:
            moved = map_tensors(self._copied, batch)
        return moved, self.stream.record_event()

    def _copied(self, tensor: Tensor) -> Tensor:
        if tensor.device == self.device:
            return tensor
        source = tensor.pin_memory() if tensor.is_cpu else tensor
        moved = source.to(self.device, non_blocking=True)
        carry_mark(moved, tensor)
        if source.is_cpu:
            remember_source(moved, source)
        return moved

    def hand_over(self, moved: tuple[Any, torch.Event]) -> Any:
        batch, copied = moved
        stream = torch.accelerator.current_stream(self.device)
        stream.wait_event(copied)

        def record_use(tensor: Tensor) -> Tensor:
            if tensor.device == self.device:
                # The memory was allocated on the second stream. Without this call, the allocator
                # could reuse it while the loop's kernels still read it.
                tensor.record_stream(stream)
            return tensor

        return map_tensors(record_use, batch)
