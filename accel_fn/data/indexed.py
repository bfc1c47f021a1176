"""Loaders over data sets that can be indexed: their order, and this rank's part of every batch.

If a loader reads its data in order or shuffled, ranks compute the order and exchange nothing. Any
other sampler runs on rank 0, with random numbers that depend on seed and epoch, and rank 0 sends
every rank its part.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accel_fn.core.mesh_axes import ranks_along
from accel_fn.core.split_batch import part_bounds
from accel_fn.core.state import DistState, mesh_of
from accel_fn.data.collate import EmptyPart
from accel_fn.data.fetch import BatchReader
from accel_fn.data.loader import Numbered, ShardedLoader
from accel_fn.data.order import (
    ItemOrder,
    Order,
    WholeOrder,
    check_sizes,
    find_by_counting,
    knows_ranks,
    length_of,
    mix,
    no_numbers,
    per_rank_error,
)
from accel_fn.data.random_generators import Generators, generators_of
from accel_fn.data.sampled_batches import SampledBatches, SampledParts
from accel_fn.data.set_epoch import InEpoch, LoopEpochs, may_sample, reached_from
from accel_fn.errors import ArgumentError, ArgumentTypeError, check_count, check_equal, message
from accel_fn.parallel.messages import Channel

# Compute and send the order of about this many samples together: that takes little longer than for
# one batch.
_SAMPLES_AT_ONCE = 4096
_DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_KNOWN = (*_DRAWING, SequentialSampler, BatchSampler, list, tuple, range)

PEEK = "each iter(loader) is the next pass; peek on every rank, or at loader.loader"
"""The repair that an error names if ranks are in different passes of a loader."""

Batch = Any
"""A list of samples, or the key of a batch that the data set has ready."""


def read_order(
    loader: Any,
    state: DistState,
    *,
    batch: str,
    split: str,
    read_ahead: int | None,
    collates_whole: bool,
    order: str,
) -> Order | SamplerBatches:
    """Read and check the order of a loader; `batch` states whether its batch size is global or one rank's.

    With `collates_whole`, every rank reads and collates the samples of all ranks.
    """
    if split != "auto":
        rule = "be left out for a data set that can be indexed"
        raise ArgumentError(message("shard_loader", "split", rule, split))
    found = _read_order(loader, state, batch)
    if order == "torch" and any(map(_is_torchdatas, nested_samplers(outermost(loader)))):
        rule = 'be "seed" or "distributed" for a StatefulDataLoader, whose sampler seeds itself'
        raise ArgumentError(message("shard_loader", "order", rule, order))
    if isinstance(found, Order):
        found = replace(found, order=order)
    else:
        refuse_order(order)
    if collates_whole and isinstance(found, SamplerBatches):
        found = replace(found, collates_whole=True)
    elif collates_whole and not isinstance(found, ItemOrder):
        found = WholeOrder(**asdict(found))
    if isinstance(found, SamplerBatches) and found.is_own:
        return replace(found, at_once=1 + _num_beyond(loader, read_ahead))
    refuse_read_ahead(read_ahead)
    return found


def refuse_order(order: str) -> None:
    """Refuse "torch" and "distributed" for a stream, and for a sampler neither in order nor shuffled."""
    if order != "seed":
        rule = "be left out for a stream or a sampler that is neither in order nor shuffle=True"
        raise ArgumentError(message("shard_loader", "order", rule, order))


def refuse_read_ahead(read_ahead: int | None) -> None:
    """Refuse `read_ahead` for a loader without a sampler of the user: the loop cannot change its order."""
    if read_ahead is not None:
        rule = "be left out for a loader without a sampler of your own"
        raise ArgumentError(message("shard_loader", "read_ahead", rule, read_ahead))


def _num_beyond(loader: DataLoader[Any], read_ahead: int | None) -> int:
    """Return how many batches the loop takes ahead, beyond those that the workers read ahead."""
    least = loader.num_workers * (loader.prefetch_factor or 0)
    if read_ahead is None:
        return 0
    if check_count("shard_loader", "read_ahead", read_ahead, minimum=0) < least:
        rule = f"be >= {least}, as the workers read ahead"
        repair = "use fewer workers or a smaller prefetch_factor"
        raise ArgumentError(message("shard_loader", "read_ahead", rule, read_ahead, repair))
    return read_ahead - least


def _read_order(loader: Any, state: DistState, batch: str) -> Order | SamplerBatches:
    _check(loader)
    batch_sampler, seed = outermost(loader), _seed(loader, state)
    is_ready = loader.batch_sampler is None
    if batch == "per_rank" and is_ready:
        raise per_rank_error("batch_size=None", "a data set or a sampler")
    if is_ready and _goes_through(batch_sampler, loader.dataset):
        shuffle, size = _is_of(batch_sampler, RandomSampler), len(loader.dataset)
        order = ItemOrder(1, 1, drop_last=False, num_samples=size, shuffle=shuffle, seed=seed)
        check_sizes("shard_loader", order, size)
        return order
    if not _is_of(batch_sampler, BatchSampler):
        if batch == "per_rank":
            raise per_rank_error(type(batch_sampler).__name__, "a batch_sampler")
        length = length_of(batch_sampler)
        return SamplerBatches(batch_sampler, seed, length=length, gives_keys=is_ready)
    sampler, drop_last = batch_sampler.sampler, batch_sampler.drop_last
    batch_size = check_count("shard_loader", "batch_size", batch_sampler.batch_size)
    batch_size *= state.world_size if batch == "per_rank" else 1
    plain = _goes_through(sampler, loader.dataset)
    num_samples = length_of(loader.dataset if plain else sampler)
    cut = None
    if num_samples is not None:
        cut = Order(
            num_samples=num_samples,
            batch_size=batch_size,
            world_size=state.world_size,
            shuffle=_is_of(sampler, RandomSampler),
            drop_last=drop_last,
            seed=seed,
        )
        check_sizes("shard_loader", cut, num_samples, "data set" if plain else "sampler")
    if plain and cut is not None:
        return cut
    batches = BatchSampler(sampler, batch_size, drop_last)
    return SamplerBatches(batches, seed, cut)


def _check(loader: Any) -> None:
    """Refuse other types than DataLoader, and unordered, unsized or already sharded loaders."""
    if not isinstance(loader, DataLoader):
        repair = "give it the loader that was sharded" if isinstance(loader, ShardedLoader) else ""
        name = type(loader).__name__
        raise ArgumentError(
            message("shard_loader", "loader", "be a torch DataLoader", name, repair)
        )
    # A sampler may hold another one in any attribute and at any depth.
    held = reached_from(outermost(loader), may_sample)
    nested = nested_samplers(outermost(loader))
    for sampler in [*nested, *(each for each in held if isinstance(each, Sampler))]:
        if isinstance(sampler, DistributedSampler) or knows_ranks(sampler):
            rule, name = "not be sharded over ranks already", type(sampler).__name__
            repair = "leave that sampler out, and use shuffle=True if it shuffles"
            raise ArgumentError(message("shard_loader", "loader", rule, name, repair))
    if loader.num_workers and not getattr(loader, "in_order", True):
        rule = "keep batches in order, by which a run knows its position"
        raise ArgumentError(message("shard_loader", "loader", rule, "in_order=False"))
    if length_of(loader.dataset) is None and _is_of(loader.sampler, SequentialSampler):
        rule, name = "have a length, or a sampler", type(loader.dataset).__name__
        raise ArgumentTypeError(message("shard_loader", "data set", rule, name))


def outermost(loader: DataLoader[Any]) -> Any:
    """Return the batch sampler; without one, return the sampler, which yields keys of ready batches."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _is_of(sampler: Any, kind: type) -> bool:
    """Return whether the class is exactly `kind`, or torchdata's replacement for it.

    A StatefulDataLoader replaces torch's samplers by classes of the same name.
    """
    return type(sampler) is kind or (
        _is_torchdatas(sampler) and type(sampler).__name__ == kind.__name__
    )


