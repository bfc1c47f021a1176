"""The blocks of consecutive tokens into which the ranks along an axis cut each sequence."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from accel_fn.core.state import DistState
from accel_fn.errors import BatchError, message


class Blocks(NamedTuple):
    """The number of tokens of each rank along the axis, and this rank's place.

    Blocks differ by at most one token, so a sequence of any length is cut, and no token is added.
    """

    sizes: tuple[int, ...]
    rank: int

    @property
    def own(self) -> int:
        """Return the number of tokens of this rank."""
        return self.sizes[self.rank]

    @property
    def offset(self) -> int:
        """Return the place of this rank's first token in the sequence."""
        return sum(self.sizes[: self.rank])

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the whole sequence."""
        return sum(self.sizes)

    def at(self, rank: int) -> Blocks:
        """Return the same blocks with the place of another rank."""
        return self._replace(rank=rank)

    def cut(self, batch: Any, dims: Mapping[str, int]) -> Any:
        """Return a batch whose named entries are views of this rank's tokens."""
        found = {
            name: batch[name].narrow(dim, self.offset, self.own)
            for name, dim in dims.items()
            if name in batch
        }
        if type(batch) is dict:
            return {**batch, **found}
        # Copy a batch of another class, such as a tokenizer's, so that the blocks have the methods
        # of this class.
        own = copy.copy(batch)
        for name, tensor in found.items():
            own[name] = tensor
        return own


def blocks_of(num_tokens: int, cp: DistState) -> Blocks:
    """Cut sequences of this length; if sizes differ, the first ranks have one token more."""
    least, more = divmod(num_tokens, cp.world_size)
    sizes = [least + (rank < more) for rank in range(cp.world_size)]
    return Blocks(tuple(sizes), cp.rank)


def blocks_in(batch: Any, dims: Mapping[str, int], cp: DistState) -> Blocks:
    """Return the blocks of a batch; refuse a batch that cannot be cut."""
    if not isinstance(batch, Mapping):
        rule, repair = "be a mapping of names to tensors with wrap_cp", "return a dict"
        raise BatchError(message("step", "batch", rule, type(batch).__name__, repair))
    lengths = {name: _length(name, batch[name], dim) for name, dim in dims.items() if name in batch}
    if not lengths:
        rule = f"hold one of the entries that wrap_cp cuts, {sorted(dims)}"
        raise BatchError(message("step", "batch", rule, sorted(map(str, batch))))
    if len({*lengths.values()}) > 1:
        rule, repair = "have one length in all entries that wrap_cp cuts", "shift before the batch"
        raise BatchError(message("step", "batch", rule, lengths, repair))
    num_tokens = next(iter(lengths.values()))
    if num_tokens < cp.world_size:
        rule = f"have at least one token for each of {cp.world_size} ranks along {cp.axis}"
        raise BatchError(message("step", "batch", rule, num_tokens, "pad the sequences"))
    return blocks_of(num_tokens, cp)


def _length(name: str, entry: Any, dim: int) -> int:
    if not isinstance(entry, Tensor) or not -entry.ndim <= dim < entry.ndim:
        got = f"shape {list(entry.shape)}" if isinstance(entry, Tensor) else type(entry).__name__
        rule = f"be a tensor with dimension {dim}, as dims of wrap_cp say"
        raise BatchError(message("step", f"batch[{name!r}]", rule, got))
    return entry.shape[dim]
