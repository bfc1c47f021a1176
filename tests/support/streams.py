"""Data sets of the tests that can only be iterated, and the batches expected of them."""

from __future__ import annotations

import copy
import random
from itertools import chain

import torch
from torch.utils.data import IterableDataset, get_worker_info


class Counting(IterableDataset):
    """Yields 0 .. size - 1, the same on every rank; in another order each epoch if asked to."""

    def __init__(self, size, *, shuffle=False, length=None):
        self.size, self.shuffle, self.length = size, shuffle, length
        self.epoch = 0
        self.num_read = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def order(self, epoch):
        found = list(range(self.size))
        if self.shuffle:
            random.Random(epoch).shuffle(found)
        return found

    def __iter__(self):
        for item in self.order(self.epoch):
            self.num_read += 1
            yield item


class Sized(Counting):
    """The same stream with a length, which may be wrong."""

    def __len__(self):
        return self.size if self.length is None else self.length


class Sharded(IterableDataset):
    """Shards of any lengths, with a `shard` method; item 1000 * s + i is the i-th of shard s."""

    def __init__(self, lengths):
        self.lengths = lengths
        self.mine = range(len(lengths))
        self.read = []

    @property
    def num_shards(self):
        return len(self.lengths)

    def shard(self, *, num_shards, index):
        part = copy.copy(self)
        part.mine = range(index, len(self.lengths), num_shards)
        return part

    def items(self):
        return [1000 * shard + i for shard in self.mine for i in range(self.lengths[shard])]

    def __iter__(self):
        for item in self.items():
            self.read.append(item)
            yield item


class SelfSplitting(IterableDataset):
    """Splits itself over workers as torch documents it, into parts of the given lengths."""

    def __init__(self, lengths):
        self.lengths = lengths

    def items(self):
        return [1000 * part + i for part, length in enumerate(self.lengths) for i in range(length)]

    def __iter__(self):
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        for part in range(worker, len(self.lengths), num_workers):
            for i in range(self.lengths[part]):
                yield 1000 * part + i


def global_batches(items, batch_size, drop_last=False):
    """Return the batches of a stream."""
    batches = [items[start : start + batch_size] for start in range(0, len(items), batch_size)]
    return [each for each in batches if len(each) == batch_size or not drop_last]


def ids(loader):
    """List the items of every batch."""
    return [batch.tolist() for batch in loader]


def joined(ranks):
    """Join every rank's parts to global batches, in rank order."""
    return [list(chain(*parts)) for parts in zip(*ranks, strict=True)]


def items_of(ranks):
    """List all items that the ranks received, sorted."""
    return sorted(chain(*joined(ranks)))


def samples(data):
    """Make a stream of rows (inputs, targets), float64, computed from their numbers."""

    class Rows(IterableDataset):
        def __iter__(self):
            for index in data:
                generator = torch.Generator().manual_seed(index)
                yield (
                    torch.randn(3, generator=generator).double(),
                    torch.randn(1, generator=generator).double(),
                )

    return Rows()
