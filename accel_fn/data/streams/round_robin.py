"""Round robin over one stream: every rank reads it all and keeps its part of every batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, ClassVar

from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from accel_fn.core.collectives import all_or_none
from accel_fn.core.primitives import exchange
from accel_fn.core.split_batch import part_bounds
from accel_fn.core.warn import warn_user
from accel_fn.data.empty_part import EmptyPart
from accel_fn.data.order import Cut, mix
from accel_fn.data.streams.read_stream import Passes, Stream, WorkerInit, WorkerStream, options_of
from accel_fn.data.streams.stream_options import StreamOptions
from accel_fn.data.streams.stream_source import StreamSource
from accel_fn.errors import check_equal
from accel_fn.parallel.messages import Channel

_BLOCK = 16
_NUM_HASHED, _FEWEST = 16, 8
"""Items that ranks compare, and how many of them must differ from each other: others may say nothing."""


class RoundRobinSource(StreamSource):
    """A `Source`: every rank reads the stream and keeps its part of every global batch."""

    def __init__(
        self, loader: DataLoader[Any], options: StreamOptions, rank: int, channel: Channel | None
    ) -> None:
        super().__init__(loader, options, rank)
        self._channel = channel
        self._has_compared = False
        seed = options.seed
        # The cut of batches that every rank reads whole is that of one rank, and so are their random numbers.
        place = rank if self._cut.world_size > 1 else 0
        stream_of = partial(
            RoundRobinStream, data=loader.dataset, cut=self._cut, rank=place, seed=seed
        )
        kept, worker_seed = options_of(loader, WorkerInit), mix(seed) + place
        collated = partial(stream_of, collate_fn=self._collate)
        self._passes = Passes(collated, kept, worker_seed)
        once = {**kept, "persistent_workers": False}
        self._counting = Passes(partial(stream_of, collate_fn=_nothing), once, worker_seed)

    def _start(self, epoch: int, first_batch: int, *, keeps: bool) -> Iterator[Any]:
        items = self._passes.start(epoch, first_batch, keeps=keeps)
        if self._channel is None:
            return until_end(items, None, first_batch)
        channel = self._channel.another()
        return channel.sending_errors(until_end(items, channel, first_batch, self._compare))

    def _compare(self, every: list[Sequence[int] | None]) -> None:
        """Warn once, on the main rank, if ranks have read other items from the start of the stream."""
        if self._has_compared or None in every:
            return
        self._has_compared = True
        known = any(len({*each}) > _FEWEST for each in every if each is not None)
        if known and any(each != every[0] for each in every) and self._rank == 0:
            warn_user(
                f"shard_loader: {self._name} should give the same items on every rank, each of which reads "
                f"it all and keeps its part, got others among the first {_NUM_HASHED}, so samples are lost "
                "and doubled; draw from torch's, NumPy's or Python's global generator, which is seeded, "
                "or seed your own by the epoch alone"
            )

    def _count(self, epoch: int) -> Iterator[Any]:
        return until_end(self._counting.start(epoch, 0), None, 0)

    def position(self, step: int, window: int = 1) -> tuple[int, int]:
        """Find the position; ranks that read for it compare what they find."""
        find = partial(super().position, step, window)
        if self._channel is None or self._num_items is not None:
            return find()
        state = self._channel.state
        place = all_or_none(find, state, "epochs")
        check_equal(
            [
                f"epoch {epoch} and batch {batch}"
                for epoch, batch in exchange(place, state, "epochs")
            ],
            f"epochs: loader must be over the same stream on every rank, with one place after {step} steps",
            "give every rank the whole stream",
        )
        return place


def _nothing(items: list[Any]) -> None:
    """Collate to nothing, to count batches only."""


def parts_of_stream(
    stream: Stream, cut: Cut, rank: int, *, first_batch: int = 0, stride: int = 1
) -> Iterator[list[Any]]:
    """Yield a rank's part of every `stride`-th global batch of a stream, from `first_batch` on.

    Items outside the part are let go as soon as that is known, so that a rank
    holds at most a part and about a quarter of a batch.
    """
    skipped = first_batch
    while True:
        with stream.reading():
            stream.drop(skipped * cut.batch_size)
            held, start, num_read, example = _read_batch(stream, cut, rank)
        size = cut.next_size(num_read)
        if size == 0:
            return
        first, stop = part_bounds(size, cut.world_size, rank)
        yield held[first - start : stop - start] or EmptyPart(example)
        del held, example  # not held while the next one is read
        if num_read < cut.batch_size:
            return
        skipped = stride - 1


def _read_batch(stream: Stream, cut: Cut, rank: int) -> tuple[list[Any], int, int, list[Any]]:
    """Read a batch; return its items that are in a rank's part, the place of the first, and the count.

    Last is a list of one item of the batch.
    """
    # The stream may end inside of the batch, and a rank's part depends on the number of items. So of
    # the items read so far, those stay that any number from here on may put into this part.
    held: list[Any] = []
    example: list[Any] = []
    start, count = 0, 0
    _, stop = part_bounds(cut.batch_size, cut.world_size, rank)
    block = max(_BLOCK, cut.batch_size // cut.world_size // 4)
    while count < cut.batch_size:
        wanted = min(block, cut.batch_size - count)
        items = stream.take(wanted)
        held += items[: max(0, stop - count)]
        example = example or items[:1]
        count += len(items)
        first, _ = part_bounds(count, cut.world_size, rank)
        held, start = held[first - start :], first
        if len(items) < wanted:
            break
    return held, start, count, example


@dataclass(frozen=True, slots=True)
class End:
    """The end of a pass, with the number of items of the whole stream."""

    num_items: int


@dataclass(frozen=True, slots=True)
class Noted:
    """A batch with the hashes of the first items of its stream."""

    batch: Any
    hashes: Sequence[int]

    def pin_memory(self) -> Noted:
        """Pin the batch, as torch's loader asks for."""
        return Noted(pin_memory(self.batch), self.hashes)  # type: ignore[no-untyped-call]


