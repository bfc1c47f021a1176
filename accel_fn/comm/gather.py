"""gather: the rows of all ranks joined, in data-set order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import einops
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from accel_fn.base.raw_bytes import bytes_of
from accel_fn.base.state import DistState, check_state
from accel_fn.comm import primitives
from accel_fn.comm.agree import agreed
from accel_fn.comm.gather_items import Lists, is_rows, may_be_columns, pack, sort_of, typed, unpack
from accel_fn.errors import ArgumentError, BatchError, check_alike, message

T = TypeVar("T")


def gather(tree: T, state: DistState, *, lists: Lists | None = None) -> T:
    """Join the rows of all ranks, on all ranks, in data-set order.

    Ranks hold consecutive parts of a batch that `shard_loader` cut, so joining
    them in rank order restores the order of the data set. Numbers of rows
    may differ between ranks, and may be 0.

    A list holds one item a sample: strings, dicts of boxes, named tuples,
    objects; the lists of all ranks are joined, and what the items hold comes back as it
    was, tensors of any shapes among it. Tuples and dicts are structure,
    and so is a list in which tensors stand beside other things or other tensors
    (`[images, labels]`, as torch collates). What could be either is refused until `lists`
    says it: a list of tensors of one dtype and number of dimensions, a list of lists of
    tensors, and items of several kinds with tensors in them. The values of the data never decide.

    Args:
        tree: a tree of tensors [num_rows, ...], lists of picklable items, and tuples of strings,
            of one structure on all ranks; dtypes and trailing dimensions agree.
        state: of this rank.
        lists: "rows", every list holds one item a sample; "columns", a list of
            tensors or containers is structure.

    Returns:
        The same tree with tensors [sum of num_rows, ...] and joined lists. Tensors that
        were on the host are on the host, others on `state.device`. In a world of one, `tree` itself.

    Raises:
        ValueError: on every rank alike, before any data moves: structures,
            dtypes or trailing dimensions differ, a list could be rows or columns, an
            item cannot be pickled, or a leaf has no rows to join; or `lists` is none of the above.
        RuntimeError: `lists` is none of the above on another rank.

    Cost: two small collectives for shapes and all that is no tensor, then one all-gather for
    tensors on the host and one for those on the device, of world_size times the
    largest part; one host synchronisation.

    >>> import torch, accel_fn as af
    >>> af.gather({"scores": torch.arange(3), "names": ["a", "b", "c"]}, af.DistState())
    {'scores': tensor([0, 1, 2]), 'names': ['a', 'b', 'c']}
    """
    check_state("gather", state)
    leaves, structure = pytree.tree_flatten(tree, is_leaf=partial(is_rows, lists=lists))
    described = [_describe(leaf) for leaf in leaves]

    def told() -> tuple[str, list[_Leaf]]:
        if lists not in (None, "rows", "columns"):
            raise ArgumentError(message("gather", "lists", 'be "rows", "columns" or None', lists))
        return f"{structure} of {lists or 'any'} lists", [leaf for leaf, _ in described]

    every = agreed(told, state, "gather", leaves)
    _check_structure(every)
    _check_leaves([leaves for _, leaves in every], lists)
    if state.world_size == 1:
        return tree
    tensors = [tensor for _, held in described for tensor in held]
    parts = [iter(theirs) for theirs in _all_bytes(tensors, [leaves for _, leaves in every], state)]
    joined = [
        _join(leaf, [theirs[place] for _, theirs in every], parts, state)
        for place, leaf in enumerate(leaves)
    ]
    return cast("T", pytree.tree_unflatten(joined, structure))


@dataclass(frozen=True, slots=True)
class _Spec:
    """What peers must know of a tensor to receive it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_host: bool

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Leaf:
    """What peers must know of a leaf: a tensor, or a list or tuple of items."""

    kind: str
    """On which ranks must agree."""
    specs: tuple[_Spec, ...] = ()
    items: bytes = b""
    sorts: frozenset[str] = frozenset()
    problem: str = ""
    """Why nobody can join it."""


def _describe(leaf: Any) -> tuple[_Leaf, list[Tensor]]:
    """A leaf as told to the peers, and its tensors, which travel as bytes."""
    if isinstance(leaf, Tensor) and leaf.ndim:
        kind = f"{leaf.dtype} [rows, {list(leaf.shape[1:])}]"
        return _told(kind, [leaf]), [leaf]
    if isinstance(leaf, list | tuple):
        kind = type(leaf).__name__
        try:
            items, tensors = pack(leaf)
        except Exception as error:
            return _Leaf(kind, problem=f"hold items that can be pickled, got {error!r}"), []
        sorts = frozenset(map(sort_of, leaf))
        return _told(kind, tensors, items=items, sorts=sorts), tensors
    kind = "0-dim tensor" if isinstance(leaf, Tensor) else type(leaf).__name__
    rule = "hold tensors with a leading dimension and lists"
    return _Leaf(
        kind, problem=f"{rule}, got a {kind}; use reduce_sum or reduce_mean for numbers"
    ), []


