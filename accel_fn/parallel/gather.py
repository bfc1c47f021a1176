"""gather: join the rows of all ranks, in data-set order."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from accel_fn.core import primitives
from accel_fn.core.batch import Samples
from accel_fn.core.differentiable import (
    detached_in_no_grad,
    eager,
    in_graph,
    inexact,
    is_training,
    with_gradients,
)
from accel_fn.core.dtensor import filled, leaves_of
from accel_fn.core.primitives import bytes_of
from accel_fn.core.state import DistState, check_state, over
from accel_fn.errors import BatchError, check_equal

T = TypeVar("T")


@eager
def gather(tree: T, state: DistState, *, axis: str | None = None) -> T:
    """Join the rows of all ranks, on all ranks, in data-set order; on a mesh, of all ranks along `dp`.

    Ranks hold consecutive parts of a batch that `shard_loader` split, so joining
    them in rank order restores the order of the data set. Numbers of rows
    may differ between ranks, and may be 0.

    Tensors, lists and `samples` hold rows: a tensor along its first dimension, a list one in each
    item. Items may be anything that can be pickled, with tensors of any shape inside. Tuples, named
    tuples, mappings and types that are registered with torch's pytree are structure. A pair of
    tensors that torch has collated is a list: pass `tuple(batch)`.

    Gradients flow through joined tensors, not through items of lists: the backward sums them over
    the ranks, and each rank gets the gradient of its rows. So a loss over the rows of all ranks
    trains as it does in one process. All ranks must run its backward.

    Args:
        tree: a tree of tensors [num_rows, ...] and lists, of one structure on all ranks; dtypes and
            trailing dimensions of tensors agree.
        state: the state of this rank.
        axis: the axis of the mesh whose ranks' rows are joined; default: `dp`, since the ranks
            along other axes hold the same rows.

    Returns:
        The same tree with tensors [sum of num_rows, ...] and joined lists. Tensors that
        were on the host are on the host, others on `state.device`. In a world of one, `tree` itself.

    Raises:
        ValueError: on every rank, before any data moves: structures, dtypes or trailing dimensions
            differ, an item cannot be pickled, or a leaf has no rows. In a loss under training: with
            `accumulate` or `reproducible`, which give the loss only a part of the batch; or a
            tensor with a graph under `no_grad`, or with `local_sgd`.

    Cost: two small collectives for shapes and lists, then one all-gather for tensors on the host
    and one for those on the device, of world_size times the largest part; one host synchronisation.
    In the backward, one small collective, and one all-reduce per tensor.

    >>> import torch, accel_fn as af
    >>> af.gather({"scores": torch.arange(3), "names": ["a", "b", "c"]}, af.DistState())
    {'scores': tensor([0, 1, 2]), 'names': ['a', 'b', 'c']}
    """
    check_state("gather", state)
    return join_rows(tree, over(state, axis), "gather", "tree")


def join_rows(tree: T, state: DistState, function: str, parameter: str) -> T:
    """Join the rows of all ranks, for a public function and its parameter, which errors name."""
    leaves, structure = flat_rows(tree)
    described = [_describe(leaf) for leaf in leaves]
    problem = inexact(function, leaves, state, joins_rows=True)
    form = str(structure), [leaf for leaf, _ in described], problem
    # Each rank sends its error with its shapes, so that all ranks raise before any data moves.
    every = primitives.exchange(form, state, function, leaves)
    _check(every, f"{function}: {parameter}")
    if state.world_size == 1:
        return cast("T", detached_in_no_grad(tree))
    tensors = [tensor for _, held in described for tensor in held]
    forms = [each[1] for each in every]
    parts = [iter(each) for each in _all_bytes(tensors, forms, state, function)]
    columns = list(zip(*forms, strict=True))
    joined = [
        _join(leaf, column, parts, state) for leaf, column in zip(leaves, columns, strict=True)
    ]
    _put_into_graph(joined, leaves, columns, state)
    joined = [_typed_like(leaf, each) for leaf, each in zip(leaves, joined, strict=True)]
    return cast("T", pytree.tree_unflatten(joined, structure))


def _put_into_graph(
    joined: list[Any], leaves: Sequence[Any], columns: Sequence[Sequence[_Leaf]], state: DistState
) -> None:
    """Put joined rows into the graph: their gradients reach the ranks that the rows came from."""
    places = [
        place for place, column in enumerate(columns) if any(leaf.in_graph for leaf in column)
    ]
    counts = [[leaf.specs[0].shape[0] for leaf in columns[place]] for place in places]

    def own_rows(place: int, gradient: Tensor) -> Tensor:
        start = sum(counts[place][: state.rank])
        own = gradient[start : start + counts[place][state.rank]]
        return own.to(leaves[places[place]].device)

    found = with_gradients(
        [joined[place] for place in places],
        [leaves[place] for place in places],
        own_rows,
        state,
        "gather",
    )
    for place, tensor in zip(places, found, strict=True):
        joined[place] = tensor


def _typed_like(leaf: Any, joined: Any) -> Any:
    return _typed(joined, type(leaf), vars(leaf)) if isinstance(leaf, Tensor) else joined


def flat_rows(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the tensors and lists of a tree, and its structure."""
    return leaves_of(tree, _is_list)