def _is_torchdatas(sampler: Any) -> bool:
    return type(sampler).__module__.startswith("torchdata.")


def _goes_through(sampler: Any, dataset: Any) -> bool:
    """Return whether the sampler yields every sample of the data set once, in order or shuffled.

    If so, ranks compute the order, and no rank runs the sampler.
    """
    if not (_is_of(sampler, SequentialSampler) or _is_of(sampler, RandomSampler)):
        return False
    again = getattr(sampler, "replacement", False) or getattr(sampler, "_num_samples", None)
    return not again and length_of(sampler.data_source) == length_of(dataset)


def _seed(loader: DataLoader[Any], state: DistState) -> int:
    """Return the state's seed, mixed with the seed of a generator that the user gave."""
    # Skip torchdata's samplers: each process makes their generator with another seed.
    samplers = [each for each in nested_samplers(outermost(loader)) if not _is_torchdatas(each)]
    for generator in (loader.generator, *(getattr(each, "generator", None) for each in samplers)):
        if isinstance(generator, torch.Generator):
            return mix(mix(state.seed) + generator.initial_seed())
    return state.seed


class IndexedSource:
    """A `Source`: this rank's part of every batch of a pure `Order`."""

    def __init__(self, loader: DataLoader[Any], order: Order, rank: int, world_size: int) -> None:
        self.order = order
        self._is_of_items = isinstance(order, ItemOrder)
        # Every rank reads each whole item, a ready batch, and cuts it. So all ranks use the order
        # of rank 0.
        self.rank = 0 if self._is_of_items else rank
        is_whole = isinstance(order, WholeOrder)
        self._read_order = replace(order, world_size=1) if is_whole else order
        self._read_rank = 0 if is_whole else self.rank
        self._reader = BatchReader(loader, rank, world_size, collates_whole=is_whole)
        self.num_batches = order.num_batches
        self.facts = order.facts

    def batches(
        self, epoch: int | None, first_batch: int, *, by_loop: bool = False
    ) -> Iterator[Any]:
        load = partial(self._reader.batches, by_loop=by_loop)
        return self._read(load, self._parts(epoch, first_batch), epoch, first_batch)

    def numbered(self, epoch: int | None, first_batch: int) -> Iterator[Numbered[Any]]:
        return self._read(
            self._reader.numbered, self._parts(epoch, first_batch), epoch, first_batch
        )

    def _parts(self, epoch: int | None, first_batch: int) -> Iterator[Tensor | EmptyPart]:
        return parts_of(self._read_order, self._read_rank, epoch or 0, first_batch)

    def _read(
        self,
        load: Callable[..., Iterator[Any]],
        parts: Iterator[Any],
        epoch: int | None,
        first_batch: int,
    ) -> Iterator[Any]:
        if self._is_of_items:
            parts = map(int, parts)
        return load(parts, epoch=epoch, first_batch=first_batch, seed=self.order.seed)

    def position(self, step: int, window: int = 1) -> tuple[int, int]:
        return divmod(step, -(-self.num_batches() // window))

    def indices(self, epoch: int, batch: int) -> Tensor:
        return self.order.indices(epoch, self._checked(batch), self.rank)

    def global_indices(self, epoch: int, batch: int) -> Tensor:
        return self.order.global_indices(epoch, self._checked(batch))

    def _checked(self, batch: int) -> int:
        if self._is_of_items:
            raise no_numbers()
        last = self.num_batches() - 1
        if batch > last:
            raise ArgumentError(message("indices", "batch", f"be in 0 .. {last}", batch))
        return batch


def parts_of(order: Order, rank: int, epoch: int, first_batch: int) -> Iterator[Tensor | EmptyPart]:
    """Yield a rank's samples, batch by batch. Compute the samples of many batches together."""
    # The last batch may have another size, so compute its part separately.
    last = order.num_batches() - 1
    start, stop = order.part(0, rank) if last > 0 else (0, 0)
    at_once = max(1, _SAMPLES_AT_ONCE // max(1, stop - start))
    for first in range(first_batch, last, at_once):
        several = range(first, min(first + at_once, last))
        if start == stop:
            yield from [_empty(order, epoch, batch) for batch in several]
            continue
        batches = torch.arange(several.start, several.stop).unsqueeze(1)
        places = batches * order.batch_size + torch.arange(start, stop)
        yield from order.samples(epoch, places.flatten()).view(places.shape).unbind()
    if first_batch <= last:
        part = order.indices(epoch, last, rank)
        yield part if len(part) else _empty(order, epoch, last)


def _empty(order: Order, epoch: int, batch: int) -> EmptyPart:
    return EmptyPart(order.global_indices(epoch, batch)[:1].tolist())


@dataclass(frozen=True, slots=True)
class SamplerBatches:
    """Reads the global batches of every epoch from a sampler."""

    # Yields the indices of each batch, or one key per batch if the data set returns whole batches.
    batch_sampler: Iterable[Any]
    # Seeds all random numbers that the sampler draws.
    seed: int
    # The cut into batches, if the number of samples is known before the sampler runs.
    cut: Order | None = None
    # The number of batches of a batch sampler.
    length: int | None = None
    # The number of batches that are read together. None: as many as have some thousand samples.
    at_once: int | None = None
    # Whether the data set returns ready batches, each by its key.
    gives_keys: bool = False
    # Whether every rank collates the samples of all ranks.
    collates_whole: bool = False

    @property
    def is_own(self) -> bool:
        """Return whether a sampler has a user's class: the loop may change such a sampler during a pass."""
        return any(type(each) not in _KNOWN for each in nested_samplers(self.batch_sampler))

    def facts(self) -> dict[str, Any]:
        """Return the facts that a resumed run must share, if they are known before the sampler runs."""
        return {"seed": self.seed} if self.cut is None else self.cut.facts()

    def num_batches(self) -> int | None:
        """Return the number of batches of an epoch; None without a length."""
        return self.length if self.cut is None else self.cut.num_batches()

    def batches(self, epoch: int, *, keeps: bool = False) -> Iterator[Batch]:
        """Yield an epoch's batches; with `keeps`, the sampler keeps its current epoch.

        Refuse an epoch without a batch, a batch without a sample, and a number of batches that
        differs from the length of the sampler, since positions are computed from that length.
        """
        function, number = "shard_loader", 0
        promised = None if self.cut is None else self.cut.num_batches()
        for number, batch in enumerate(self._read(epoch, keeps=keeps), start=1):
            if isinstance(batch, list) and not batch:
                where = f"none in batch {number - 1} of epoch {epoch}"
                raise ArgumentError(message(function, "sampler", "give samples", where))
            if promised is not None and number > promised:
                break
            yield batch
        if number == 0:
            where = f"none in epoch {epoch}"
            raise ArgumentError(message(function, "sampler", "give samples", where))
        if self.cut is not None and number != promised:
            rule = f"give as many samples as its len, {self.cut.num_samples}, in every epoch"
            got = f"{'fewer' if number < self.cut.num_batches() else 'more'} in epoch {epoch}"
            repair = "correct its __len__, or leave it out"
            raise ArgumentError(f"{function}: sampler must {rule}, got {got}; {repair}")

    def _read(self, epoch: int, *, keeps: bool) -> Iterator[Batch]:
        """Run the sampler in this epoch, with its own random numbers, and yield its batches."""
        seed = mix(mix(self.seed) + epoch)
        sampler = _with_generator(self.batch_sampler, torch.Generator().manual_seed(seed))
        # Enter the contexts for each read only: between two reads, the loop has its own random
        # numbers and epochs.
        readers = reached_from(sampler, may_sample)
        inside: list[AbstractContextManager[Any]] = [InEpoch(readers, None if keeps else epoch)]
        if foreign := [each for each in nested_samplers(sampler) if type(each) not in _KNOWN]:
            own = {id(held): held for each in foreign for held in generators_of(each)}
            inside.insert(0, Generators(seed, list(own.values())))
        batches: Iterator[Batch] | None = None
        while True:
            with ExitStack() as stack:
                for context in inside:
                    stack.enter_context(context)
                if batches is None:
                    batches = map(_key if self.gives_keys else plain, iter(sampler))
                several = self.take(batches)
            if not several:
                return
            yield from several

    def take(self, batches: Iterator[Batch]) -> list[Batch]:
        """Return the next batches that are read together; an empty list at the end."""
        if self.at_once is not None:
            return list(islice(batches, self.at_once))
        found, num_samples = [], 0
        for batch in batches:
            found.append(batch)
            num_samples += len(batch) if isinstance(batch, list) else 1
            if num_samples >= _SAMPLES_AT_ONCE:
                break
        return found


def nested_samplers(sampler: Any) -> list[Any]:
    """List a sampler and its inner samplers, the outermost first."""
    found: list[Any] = []
    while sampler is not None and not any(sampler is each for each in found):
        found.append(sampler)
        sampler = getattr(sampler, "sampler", None)
    return found


def _with_generator(sampler: Any, generator: torch.Generator) -> Any:
    """Copy a torch sampler, so that it draws from `generator`; return other samplers unchanged."""
    if type(sampler) is BatchSampler:
        inner = _with_generator(sampler.sampler, generator)
        return BatchSampler(inner, sampler.batch_size, sampler.drop_last)
    if type(sampler) in _DRAWING:
        sampler = copy.copy(sampler)
        sampler.generator = generator
    return sampler


def plain(batch: Iterable[Any]) -> list[Any]:
    """Make a list with Python integers, which are faster to send and use than NumPy's or tensors."""
    return [number if type(number) is int else _number(number) for number in batch]


def _key(key: Any) -> Batch:
    """Convert a list, a range or an array to a list of indices; return any other key unchanged."""
    is_list = isinstance(key, list | range) or getattr(key, "ndim", 0) > 0
    return plain(key) if is_list else _number(key)


def _number(number: Any) -> Any:
    try:
        return operator.index(number)
    except TypeError:
        # Not an integer: the data set has keys of another type.
        return number


class SamplerSource:
    """A `Source`: this rank's part of every batch of a sampler that rank 0 runs.

    Without a channel, every rank runs the sampler, with the same random numbers.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        sampling: SamplerBatches,
        state: DistState,
        channel: Channel | None,
    ) -> None:
        is_whole = sampling.collates_whole
        self._reader = BatchReader(loader, state.rank, state.world_size, collates_whole=is_whole)
        self._sampling = sampling
        self._rank = state.rank
        self._world_size = state.world_size
        self._channel = channel
        self._num_ahead = loader.num_workers * (loader.prefetch_factor or 0)
        self._loop_epochs = LoopEpochs(sampling.batch_sampler, may_sample)
        self.facts = sampling.facts

    def num_batches(self) -> int:
        """Return the number of batches of an epoch; raise if the sampler has no length."""
        num_batches = self._sampling.num_batches()
        if num_batches is None:
            rule, name = "have a length", type(self._sampling.batch_sampler).__name__
            repair = "iterate without it, or give the sampler a __len__"
            raise ArgumentTypeError(message("len", "the loader's sampler", rule, name, repair))
        return num_batches

    def batches(
        self, epoch: int | None, first_batch: int, *, by_loop: bool = False
    ) -> Iterator[Any]:
        """Yield an epoch's parts from `first_batch` on. All ranks iterate together."""
        keeps = by_loop and self._loop_epochs.are_set()
        load = partial(self._reader.batches, by_loop=by_loop)
        return self._read(load, epoch, first_batch, keeps=keeps)

    def numbered(self, epoch: int | None, first_batch: int) -> Iterator[Numbered[Any]]:
        return self._read(self._reader.numbered, epoch, first_batch)

    def _read(
        self,
        load: Callable[..., Iterator[Any]],
        epoch: int | None,
        first_batch: int,
        *,
        keeps: bool = False,
    ) -> Iterator[Any]:
        channel = None if self._channel is None else self._channel.another()
        parts = self._parts(channel, epoch or 0, first_batch, keeps=keeps)
        seed = self._sampling.seed
        sampled = SampledParts(parts, self._num_ahead, None if channel is None else channel.fail)
        found = load(sampled, epoch=epoch, first_batch=first_batch, seed=seed)
        return SampledBatches(found, sampled)

    def position(self, step: int, window: int = 1) -> tuple[int, int]:
        """Compute the position if the sampler has a length. Otherwise run it; all ranks must call this."""
        if self._sampling.cut is not None:
            return divmod(step, -(-self.num_batches() // window))

        def found(ranks: Sequence[Any]) -> list[tuple[int, int]]:
            return [find_by_counting(step, self._sampling.batches, window)] * len(ranks)

        if self._channel is None:
            return found([None])[0]
        place: tuple[int, int] = self._channel.another().via_main(None, found)
        return place

    def indices(self, epoch: int, batch: int) -> Tensor:
        part = _part(self._batch(epoch, batch), self._rank, self._world_size)
        return _numbers([] if isinstance(part, EmptyPart) else part)

    def global_indices(self, epoch: int, batch: int) -> Tensor:
        return _numbers(self._batch(epoch, batch))

    def _batch(self, epoch: int, batch: int) -> Batch:
        if self._channel is not None:
            name = type(self._sampling.batch_sampler).__name__
            rule = "go through its data in order or with shuffle=True"
            repair = "a sampler of your own is run on rank 0 alone"
            raise ArgumentError(message("indices", "loader", rule, name, repair))
        found = next(islice(self._sampling.batches(epoch), batch, None), None)
        if found is None:
            raise ArgumentError(message("indices", "batch", f"be one of epoch {epoch}", batch))
        return found

    def _parts(
        self, channel: Channel | None, epoch: int, first_batch: int, *, keeps: bool
    ) -> Iterator[Batch]:
        """Yield this rank's samples of each batch, or all samples if every rank collates whole batches.

        With a channel, rank 0 takes the batches and sends each rank its part.
        """
        batches = islice(self._sampling.batches(epoch, keeps=keeps), first_batch, None)
        is_whole = self._sampling.collates_whole
        if channel is None:
            place = (0, 1) if is_whole else (self._rank, self._world_size)
            yield from (_part(batch, *place) for batch in batches)
            return
        # Ranks along `dp` divide a batch; ranks that differ only along other axes take the same
        # part.
        shape, world_size = mesh_of(channel.state), channel.state.world_size
        along = [ranks_along(shape, "dp", rank) for rank in range(world_size)]
        places = [(ranks.index(rank), len(ranks)) for rank, ranks in enumerate(along)]
        if is_whole:
            places = [(0, 1)] * world_size

        def parts_of_ranks(starts: list[tuple[int, int]]) -> list[list[Batch]]:
            check_equal(
                [f"epoch {epoch} from batch {batch}" for epoch, batch in starts],
                "shard_loader: ranks must go through the same epochs together",
                PEEK,
            )
            several = self._sampling.take(batches)
            return [[_part(batch, *place) for batch in several] for place in places]

        while parts := channel.via_main((epoch, first_batch), parts_of_ranks):
            yield from parts


def _part(batch: Batch, rank: int, world_size: int) -> Batch:
    """Return a rank's samples of a batch, or the key of a ready batch, which every rank reads."""
    if not isinstance(batch, list):
        return batch
    start, stop = part_bounds(len(batch), world_size, rank)
    return batch[start:stop] or EmptyPart(batch[:1])


def _numbers(batch: Batch) -> Tensor:
    if not isinstance(batch, list):
        raise no_numbers()
    try:
        return torch.tensor(batch, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        rule = "name samples by whole numbers"
        raise ArgumentError(message("indices", "sampler", rule, batch[0])) from error