@dataclass(eq=False)
class RoundRobinStream(WorkerStream):
    """Worker w of n collates this rank's part of every n-th batch from the w-th on; then an `End`.

    Each worker reads the whole stream, and the data set takes itself for alone.
    """

    reads: ClassVar = "in batch {}"

    cut: Cut
    collate_fn: Callable[[list[Any]], Any]

    def __iter__(self) -> Iterator[Any]:
        epoch, first_batch, keeps = self.place.tolist()  # now: a persistent worker's place moves on
        info = self.worker()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        in_worker = info is not None
        stream = Stream(
            self.data,
            epoch,
            seed=self.seed,
            keeps=bool(keeps),
            in_worker=in_worker,
            num_hashed=_NUM_HASHED if worker == 0 else 0,
        )
        first_batch += worker
        parts = parts_of_stream(
            stream, self.cut, self.rank, first_batch=first_batch, stride=num_workers
        )
        batches: Iterator[Any] = map(self.collate_fn, parts)
        if worker == 0:
            batches = _noted(batches, stream)
        if info is not None:
            batches = self._recorded(batches, count(first_batch, num_workers))
        return self._ended(batches, stream)

    def _ended(self, batches: Iterator[Any], stream: Stream) -> Iterator[Any]:
        yield from batches
        yield End(stream.num_read)

    def _recorded(self, batches: Iterator[Any], numbers: Iterator[int]) -> Iterator[Any]:
        """Yield the batches, and record which one this worker reads."""
        assert self.progress is not None
        for number in numbers:
            self.progress.begin(number)
            batch = next(batches, self)  # at the end this is `self`, which is no batch
            self.progress.end()
            if batch is self:
                return
            yield batch


def _noted(batches: Iterator[Any], stream: Stream) -> Iterator[Any]:
    """Yield batches, the first one after enough items with their hashes."""
    for batch in batches:
        if len(stream.hashes) == _NUM_HASHED:
            yield Noted(batch, stream.hashes)
            break
        yield batch
    yield from batches


def until_end(
    items: Iterator[Any],
    channel: Channel | None,
    first_batch: int,
    compare: Callable[[list[Sequence[int] | None]], None] | None = None,
) -> Iterator[Any]:
    """Yield the batches of a pass, whose workers end with it.

    With a channel, ranks exchange before each batch whether they have one. All raise where some have
    none, or have read another number of items at the end. `compare` is called with the hashes of their
    first items.
    """
    with closing(items):  # type: ignore[type-var]
        for batch, item in enumerate(items, start=first_batch):
            end = item.num_items if isinstance(item, End) else None
            hashes = None
            if isinstance(item, Noted):
                item, hashes = item.batch, item.hashes
            if channel is not None:
                every = channel.exchange((end, hashes))
                _check_ends([each for each, _ in every], batch)
                if compare is not None and hashes is not None:
                    compare([each for _, each in every])
            if end is not None:
                # The other workers yield an `End` too; the pass is over when all have.
                for _ in items:
                    pass
                return
            yield item


def _check_ends(ends: list[int | None], batch: int) -> None:
    check_equal(
        ["more to come" if end is None else f"its end after {end} items" for end in ends],
        f"shard_loader: loader must be over the same stream on every rank, also before batch {batch}",
        "give every rank the whole stream",
    )
