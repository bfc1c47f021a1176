"""A source of batches over a data set that can only be iterated: positions, lengths, notes on errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from accel_fn.data.collate import Collate, ReadyBatch, WholeBatch
from accel_fn.data.loader import Numbered, unnumbered
from accel_fn.data.order import find_by_counting
from accel_fn.data.set_epoch import LoopEpochs, may_hold_samples
from accel_fn.data.streams.stream_options import StreamOptions
from accel_fn.errors import ArgumentError, ArgumentTypeError, message


class StreamSource:
    """A `Source` whose positions are computed if the data set has a length, else found by reading."""

    def __init__(self, loader: DataLoader[Any], options: StreamOptions, rank: int) -> None:
        collate = Collate(loader.collate_fn)
        self._collate: Collate | ReadyBatch | WholeBatch = collate
        if options.collates_whole:
            self._collate = WholeBatch(collate, rank, options.world_size)
        if loader.batch_size is None:
            self._collate = ReadyBatch(loader.collate_fn, rank, options.world_size)
        self._cut = options.cut
        self._num_items = options.num_items
        self._seed = options.seed
        self._rank = rank
        self._name = type(loader.dataset).__name__
        self._loop_epochs = LoopEpochs(loader.dataset, may_hold_samples)

    _start: Callable[..., Iterator[Any]]
    """Start a pass: this rank's batches of an epoch, from one on."""
    _count: Callable[[int], Iterator[Any]]
    """Yield something for each batch of an epoch, at less cost than the batches."""

    def num_batches(self) -> int:
        if self._num_items is None:
            repair = "count batches as they come, or give the data set one"
            raise ArgumentTypeError(
                message("len", "data set", "have a __len__", self._name, repair)
            )
        return self._cut.count(self._num_items)

    def facts(self) -> dict[str, int | None]:
        return {
            "num_samples": self._num_items,
            "batch_size": self._cut.batch_size,
            "drop_last": self._cut.drop_last,
            "seed": self._seed,
        }

    def batches(
        self, epoch: int | None, first_batch: int, *, by_loop: bool = False
    ) -> Iterator[Any]:
        """Yield an epoch's batches from one on; those before it are read and dropped.

        Errors get a note with their batch. The main rank warns of a length that is wrong.
        """
        epoch = epoch or 0
        keeps = by_loop and self._loop_epochs.are_set()
        return self._checked(self._start(epoch, first_batch, keeps=keeps), epoch, first_batch)

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

    def num_samples(self, epoch: int, batch: int) -> int | None:
        """Return nothing: workers read the items, and give batches."""

    def position(self, step: int, window: int = 1) -> tuple[int, int]:
        """Compute the position, or find it by reading from the start."""
        if self._num_items is not None and self.num_batches() > 0:
            return divmod(step, -(-self.num_batches() // window))
        return find_by_counting(step, self._count, window)

    def indices(self, epoch: int, batch: int) -> Tensor:
        """Refuse the call, since items of a stream have no numbers."""
        rule = "be over a data set that can be indexed"
        value = f"{self._name} for batch {batch} of epoch {epoch}"
        raise ArgumentError(message("indices", "loader", rule, value))

    global_indices = indices
