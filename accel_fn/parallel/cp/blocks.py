"""The tokens of each sequence that each rank along an axis computes: its block."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel_fn.core.state import DistState
from accel_fn.errors import BatchError, message


class Blocks(NamedTuple):
    """The length of sequences, the number of ranks that share them, and this rank's place.

    A sequence is cut into two pieces per rank. The first rank has the first and the last piece, the
    second rank the second and the last but one, and so on. A token of causal attention attends to
    all tokens before it, so the ranks have the same work: each early piece goes with a late one.

    Blocks differ by at most one token, so a sequence of any length is cut, and no token is added.
    """

    num_tokens: int
    num_ranks: int
    rank: int

    @property
    def spans(self) -> list[slice]:
        """Return this rank's two pieces; pieces of short sequences may be empty."""
        return [self._piece(self.rank), self._piece(2 * self.num_ranks - 1 - self.rank)]

    def _piece(self, number: int) -> slice:
        """Return one of all pieces; if their sizes differ, the first ones have one token more."""
        least, more = divmod(self.num_tokens, 2 * self.num_ranks)
        start = number * least + min(number, more)
        return slice(start, start + least + (number < more))

    @property
    def sizes(self) -> list[int]:
        """Return the number of tokens of each rank."""
        return [self.at(rank).own for rank in range(self.num_ranks)]

    @property
    def own(self) -> int:
        """Return the number of tokens of this rank."""
        return sum(span.stop - span.start for span in self.spans)

    def at(self, rank: int) -> Blocks:
        """Return the same blocks with the place of another rank."""
        return self._replace(rank=rank)

    def take(self, tensor: Tensor, dim: int) -> Tensor:
        """Return a copy of this rank's tokens of whole sequences."""
        return torch.cat([_narrowed(tensor, dim, span) for span in self.spans], dim)

    def split(self, tensor: Tensor, dim: int) -> list[Tensor]:
        """Return copies of the tokens of each rank."""
        return [self.at(rank).take(tensor, dim) for rank in range(self.num_ranks)]

    def join(self, blocks: Sequence[Tensor], dim: int) -> Tensor:
        """Return whole sequences from the tokens of each rank; tokens after a block's last are ignored."""
        heads, tails = [], []
        for rank, block in enumerate(blocks):
            head, tail = (span.stop - span.start for span in self.at(rank).spans)
            heads.append(block.narrow(dim, 0, head))
            tails.append(block.narrow(dim, head, tail))
        return torch.cat([*heads, *reversed(tails)], dim)

    def cut(self, batch: Any, dims: Mapping[str, int]) -> Any:
        """Return a batch whose named entries have this rank's tokens."""
        found = {name: self.take(batch[name], dim) for name, dim in dims.items() if name in batch}
        if type(batch) is dict:
            return {**batch, **found}
        # Copy a batch of another class, such as a tokenizer's, so that the blocks have the methods
        # of this class.
        own = copy.copy(batch)
        for name, tensor in found.items():
            own[name] = tensor
        return own


def _narrowed(tensor: Tensor, dim: int, span: slice) -> Tensor:
    return tensor.narrow(dim, span.start, span.stop - span.start)


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
    return Blocks(num_tokens, cp.world_size, cp.rank)


def _length(name: str, entry: Any, dim: int) -> int:
    if not isinstance(entry, Tensor) or not -entry.ndim <= dim < entry.ndim:
        got = f"shape {list(entry.shape)}" if isinstance(entry, Tensor) else type(entry).__name__
        rule = f"be a tensor with dimension {dim}, as dims of wrap_cp say"
        raise BatchError(message("step", f"batch[{name!r}]", rule, got))
    return entry.shape[dim]
