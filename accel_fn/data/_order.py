"""The order of an epoch and its cut into batches and parts: pure functions of indices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accel_fn._batch import part_sizes

_ROUNDS = 10  # with fewer, neighbours of small permutations fail a chi-square test
_MIX = 0x9E3779B97F4A7C15  # 2**64 / golden ratio
_LOW = (1 << 64) - 1


def permute(indices: Tensor, num_samples: int, key: int) -> Tensor:
    """A pseudo-random permutation of 0 .. num_samples - 1, at the given indices alone.

    A Feistel network over the next even power of two permutes that many
    numbers; one that lands outside goes through again until it lands inside
    (cycle walking: fewer than four rounds on average).

    Args:
        indices: [num_indices], int64, each in 0 .. num_samples - 1.
        num_samples: the size of the permutation, 1 .. 2**62.
        key: says which permutation.

    Returns:
        [num_indices], int64. All indices together give every number once.

    Cost: O(num_indices) in time and memory, whatever num_samples is.

    Source: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains".

    >>> import torch
    >>> from accel_fn.data._order import permute
    >>> sorted(permute(torch.arange(10), 10, key=7).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)
    keys = [_signed(mix(key + round_ * _MIX)) for round_ in range(_ROUNDS)]
    found = _feistel(indices, half_bits, keys)
    outside = found >= num_samples
    while bool(outside.any()):
        found[outside] = _feistel(found[outside], half_bits, keys)
        outside = found >= num_samples
    return found


def _feistel(values: Tensor, half_bits: int, keys: list[int]) -> Tensor:
    mask = (1 << half_bits) - 1
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (_scramble(right, key) & mask)
    return (left << half_bits) | right


def _scramble(values: Tensor, key: int) -> Tensor:
    """A hash of 64 bits per value (two rounds of the finaliser of SplitMix64), in wrapping int64."""
    mixed = values ^ key
    for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * _signed(multiplier)
    return mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)


def mix(value: int) -> int:
    """SplitMix64's finaliser on one Python integer: 64 bits that depend on all of `value`'s."""
    value &= _LOW
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _LOW
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _LOW
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    return value - (1 << 64) if value >> 63 else value


@dataclass(frozen=True, slots=True)
class Order:
    """Which samples are in which batch of which epoch, for every rank. Pure.

    Attributes:
        num_samples: of the data set.
        batch_size: samples in a global batch.
        world_size: ranks that share it.
        shuffle: permuted, another way each epoch, or in the data set's order.
        drop_last: leave out a last batch that is not full.
        seed: of the permutations.
    """

    num_samples: int
    batch_size: int
    world_size: int
    shuffle: bool
    drop_last: bool
    seed: int

    def num_batches(self) -> int:
        """Batches of an epoch, on every rank alike."""
        full, tail = divmod(self.num_samples, self.batch_size)
        if self.drop_last or tail == 0:
            return full
        return full if full > 0 and tail < self.world_size else full + 1

    def bounds(self, batch: int) -> tuple[int, int]:
        """Where global batch `batch` starts and stops in the epoch's order.

        A tail of fewer samples than ranks has joined the last full batch.
        """
        last = batch == self.num_batches() - 1
        start = batch * self.batch_size
        stop = self.num_samples if last and not self.drop_last else start + self.batch_size
        return start, stop

    def part(self, batch: int, rank: int) -> tuple[int, int]:
        """Where rank `rank`'s part of a global batch starts and stops: even to one sample, in rank order."""
        start, stop = self.bounds(batch)
        sizes = part_sizes(stop - start, self.world_size)
        start += sum(sizes[:rank])
        return start, start + sizes[rank]

    def global_indices(self, epoch: int, batch: int) -> Tensor:
        """The samples of a global batch: [num_samples of the batch], int64."""
        return self.samples(epoch, torch.arange(*self.bounds(batch)))

    def indices(self, epoch: int, batch: int, rank: int) -> Tensor:
        """The samples of a rank's part of it: [num_samples of the part], int64."""
        return self.samples(epoch, torch.arange(*self.part(batch, rank)))

    def samples(self, epoch: int, places: Tensor) -> Tensor:
        """The samples at places of an epoch's order: [num_places], int64."""
        if not self.shuffle:
            return places
        return permute(places, self.num_samples, key=mix(mix(self.seed) + epoch))
