"""Streams over ranks: each rank reads the whole stream and keeps its parts, or reads its shards."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from accel_fn.core.collectives import all_or_none
from accel_fn.core.primitives import exchange
from accel_fn.core.state import DistState
from accel_fn.core.warn import warn_user
from accel_fn.data.collate import Collate, EmptyPart, ReadyBatch, WholeBatch
from accel_fn.data.loader import Numbered, unnumbered
from accel_fn.data.order import (
    Cut,
    find_by_counting,
    knows_ranks,
    length_of,
    mix,
    per_rank_error,
)
from accel_fn.data.read_stream import (
    NUM_HASHED,
    End,
    Noted,
    PartStream,
    Passes,
    Split,
    WorkerInit,
    options_of,
    shard_of,
)
from accel_fn.data.set_epoch import LoopEpochs, may_hold_samples
from accel_fn.errors import (
    ArgumentError,
    ArgumentTypeError,
    StateError,
    check_count,
    check_equal,
    message,
)
from accel_fn.parallel.messages import Channel

_FEWEST = 8
"""Ranks are compared only if their first items have more different hashes than this: a stream of
equal items would show nothing."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options that must be the same on all ranks; without a `split`, ranks read round robin."""

    cut: Cut
    world_size: int
    split: Split | None
    num_items: int | None
    seed: int
    collates_whole: bool
    """Whether every rank collates the items of all ranks; `cut` then has a world size of 1."""


def read_stream_options(
    loader: DataLoader[Any], state: DistState, *, batch: str, split: str, collates_whole: bool
) -> StreamOptions:
    """Read and check the options of a loader."""
    cut = _cut(loader, state, batch)
    if collates_whole:
        if split == "workers":
            rule = 'be "round_robin" beside collate="global", for which every rank reads all items'
            raise ArgumentError(message("shard_loader", "split", rule, split))
        cut, split = replace(cut, world_size=1), "round_robin"
    return StreamOptions(
        cut,
        state.world_size,
        _split(loader, state, split, cut.batch_size),
        length_of(loader.dataset),
        state.seed,
        collates_whole,
    )


def _cut(loader: DataLoader[Any], state: DistState, batch: str) -> Cut:
    if loader.num_workers and not getattr(loader, "in_order", True):
        rule = "be True over a stream, whose batches ranks could not match otherwise"
        raise ArgumentError(message("shard_loader", "in_order", rule, False))
    by_node = getattr(loader.dataset, "_distributed", None) is not None
    if by_node or knows_ranks(loader.dataset):
        rule, name = "be over a whole data set, not one rank's part", type(loader.dataset).__name__
        repair = "leave out split_dataset_by_node, or its rank: shard_loader splits it over ranks"
        raise ArgumentError(message("shard_loader", "loader", rule, name, repair))
    if loader.batch_size is None:
        if batch == "per_rank":
            raise per_rank_error("batch_size=None", "a data set")
        # Each item is a global batch, and every rank reads all items, so the cut has a world size
        # of 1.
        return Cut(1, 1, drop_last=False)
    batch_size = check_count("shard_loader", "batch_size", loader.batch_size)
    if batch == "per_rank":
        batch_size *= state.world_size
    return Cut(batch_size, state.world_size, loader.drop_last)


