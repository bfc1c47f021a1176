"""The ranks that hold a model: they exchange values, and gather a tensor on one of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from accel_fn.core import primitives
from accel_fn.core.collectives import agreed
from accel_fn.core.dtensor import axes_of, is_sharded, local, whole
from accel_fn.core.primitives import bytes_of
from accel_fn.core.state import DistState

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks along some axes, innermost first; without axes, this rank alone.

    Ranks are numbered along the innermost axis first. The main rank is the first along each axis.
    """

    function: str
    """The name of the public function that the ranks run, for errors and hang reports."""
    axes: Sequence[DistState]
    is_mesh: bool = True
    """Whether each combination of places along the axes belongs to exactly one rank."""

    @classmethod
    def of(cls, function: str, tensors: Iterable[Tensor]) -> Ranks:
        """Return all ranks of the meshes that hold shards of these tensors.

        Cost: if there are several ranks, two small collectives along each axis.
        """
        ranks = cls(function, axes_of(tensors, through_pp=True))
        if len(ranks.axes) < 2:
            return ranks
        # A user may make two meshes of the same ranks. Their axes then have more combinations of
        # places than there are ranks. Compare the numbers of the ranks to find this.
        numbers = ranks.agreed(lambda: ranks.rank)
        return cls(function, ranks.axes, is_mesh=numbers == [*range(ranks.size)])

    @property
    def places(self) -> tuple[int, ...]:
        return tuple(axis.rank for axis in self.axes)

    @property
    def size(self) -> int:
        return math.prod(axis.world_size for axis in self.axes)

    @property
    def rank(self) -> int:
        found, stride = 0, 1
        for axis in self.axes:
            found, stride = found + stride * axis.rank, stride * axis.world_size
        return found

    def places_of(self, rank: int) -> tuple[int, ...]:
        """Return a rank's place along each axis."""
        found = []
        for axis in self.axes:
            rank, place = divmod(rank, axis.world_size)
            found.append(place)
        return tuple(found)

    def agreed(self, make: Callable[[], T]) -> list[T]:
        """Call `make`, and return all ranks' results in order; if it raises on one rank, all ranks raise.

        Cost: two small collectives along each axis.
        """
        every: Callable[[], Any] = make
        for axis in self.axes:
            # A failure reaches the peers along the first axis, then their peers along the next one.
            every = partial(agreed, every, axis, self.function)
        found = every()
        for _ in self.axes[1:]:
            found = [each for part in found for each in part]
        return found if self.axes else [found]

    @torch.no_grad()
    def gather_to(self, tensor: Tensor, rank: int) -> Tensor | None:
        """Return a whole tensor on one rank, None on the others. Every rank must call this.

        If the tensor is not sharded, the result has the main rank's values.

        Cost: each rank that holds a shard sends it once along each axis that cuts the tensor. Only
        `rank` has memory for the whole tensor. If shards are not equal chunks, as in a split with a
        stride, all ranks gather the tensor.
        """
        if not tensor.numel() or not self.axes:
            found = torch.empty(tensor.shape, dtype=tensor.dtype) if self.axes else whole(tensor)
            return found if self.rank == rank else None
        if not is_sharded(tensor):
            return self._send_from_main(tensor, rank)
        cuts = self._cuts(tensor)
        if cuts is None:
            found = whole(tensor)
            return found if self.rank == rank else None
        target = self.places_of(rank)
        cut = {at for at, _ in cuts}
        uncut = [at for at in range(len(self.axes)) if at not in cut]
        if any(self.places[at] != target[at] for at in uncut):
            # Another rank sends the same shard, so this replica sends nothing.
            return None
        sizes, shape = [], list(tensor.shape)
        for at, dim in reversed(cuts):
            sizes.append(shape[dim])
            shape[dim] = _size_of_chunk(shape[dim], self.axes[at])
        part = local(tensor).resolve_conj().resolve_neg()
        assert list(part.shape) == shape
        for (at, dim), size in zip(cuts, reversed(sizes), strict=True):
            part = _gather_chunks(part, dim, size, self.axes[at], target[at], self.function)
            if self.places[at] != target[at]:
                return None
        return part

    def _cuts(self, tensor: DTensor) -> list[tuple[int, int]] | None:
        """Return the axis and the dim of each cut of a tensor, the last cut first.

        Return None if the shards are not chunks, or chunks of chunks, along these axes.
        """
        mesh, axes = tensor.device_mesh, {axis.group: at for at, axis in enumerate(self.axes)}
        regular, strided = list[tuple[int, int]](), list[tuple[int, int]]()
        num_chunks: dict[int, int] = {}
        pairs = [*zip(mesh.get_all_groups(), tensor.placements, strict=True)]
        for group, placement in reversed(pairs):
            if placement.is_replicate():
                continue
            if placement.is_partial() or group not in axes or not self.is_mesh:
                return None
            dim = placement.dim  # type: ignore[attr-defined]
            stride = getattr(placement, "split_factor", None)
            if stride is None:
                regular.append((axes[group], dim))
            elif stride == num_chunks.get(dim, 1):
                # This axis has cut the dim after the axes to its right in the mesh, as FSDP does
                # over tensor parallelism.
                strided.insert(0, (axes[group], dim))
            else:
                return None
            num_chunks[dim] = num_chunks.get(dim, 1) * group.size()
        # torch and FSDP cut uneven sizes at different places, so uneven strided cuts cannot be
        # joined here.
        is_even = all(tensor.shape[dim] % count == 0 for dim, count in num_chunks.items())
        return [*strided, *regular] if is_even or not strided else None

    def _send_from_main(self, tensor: Tensor, rank: int) -> Tensor | None:
        """Send the main rank's values to one rank, along one axis after another."""
        target, here = self.places_of(rank), self.places
        held = tensor if self.rank == 0 else torch.empty_like(tensor)
        for at, axis in enumerate(self.axes if self.is_mesh else ()):
            is_on_way = here[:at] == target[:at] and not any(here[at + 1 :])
            if target[at] and is_on_way:
                primitives.broadcast(held, axis, 0, self.function)
        return held if self.rank == rank else None


def _size_of_chunk(size: int, axis: DistState) -> int:
    """Return the size of this rank's chunk, cut as torch does: only the last chunks are smaller."""
    most = -(-size // axis.world_size)
    return min(most, max(0, size - axis.rank * most))


def _gather_chunks(
    part: Tensor, dim: int, size: int, axis: DistState, place: int, function: str
) -> Tensor:
    """Join the chunks along an axis on one rank; on the others, return the rank's own chunk."""
    if axis.world_size == 1:
        return part
    rows, most = part.movedim(dim, 0), -(-size // axis.world_size)
    sent = rows.contiguous()
    if len(rows) < most:
        # Collectives need equal sizes; the padding comes after all values.
        sent = rows.new_empty(most, *rows.shape[1:])
        sent[: len(rows)] = rows
    if axis.rank != place:
        primitives.gather(bytes_of(sent), [], axis, place, function)
        return part
    found = sent.new_empty(most * axis.world_size, *sent.shape[1:])
    parts = [*bytes_of(found).chunk(axis.world_size)]
    primitives.gather(bytes_of(sent), parts, axis, place, function)
    return found[:size].movedim(0, dim)