def _is_list(node: Any) -> bool:
    return type(node) is list or type(node) is Samples


@dataclass(frozen=True, slots=True)
class _Spec:
    """The dtype, shape and device kind of a tensor, which peers need to receive the tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_host: bool

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A description of one rank's leaf, a tensor or a list of items, for the other ranks."""

    kind: str
    """The type of the leaf, or its dtype and trailing shape. It must be equal on all ranks."""
    specs: tuple[_Spec, ...] = ()
    items: bytes = b""
    problem: str = ""
    """The reason why the leaf cannot be joined; empty if it can."""
    in_graph: bool = False
    """Whether gradients flow through the leaf."""


def _describe(leaf: Any) -> tuple[_Leaf, list[Tensor]]:
    """Describe a leaf for the peers; also return its tensors, which are sent as bytes."""
    kind, items, tensors = type(leaf).__name__, b"", []
    if isinstance(leaf, Tensor) and leaf.ndim:
        kind, tensors = f"{leaf.dtype} [rows, {list(leaf.shape[1:])}]", [leaf]
    elif isinstance(leaf, list):
        try:
            items, tensors = _pack(leaf)
        except Exception as error:
            return _Leaf(kind, problem=f"hold items that can be pickled, got {error!r}"), []
    else:
        kind = "0-dim tensor" if isinstance(leaf, Tensor) else kind
        repair = (
            "make a tuple of strings a list"
            if isinstance(leaf, str | bytes)
            else "use reduce_sum or reduce_mean for numbers"
        )
        rule = "hold tensors with a leading dimension and lists"
        return _Leaf(kind, problem=f"{rule}, got a {kind}; {repair}"), []
    for tensor in tensors:
        if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
            got = f"a {type(tensor).__name__} of layout {tensor.layout}"
            return _Leaf(kind, problem=f"hold dense tensors, got {got}"), []
    specs = [_Spec(t.dtype, tuple(t.shape), t.device.type == "cpu") for t in tensors]
    if not isinstance(leaf, Tensor) and any(map(in_graph, tensors)) and is_training():
        rule = "hold lists of tensors that need no gradient where a loss is computed"
        return _Leaf(kind, problem=f"{rule}, got one that does; stack them, or detach them"), []
    return _Leaf(kind, tuple(specs), items, in_graph=in_graph(leaf)), tensors


def _check(every: Sequence[tuple[str, list[_Leaf], str]], where: str) -> None:
    """Raise on all ranks unless the trees of all ranks can be joined."""
    rule = (
        f"{where} must have one structure, and one dtype and trailing shape a leaf, on every rank"
    )
    check_equal([[leaf.kind for leaf in leaves] for _, leaves, _ in every], rule, error=BatchError)
    check_equal([structure for structure, _, _ in every], rule, error=BatchError)
    for _, leaves, problem in every:
        for each in (*(leaf.problem for leaf in leaves), problem):
            if each:
                raise BatchError(f"{where} must {each}")


