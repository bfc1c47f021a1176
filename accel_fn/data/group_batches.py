"""group_batches: put several batches in a list, for one update over data that cannot be cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Generic, overload

import torch
from torch import Tensor

from accel_fn.data.loader import Batch, Numbered, ShardedLoader, Source
from accel_fn.data.sampled_batches import sampled_with
from accel_fn.errors import ArgumentError, ArgumentTypeError, check_count, message


@overload
# mypy warns that these overloads overlap. The first match decides, and the narrower type stands
# first.
def group_batches(  # type: ignore[overload-overlap]
    loader: ShardedLoader[Batch], k: int
) -> ShardedLoader[list[Batch]]: ...
@overload
def group_batches(loader: Iterable[Batch], k: int) -> Windowed[Batch]: ...
def group_batches(
    loader: ShardedLoader[Batch] | Iterable[Batch], k: int
) -> ShardedLoader[list[Batch]] | Windowed[Batch]:
    """Group a loader's batches into lists of `k`, one update each; the last of an epoch may be shorter.

    For graphs, ragged lists and anything else that cannot be cut along a leading
    dimension: `accumulate(k, split=None)` takes a list as the micro-batches of
    one batch. Where the data can be cut, a larger batch size with
    `accumulate(k)` does the same and needs no window.

    Law: a step over a window is the step over its batches joined.
    Tests: `tests/laws/law03_window.py`.

    Args:
        loader: a loader that `shard_loader` returned, one of its epochs, or anything else
            that can be iterated.
        k: batches in a window, >= 1.

    Returns:
        A loader of the same kind. If it is a sharded loader, one window counts as one batch:
        in `len`, `indices`, and `epochs(num_epochs, since=state)`, which starts
        at batch k * w of an epoch of which w windows were consumed. So, if the run may resume,
        group the batches of the loader, and not of its epochs, which count in batches.

    Raises:
        ValueError: `k` is not an integer >= 1 (also a TypeError if it is not an integer).
        TypeError: `loader` cannot be iterated.

    Cost: the memory of `k` batches.

    >>> import torch, accel_fn as af
    >>> data = torch.utils.data.TensorDataset(torch.arange(10))
    >>> loader = af.shard_loader(torch.utils.data.DataLoader(data, batch_size=2), af.DistState())
    >>> [[batch[0].tolist() for batch in batches] for batches in af.group_batches(loader, 3)]
    [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9]]]
    """
    k = check_count("group_batches", "k", k)
    if isinstance(loader, ShardedLoader):
        return loader.view(WindowedSource(loader._source, k), num_each=k)
    if not isinstance(loader, Iterable):
        rule = "be a loader, or anything else that can be iterated"
        raise ArgumentTypeError(message("group_batches", "loader", rule, type(loader).__name__))
    return Windowed(loader, k)


class Windowed(Generic[Batch]):
    """An iterable over lists of `k` batches. Made by `group_batches`."""

    def __init__(self, loader: Iterable[Batch], k: int) -> None:
        self._loader = loader
        self._k = k

    def __len__(self) -> int:
        return -(-len(self._loader) // self._k)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[Batch]]:
        return _lists(self._loader, self._k)


class WindowedSource(Generic[Batch]):
    """A `Source` whose batches are windows: lists of `k` batches of another source.

    No window spans two epochs, so the last one of an epoch may be shorter.
    """

    def __init__(self, source: Source[Batch], k: int) -> None:
        self._source = source
        self._k = k
        self.facts = source.facts

    def num_batches(self) -> int:
        return -(-self._source.num_batches() // self._k)

    def batches(
        self, epoch: int | None, first_batch: int, *, by_loop: bool = False
    ) -> Iterator[list[Batch]]:
        first = first_batch * self._k
        return _lists(self._source.batches(epoch, first, by_loop=by_loop), self._k)

    def numbered(self, epoch: int | None, first_batch: int) -> Iterator[Numbered[list[Batch]]]:
        windows = _lists(self._source.numbered(epoch, first_batch * self._k), self._k)
        return sampled_with(windows, map(_numbered, windows))

    def position(self, step: int, window: int = 1) -> tuple[int, int]:
        return self._source.position(step, window * self._k)

    def indices(self, epoch: int, batch: int) -> Tensor:
        return torch.cat([self._source.indices(epoch, each) for each in self._batches_of(batch)])

    def global_indices(self, epoch: int, batch: int) -> Tensor:
        parts = [self._source.global_indices(epoch, each) for each in self._batches_of(batch)]
        return torch.cat(parts)

    def _batches_of(self, window: int) -> range:
        last, first = self.num_batches() - 1, window * self._k
        if window > last:
            raise ArgumentError(message("indices", "batch", f"be in 0 .. {last}", window))
        return range(first, min(first + self._k, self._source.num_batches()))


def _lists(batches: Iterable[Batch], k: int) -> Iterator[list[Batch]]:
    source = iter(batches)
    # Each `islice` calls `iter`, and some iterators then start again. An iterator of `chain` does
    # not.
    rest = chain(source)
    return sampled_with(source, iter(lambda: list(islice(rest, k)), []), k)


def _numbered(window: list[Numbered[Batch]]) -> Numbered[list[Batch]]:
    parts = [numbers for numbers, _ in window if numbers is not None]
    return [*chain(*parts)] if parts else None, [batch for _, batch in window]
