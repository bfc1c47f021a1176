"""The order of an epoch and its cut into batches and parts: pure functions of indices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from accel_fn.core.split_batch import part_bounds
from accel_fn.errors import ArgumentError, message

# The number of rounds of `permute`; sets of fewer than `_FEW` samples need more. With fewer rounds,
# the orders of 20,000 neighbouring keys fail a chi-square test.
_FEW = 64
_ROUNDS, _ROUNDS_OF_FEW = 10, 24
# 2**64 divided by the golden ratio: the increment of SplitMix64.
_MIX = 0x9E3779B97F4A7C15
# A mask for the low 64 bits.
_LOW = (1 << 64) - 1
_31, _33 = np.uint64(31), np.uint64(33)

_OF_RANK = (("num_replicas", "rank"), ("world_size", "rank"), ("num_processes", "process_index"))

_Numbers = npt.NDArray[np.uint64]


def permute(indices: Tensor, num_samples: int, key: int) -> Tensor:
    """Return the entries at these indices of a pseudo-random permutation of 0 .. num_samples - 1.

    A generalized Feistel network over a grid, with about the square root of num_samples in each
    direction, permutes the cells of the grid. Cells that land outside of 0 .. num_samples - 1 are
    permuted again until they land inside (cycle walking).

    Args:
        indices: [num_indices], int64, on the CPU, each in 0 .. num_samples - 1.
        num_samples: the size of the permutation, 1 .. 2**62.
        key: selects the permutation.

    Returns:
        [num_indices], int64. All indices together give every number once.

    Cost: O(num_indices) in time and memory, for any num_samples.

    Source: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains";
    the hash in each round is the high bits of a square, as in Widynski 2020, "Squares".

    >>> import torch
    >>> from accel_fn.data.order import permute
    >>> sorted(permute(torch.arange(10), 10, key=7).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    columns = math.isqrt(num_samples - 1) + 1
    rows = -(-num_samples // columns)
    keys = _round_keys(key, _ROUNDS_OF_FEW if num_samples < _FEW else _ROUNDS)
    found = _feistel(indices.numpy().view(np.uint64), rows, columns, keys)
    while len(outside := np.flatnonzero(found >= np.uint64(num_samples))):
        found[outside] = _feistel(found[outside], rows, columns, keys)
    return torch.from_numpy(found.view(np.int64))


def _feistel(cells: _Numbers, num_rows: int, num_columns: int, keys: _Numbers) -> _Numbers:
    """Permute the cells of a grid: each round adds a hash of the column to the row, and swaps the two."""
    size, other_size = np.uint64(num_rows), np.uint64(num_columns)
    place, other = np.divmod(cells, other_size)
    moved = np.empty_like(place)
    for multiplier, addend in keys:
        np.multiply(other, multiplier, out=moved)
        moved += addend
        # Square the hash: a linear hash would keep the distances between neighbours.
        moved *= moved
        moved >>= _33
        moved *= size
        # The product and this shift scale 31 bits of the hash to 0 .. size - 1.
        moved >>= _31
        place += moved
        np.subtract(place, size, out=moved)
        # Take the remainder by `size` without a division: if place < size, the difference wraps to
        # a huge number, and the minimum is `place`.
        np.minimum(place, moved, out=place)
        place, other, size, other_size = other, place, other_size, size
    return place * other_size + other


def _round_keys(key: int, num_rounds: int) -> _Numbers:
    """Return a multiplier and an addend for each round."""
    numbers = [mix(key + index * _MIX) for index in range(2 * num_rounds)]
    return np.array(numbers, dtype=np.uint64).reshape(num_rounds, 2)


def mix(value: int) -> int:
    """Hash an integer by SplitMix64's finaliser: 64 bits that depend on all bits of `value`."""
    value &= _LOW
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _LOW
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _LOW
    return value ^ (value >> 31)


@dataclass(frozen=True, slots=True)
class Cut:
    """Pure rules that split samples into global batches, and batches into ranks' parts.

    Batches do not depend on the world size. If a batch has fewer samples than there are ranks, the
    last ranks get an empty part.
    """

    # The number of samples in a global batch.
    batch_size: int
    world_size: int
    # Whether to drop a last batch that is not full.
    drop_last: bool

    def count(self, num_samples: int) -> int:
        """Return the number of batches into which `num_samples` samples are cut, equal on every rank."""
        full, tail = divmod(num_samples, self.batch_size)
        return full + (tail > 0 and not self.drop_last)

    def next_size(self, num_left: int) -> int:
        """Return the size of the next batch if `num_left` samples are left; 0 at the end."""
        if num_left >= self.batch_size:
            return self.batch_size
        return 0 if self.drop_last else num_left


@dataclass(frozen=True, slots=True)
class Order(Cut):
    """Assigns samples to batches and epochs, for every rank. Pure."""

    num_samples: int
    # Whether each epoch has a new permutation, instead of the data set's order.
    shuffle: bool
    seed: int
    # The permutation: "seed" (a pure function of seed and epoch), "distributed" (the one of
    # DistributedSampler) or "torch" (drawn by rank 0; see drawn_order.py).
    order: str = "seed"

    def num_batches(self) -> int:
        """Return the number of batches of an epoch, equal on every rank."""
        return self.count(self.num_samples)

    def facts(self) -> dict[str, Any]:
        """Return all fields except the number of ranks, by name."""
        return {name: value for name, value in asdict(self).items() if name != "world_size"}

    def bounds(self, batch: int) -> tuple[int, int]:
        """Return start and stop of a global batch in the epoch's order."""
        start = batch * self.batch_size
        return start, min(start + self.batch_size, self.num_samples)

    def part(self, batch: int, rank: int) -> tuple[int, int]:
        """Return start and stop of a rank's part of a batch; parts differ in size by one sample at most."""
        start, stop = self.bounds(batch)
        first, last = part_bounds(stop - start, self.world_size, rank)
        return start + first, start + last

    def global_indices(self, epoch: int, batch: int) -> Tensor:
        """Return the samples of a global batch: [num_samples of the batch], int64."""
        return self.samples(epoch, torch.arange(*self.bounds(batch)))

    def indices(self, epoch: int, batch: int, rank: int) -> Tensor:
        """Return the samples of a rank's part of a batch: [num_samples of the part], int64."""
        return self.samples(epoch, torch.arange(*self.part(batch, rank)))

    def samples(self, epoch: int, places: Tensor) -> Tensor:
        """Return the samples at places of an epoch's order: [num_places], int64."""
        if not self.shuffle:
            return places
        if self.order == "distributed":
            # DistributedSampler adds its seed, 0 by default, to the epoch.
            return _distributed(self.num_samples, epoch)[places]
        # Hash the seed before the epoch is added: otherwise seed s in epoch e + 1 would give the
        # order of seed s + 1 in epoch e.
        return permute(places, self.num_samples, key=mix(mix(self.seed) + epoch))


# Cache permutations: a pass reads one in many slices, and simulated ranks and a second loader read
# it too.
@lru_cache(maxsize=2)
def _distributed(num_samples: int, epoch: int) -> Tensor:
    """Return the permutation of torch's DistributedSampler: [num_samples], int64."""
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(epoch))


class ItemOrder(Order):
    """The order of items that are global batches: every rank reads all of them."""


class WholeOrder(Order):
    """The order of batches that every rank reads whole and collates, before it cuts its part."""


def no_numbers() -> ArgumentError:
    """Make the error of `indices` for an item that is a whole batch."""
    rule, got = "give samples", "batches, whose rows have no numbers"
    return ArgumentError(message("indices", "data set", rule, got))


def per_rank_error(got: str, owner: str) -> ArgumentError:
    """Make the error of `batch="per_rank"` if `owner` makes the batches: then no rank has a batch size."""
    rule = "have a batch_size where that is to be one rank's"
    repair = f'the batches of {owner} are shared: use batch="global"'
    return ArgumentError(message("shard_loader", "loader", rule, got, repair))


def find_by_counting(
    step: int, batches_of: Callable[[int], Iterable[object]], window: int
) -> tuple[int, int]:
    """Find the epoch, and the window in it, that come after `step` windows of `window` batches.

    `batches_of` returns an item for every batch of an epoch, and is read no further than needed.
    """
    epoch = 0
    while step > 0:
        num_batches = 0
        for num_batches, _ in enumerate(batches_of(epoch), start=1):
            if num_batches > step * window:
                return epoch, step
        if num_batches == 0:
            rule = f"be at most at the end of epoch {epoch}, which is empty"
            raise ArgumentError(message("epochs", "since", rule, f"{step} steps beyond it"))
        step -= -(-num_batches // window)
        epoch += 1
    return epoch, 0


def check_sizes(function: str, cut: Cut, num_samples: int, what: str = "data set") -> None:
    """Refuse an epoch without batches; `what` names the data in the error."""
    if num_samples == 0:
        raise ArgumentError(message(function, what, "have a sample", num_samples))
    if cut.drop_last and num_samples < cut.batch_size:
        raise ArgumentError(
            f"{function}: drop_last=True must leave a batch, got {num_samples} samples for "
            f"batch_size={cut.batch_size}; use drop_last=False or a smaller batch"
        )


def knows_ranks(source: Any) -> bool:
    """Return whether a sampler or stream has the attributes of one that splits data over ranks."""
    return any(all(hasattr(source, name) for name in names) for names in _OF_RANK)


def length_of(data: Any) -> int | None:
    """Return the length of a data set or a sampler; None without one."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        # torch's data sets and samplers without a length raise one of these errors.
        return None