def _all_bytes(
    tensors: Sequence[Tensor],
    every: Sequence[Sequence[_Leaf]],
    state: DistState,
    function: str,
) -> list[list[Tensor]]:
    """Gather all ranks' tensors as bytes, in one all-gather for each kind of device."""
    specs = [[spec for leaf in leaves for spec in leaf.specs] for leaves in every]
    found: list[dict[int, Tensor]] = [{} for _ in specs]
    for on_host in (True, False):
        device = torch.device("cpu") if on_host else state.device
        places = [[at for at, spec in enumerate(each) if spec.on_host == on_host] for each in specs]
        sizes = [
            [each[at].num_bytes for at in chosen]
            for each, chosen in zip(specs, places, strict=True)
        ]
        pieces = [_bytes_of(tensors[place].to(device)) for place in places[state.rank]]
        for rank, parts in enumerate(_exchange_bytes(pieces, sizes, state, device, function)):
            found[rank].update(zip(places[rank], parts, strict=True))
    return [[each[place] for place in range(len(each))] for each in found]


def _bytes_of(tensor: Tensor) -> Tensor:
    plain = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    return bytes_of(plain.contiguous())


def _exchange_bytes(
    pieces: list[Tensor],
    sizes: Sequence[list[int]],
    state: DistState,
    device: torch.device,
    function: str,
) -> Iterator[list[Tensor]]:
    """All-gather the pieces of every rank, padded to one size, and split them again."""
    longest = max(map(sum, sizes))
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    if pieces:
        torch.cat(pieces, out=padded[: sum(sizes[state.rank])])
    parts = (
        primitives.all_gather(padded, state, function) if longest else [padded] * state.world_size
    )
    for part, lengths in zip(parts, sizes, strict=True):
        yield list(torch.split_with_sizes(part[: sum(lengths)], lengths))


def _join(
    leaf: Any, leaves: Sequence[_Leaf], parts: Sequence[Iterator[Tensor]], state: DistState
) -> Any:
    """Join one leaf of all ranks; `parts` yields the bytes of each rank's tensors in order."""
    if isinstance(leaf, Tensor):
        device = leaf.device if leaf.device.type == "cpu" else state.device
        whole = torch.cat([next(part).to(device) for part in parts]).view(leaf.dtype)
        num_rows = sum(each.specs[0].shape[0] for each in leaves)
        return whole.view(num_rows, *leaf.shape[1:])
    items = type(leaf)()
    for each, part in zip(leaves, parts, strict=True):
        tensors = [
            # `clone` copies only this tensor's bytes, so an item does not keep all bytes of a rank.
            next(part).clone().view(spec.dtype).view(spec.shape)
            for spec in each.specs
        ]
        items += _unpack(each.items, tensors)
    return items


def _pack(items: Sequence[Any]) -> tuple[bytes, list[Tensor]]:
    """Pickle items without their tensors; also return the tensors, in the order of their places."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(items)
    return file.getvalue(), pickler.tensors


def _unpack(data: bytes, tensors: Sequence[Tensor]) -> Sequence[Any]:
    """Restore items that `_pack` has pickled, with these tensors in their places."""
    return _Unpickler(data, tensors).load()  # type: ignore[no-any-return]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        value = filled(value)
        if type(value) is not Tensor and type(value) is not nn.Parameter:
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        # Refuse a tensor that wraps other tensors: its class defines this method.
        if hasattr(value, "__tensor_flatten__"):
            raise pickle.PicklingError(f"a {type(value).__name__} is no plain tensor")
        return _typed, (value.detach().as_subclass(Tensor), type(value), vars(value))


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def persistent_load(self, place: int) -> Tensor:
        return self._tensors[place]


def _typed(tensor: Tensor, kind: type[Tensor], attributes: dict[str, Any]) -> Tensor:
    """Return a plain tensor as a subclass, with these attributes."""
    if kind is Tensor or kind is nn.Parameter:
        return tensor
    found = tensor.as_subclass(kind)
    vars(found).update(attributes)
    return found