def _told(kind: str, tensors: Sequence[Tensor], **rows: Any) -> _Leaf:
    for tensor in tensors:
        if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
            what = f"a {type(tensor).__name__} of layout {tensor.layout}"
            return _Leaf(kind, problem=f"hold dense tensors, got {what}")
    specs = [_Spec(t.dtype, tuple(t.shape), t.device.type == "cpu") for t in tensors]
    return _Leaf(kind, tuple(specs), **rows)


def _check_structure(every: Sequence[tuple[str, list[_Leaf]]]) -> None:
    """The same verdict on every rank: do these trees fit together?"""
    rule = "gather: tree must have one structure, and one dtype and trailing shape a leaf, on every rank"
    check_alike([[leaf.kind for leaf in leaves] for _, leaves in every], rule, error=BatchError)
    check_alike([structure for structure, _ in every], rule, error=BatchError)


def _check_leaves(every: Sequence[Sequence[_Leaf]], lists: Lists | None) -> None:
    """The same verdict on every rank: can each leaf be joined, and in one way alone?"""
    for leaves in zip(*every, strict=True):
        for leaf in leaves:
            if leaf.problem:
                raise BatchError(f"gather: tree must {leaf.problem}")
        sorts = frozenset().union(*(leaf.sorts for leaf in leaves))
        holds_tensors = any(leaf.specs for leaf in leaves) and bool(sorts)
        if lists is None and may_be_columns(sorts, leaves[0].kind, holds_tensors):
            raise BatchError(
                f"gather: tree must not leave open whether a {leaves[0].kind} holds one item a sample "
                f'or one a column, got items {sorted(sorts)}; give a list and lists="rows", or '
                'lists="columns"'
            )


def _all_bytes(
    tensors: Sequence[Tensor], every: Sequence[Sequence[_Leaf]], state: DistState
) -> list[list[Tensor]]:
    """The tensors of every rank as bytes: those on hosts in one all-gather, the others in another."""
    specs = [[spec for leaf in leaves for spec in leaf.specs] for leaves in every]
    found: list[dict[int, Tensor]] = [{} for _ in specs]
    for on_host in (True, False):
        device = torch.device("cpu") if on_host else state.device
        places = [
            [place for place, spec in enumerate(theirs) if spec.on_host == on_host]
            for theirs in specs
        ]
        sizes = [
            [theirs[place].num_bytes for place in at]
            for theirs, at in zip(specs, places, strict=True)
        ]
        mine = [_bytes_of(tensors[place].to(device)) for place in places[state.rank]]
        for rank, pieces in enumerate(_exchange_bytes(mine, sizes, state, device)):
            found[rank].update(zip(places[rank], pieces, strict=True))
    return [[pieces[place] for place in range(len(pieces))] for pieces in found]


def _bytes_of(tensor: Tensor) -> Tensor:
    plain = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    return bytes_of(plain.contiguous())


def _exchange_bytes(
    mine: Sequence[Tensor],
    sizes: Sequence[Sequence[int]],
    state: DistState,
    device: torch.device,
) -> Iterator[list[Tensor]]:
    """Every rank's pieces, packed and padded to the longest rank's, and cut again."""
    longest = max(map(sum, sizes))
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    if mine:
        flat, _ = einops.pack(mine, "*")
        padded[: flat.numel()] = flat
    parts = (
        primitives.all_gather(padded, state, "gather") if longest else [padded] * state.world_size
    )
    for part, theirs in zip(parts, sizes, strict=True):
        shapes: list[tuple[int, ...] | list[int]] = [(size,) for size in theirs]
        yield einops.unpack(part[: sum(theirs)], shapes, "*") if shapes else []


def _join(
    leaf: Any, told: Sequence[_Leaf], parts: Sequence[Iterator[Tensor]], state: DistState
) -> Any:
    """One leaf of all ranks; takes the bytes of its tensors from their parts."""
    if isinstance(leaf, Tensor):
        device = leaf.device if leaf.device.type == "cpu" else state.device
        whole = torch.cat([next(part).to(device) for part in parts]).view(leaf.dtype)
        num_rows = sum(each.specs[0].shape[0] for each in told)
        return typed(whole.view(num_rows, *leaf.shape[1:]), type(leaf), vars(leaf))
    items: list[Any] = []
    for each, part in zip(told, parts, strict=True):
        tensors = [
            next(part).clone().view(spec.dtype).view(spec.shape)  # not all of the rank's bytes
            for spec in each.specs
        ]
        items += unpack(each.items, tensors)
    return type(leaf)(items)