def _split(loader: DataLoader[Any], state: DistState, option: str, batch_size: int) -> Split | None:
    data, readers = loader.dataset, max(1, loader.num_workers)
    if option == "auto":
        most = _num_shards(data)
        if most is not None:
            readers = min(readers, most // state.world_size)
    if loader.batch_size is None:
        if option == "workers":
            rule = 'be "round_robin" for a stream of ready batches, which every rank reads'
            raise ArgumentError(message("shard_loader", "split", rule, option))
        return None
    can_be_split = option == "workers" or (option == "auto" and hasattr(data, "shard"))
    # With fewer samples in a batch than ranks, some ranks would have no rows, and never read their
    # shards.
    is_shared = state.world_size * readers > 1 and batch_size >= state.world_size
    if not can_be_split or not is_shared:
        return None
    if state.group is None and state.world_size > 1:
        raise StateError(
            f"shard_loader: state must carry a process group to split a stream over {state.world_size} "
            'ranks, got one built by hand; take it from af.init(), or use split="round_robin"'
        )
    split = Split("shard" if option == "auto" else "workers", state.world_size, readers)
    if split.kind == "shard":
        shard_of(data, split.num_readers, state.rank * readers)
    return split


def _num_shards(data: Any) -> int | None:
    """Return the number of shards that a data set states in an attribute; None without one."""
    count = getattr(data, "num_shards", getattr(data, "n_shards", None))
    return count if isinstance(count, int) else None


class StreamSource:
    """A `Source` over a stream: computes positions from the stream's length, or finds them by reading."""

    def __init__(
        self, loader: DataLoader[Any], options: StreamOptions, rank: int, channel: Channel | None
    ) -> None:
        collate = Collate(loader.collate_fn)
        self._collate: Collate | ReadyBatch | WholeBatch = collate
        if options.collates_whole:
            self._collate = WholeBatch(collate, rank, options.world_size)
        if loader.batch_size is None:
            self._collate = ReadyBatch(loader.collate_fn, rank, options.world_size)
        self._options = options
        # Shards may be uneven, so the length of the stream does not determine the number of
        # batches.
        self._num_items = options.num_items if options.split is None else None
        self._rank = rank
        self._channel = channel
        self._name = type(loader.dataset).__name__
        self._loop_epochs = LoopEpochs(loader.dataset, may_hold_samples)
        self._has_compared = False
        cut, split = options.cut, options.split
        init: Callable[[Any], WorkerInit] = WorkerInit
        if split is not None and split.kind == "workers":
            init = partial(
                WorkerInit, first=rank * split.readers_per_rank, num_workers=split.num_readers
            )
        kept = options_of(loader, init)
        if split is not None and loader.num_workers:
            kept["num_workers"] = split.readers_per_rank
        # If the cut has a world size of 1, every rank reads whole batches, and so uses rank 0's
        # random numbers.
        place = rank if cut.world_size > 1 else 0
        part_stream = partial(
            PartStream, data=loader.dataset, cut=cut, split=split, rank=place, seed=options.seed
        )
        seed = mix(options.seed) + place
        self._passes = Passes(partial(part_stream, collate_fn=self._collate), kept, seed)
        once = {**kept, "persistent_workers": False}
        self._counting = Passes(partial(part_stream, collate_fn=_nothing), once, seed)

    def num_batches(self) -> int:
        if self._num_items is not None:
            return self._options.cut.count(self._num_items)
        if self._options.split is not None:
            rule, repair = "be read as a whole", 'use split="round_robin", or count batches'
            raise ArgumentTypeError(message("len", "stream", rule, "shards", repair))
        repair = "count batches as they come, or give the data set one"
        raise ArgumentTypeError(message("len", "data set", "have a __len__", self._name, repair))

    def facts(self) -> dict[str, int | None]:
        return {
            "num_samples": self._options.num_items,
            "batch_size": self._options.cut.batch_size,
            "drop_last": self._options.cut.drop_last,
            "seed": self._options.seed,
        }

    def batches(
        self, epoch: int | None, first_batch: int, *, by_loop: bool = False
    ) -> Iterator[Any]:
        """Yield an epoch's batches from `first_batch` on; earlier batches are read and dropped.

        Errors get a note that names their batch. The main rank warns if the data set's length is
        wrong.
        """
        epoch = epoch or 0
        keeps = by_loop and self._loop_epochs.are_set()
        items = self._passes.start(epoch, first_batch, keeps=keeps)
        channel = None if self._channel is None else self._channel.another()
        if self._options.split is None:
            batches = until_end(items, channel, first_batch, self._compare)
        else:
            assert channel is not None
            batches = until_all_end(items, channel, first_batch, self._collate)
        if channel is not None:
            batches = channel.sending_errors(batches)
        return self._checked(batches, epoch, first_batch)

    def numbered(self, epoch: int | None, first_batch: int) -> Iterator[Numbered[Any]]:
        return unnumbered(self.batches(epoch, first_batch))

    def _checked(self, batches: Iterator[Any], epoch: int, count: int) -> Iterator[Any]:
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                break
            except Exception as error:
                where = f"batch {count} of epoch {epoch} on rank {self._rank}"
                error.add_note(f"shard_loader: while waiting for {where}")
                raise
            yield batch
            count += 1
        is_main = self._rank == 0
        if is_main and self._num_items is not None and count != self.num_batches():
            warnings.warn(
                f"shard_loader: {self._name} has the length {self._num_items}, {self.num_batches()} batches, "
                f"but epoch {epoch} ended at batch {count}; a run that is resumed counts on the length",
                stacklevel=2,
            )

    def position(self, step: int, window: int = 1) -> tuple[int, int]:
        """Compute the position from the length; without one, all ranks read the stream up to it."""
        if self._num_items is not None and self.num_batches() > 0:
            return divmod(step, -(-self.num_batches() // window))
        find = partial(find_by_counting, step, self._count, window)
        # With shards, ranks exchange messages before each batch that they count, so all find the
        # same position.
        if self._channel is None or self._options.split or self._num_items is not None:
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

    def _count(self, epoch: int) -> Iterator[Any]:
        """Yield one item for each batch of an epoch, for counting."""
        items = self._counting.start(epoch, 0)
        if self._options.split is None:
            return until_end(items, None, 0)
        assert self._channel is not None
        channel = self._channel.another()
        return channel.sending_errors(until_all_end(items, channel, 0, _nothing))

    def _compare(self, every: list[Sequence[int] | None]) -> None:
        """Warn once, on the main rank, if ranks have read different items at the stream's start."""
        if self._has_compared or None in every:
            return
        self._has_compared = True
        known = any(len({*each}) > _FEWEST for each in every if each is not None)
        if known and any(each != every[0] for each in every) and self._rank == 0:
            warn_user(
                f"shard_loader: {self._name} should give the same items on every rank, each of which reads "
                f"it all and keeps its part, got others among the first {NUM_HASHED}, so samples are lost "
                "and doubled; draw from torch's, NumPy's or Python's global generator, which is seeded, "
                "or seed your own by the epoch alone"
            )

    def indices(self, epoch: int, batch: int) -> Tensor:
        """Refuse the call, since items of a stream have no numbers."""
        rule = "be over a data set that can be indexed"
        value = f"{self._name} for batch {batch} of epoch {epoch}"
        raise ArgumentError(message("indices", "loader", rule, value))

    global_indices = indices


def _nothing(items: list[Any]) -> None:
    """Drop the items of a batch: a collate_fn for counting batches."""


def until_all_end(
    items: Iterator[Any],
    channel: Channel,
    first_batch: int,
    collate_fn: Callable[[list[Any]], Any],
) -> Iterator[Any]:
    """Yield the batches of a rank's shards, then empty batches until all ranks' shards end.

    Before each batch, ranks exchange whether they have one.
    """
    example: bytes | None = None
    with closing(items):  # type: ignore[type-var]
        for number in count():
            # `items` stands for the end, since no batch is this object.
            item = next(items, items)
            if isinstance(item, Noted):
                item, example = item.batch, example or item.note
            if number < first_batch:
                continue
            every = channel.exchange((item is not items, example is not None))
            if not any(has_batch for has_batch, _ in every):
                return
            knowing = [rank for rank, (_, knows) in enumerate(every) if knows]
            if number == first_batch and 0 < len(knowing) < len(every):
                # A rank without items takes an item of another rank, which shows the form of its
                # empty batches.
                mine = example if channel.state.rank == knowing[0] else None
                example = channel.exchange(mine)[knowing[0]]
            if item is not items:
                yield item
            else:
                yield None if example is None else collate_fn(EmptyPart(pickle.loads(example)))


def until_end(
    items: Iterator[Any],
    channel: Channel | None,
    first_batch: int,
    compare: Callable[[list[Sequence[int] | None]], None] | None = None,
) -> Iterator[Any]:
    """Yield the batches of a pass; its workers end when the pass ends.

    With a channel, ranks exchange before each batch whether they have one. All ranks raise if only
    some have one, or if they have read different numbers of items at the end. `compare` gets the
    hashes of all ranks' first items.
    """
    with closing(items):  # type: ignore[type-var]
        for batch, item in enumerate(items, start=first_batch):
            end = item.num_items if isinstance(item, End) else None
            hashes = None
            if isinstance(item, Noted):
                item, hashes = item.batch, item.note
            if channel is not None:
                every = channel.exchange((end, hashes))
                _check_ends([each for each, _ in every], batch)
                if compare is not None and hashes is not None:
                    compare([each for _, each in every])
            if end is not None:
                # The other workers yield an `End` too; the pass is over when all of them have.
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
