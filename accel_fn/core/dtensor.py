"""Find, gather and cut the shards of DTensors; explain torch's errors about them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from accel_fn.core.batch import opened
from accel_fn.core.primitives import gather_numbers
from accel_fn.core.state import DistState
from accel_fn.errors import AccelError, LossError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

T = TypeVar("T")

_WHOLE = (Tensor, nn.Parameter)
"""The types of plain tensors, which are never sharded. `is_sharded` tests them first, which is fast."""


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Return whether a rank holds only a shard of this tensor."""
    return type(value) not in _WHOLE and hasattr(value, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, in the same memory; return any other tensor itself."""
    if is_sharded(tensor):
        # Detach the local tensor, since `DTensor.detach` takes far longer.
        with torch.no_grad():
            return tensor.to_local().detach()
    return tensor


def leaves_of(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a tree, ready for a collective to send, and the tree's structure."""
    leaves, structure = pytree.tree_flatten(opened(tree, is_leaf), is_leaf=is_leaf)
    return [*map(filled, leaves)], structure


def filled(leaf: T) -> T:
    """Wait for the result of an asynchronous collective of torch; return other leaves unchanged."""
    is_pending = isinstance(leaf, Tensor) and hasattr(leaf, "trigger_wait")
    return cast("T", leaf.clone()) if is_pending else leaf  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor; if the tensor is sharded, every rank must call this.

    Cost: one gather if the tensor is sharded.
    """
    if not is_sharded(tensor) or tensor.device_mesh.size() == 1:
        return local(tensor).detach()
    return cast("DTensor", tensor.detach()).full_tensor()


def by_axes(tensors: Iterable[DTensor]) -> dict[tuple[ProcessGroup, ...], list[DTensor]]:
    """Group sharded tensors by the process groups over which they are sharded.

    Cost: one collective for each gradient that is a partial sum over an axis, as under
    `SequenceParallel`.
    """
    by_placements: dict[Any, list[DTensor]] = {}
    for each in tensors:
        by_placements.setdefault((each.device_mesh, each.placements), []).append(each)
    found: dict[tuple[ProcessGroup, ...], list[DTensor]] = {}
    for (_, placements), same in by_placements.items():
        if any(each.is_partial() for each in placements):
            same = [_summed(each) for each in same]
        found.setdefault(_groups_of(same[0]), []).extend(same)
    return found


def place_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Redistribute gradients, so that each is sharded in the same way as its parameter.

    After a backward, torch may leave a gradient that is sharded in another way, or that is a
    partial sum over an axis.

    Cost: the collectives of a `redistribute` for each such gradient.
    """
    for each in parameters:
        grad = each.grad
        if is_sharded(each) and is_sharded(grad) and grad.placements != each.placements:
            each.grad = grad.redistribute(placements=each.placements)


def _summed(tensor: DTensor) -> DTensor:
    from torch.distributed.tensor import Replicate

    wanted = [Replicate() if each.is_partial() else each for each in tensor.placements]
    return tensor.redistribute(placements=wanted)


def _groups_of(tensor: DTensor) -> tuple[ProcessGroup, ...]:
    """Return the process groups of the mesh axes along which ranks hold different values."""
    pairs = zip(tensor.device_mesh.get_all_groups(), tensor.placements, strict=True)
    return tuple(group for group, placement in pairs if not placement.is_replicate())


def norm_over_shards(norm: Tensor, groups: Sequence[ProcessGroup]) -> Tensor:
    """Compute the norm of whole tensors from the norm of this rank's shards.

    Cost: one collective of one number per group.
    """
    for group in groups:
        norm = torch.linalg.vector_norm(gather_numbers(norm, group))
    return norm


def fill(tensor: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into `tensor`; if `tensor` is sharded, copy this rank's shard."""
    if is_sharded(tensor):
        from torch.distributed.tensor import distribute_tensor

        # Without a source rank, each rank cuts its own copy of the tensor, and no rank sends
        # anything.
        mesh, placements = tensor.device_mesh, tensor.placements
        cut = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        local(tensor).copy_(local(cut))
    else:
        tensor.copy_(whole)


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a whole tensor, cut in the same way as `like`."""
    cut = torch.empty_like(like, dtype=value.dtype, requires_grad=False)
    fill(cut, value.detach())
    return cut


def place_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the index of this rank's shard along each sharded axis; () for a whole tensor."""
    return tuple(each.rank() for each in _groups_of(tensor)) if is_sharded(tensor) else ()


def axes_of(tensors: Iterable[Tensor], *, through_pp: bool = False) -> list[DistState]:
    """Return a state for each mesh axis of sharded tensors, innermost first; [] for whole tensors.

    If a mesh is part of a larger one, the result has all axes of the larger mesh, also those, such
    as `dp`, along which ranks hold the same shards. Ranks along `pp` hold other layers, so the
    result has `pp` only with `through_pp`, or if `pp` is an axis of the tensors' own mesh.
    """
    groups: dict[ProcessGroup, None] = {}
    for mesh in dict.fromkeys(each.device_mesh for each in tensors if is_sharded(each)):
        of_all, own = mesh._get_root_mesh(), mesh.mesh_dim_names or ()
        names = of_all.mesh_dim_names or ("",) * of_all.ndim
        kept = [dim for dim, name in enumerate(names) if through_pp or name != "pp" or name in own]
        groups |= dict.fromkeys(of_all.get_group(dim) for dim in reversed(kept))
    return [DistState(rank=group.rank(), world_size=group.size(), group=group) for group in groups]


_WORDS = ("DTensor", "harding", "sharded", "device_mesh", "different meshes", "python storage")
_FOLDERS = ("/torch/distributed/tensor/", "/torch/distributed/_functional_collectives")


def is_of_shards(error: BaseException) -> bool:
    """Return whether torch raised this error because an operation got shards."""
    if any(word in str(error) for word in _WORDS):
        return True
    frames = traceback.extract_tb(error.__traceback__)[-12:]
    names = [each.filename.replace("\\", "/") for each in frames]
    return any(folder in name for name in names for folder in _FOLDERS)


def note_shards(error: Exception, name: str, repair: str) -> None:
    """Add a note to torch's error: which function got shards, and the repair."""
    if is_of_shards(error) and not isinstance(error, AccelError):
        error.add_note(
            f"step: {name} was given shards (DTensors), of which each rank holds a part, which torch cannot "
            f"compute this of; {repair}"
        )


def place_of_error(error: BaseException, model: nn.Module) -> str:
    """Return the innermost module whose forward raised an error, as `<name>, a <class>`."""
    names = {each: name for name, each in model.named_modules()}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(module, nn.Module) and module in names:
            found = f"{names[module] or 'the model'}, a {type(module).__name__}"
    return found


class WholeNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that refuses to read a number computed from shards, such as a norm.

    torch would return the value of each rank's own shard: `float(parameter.norm())` differs between
    ranks.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and is_sharded(args[0]):
            placements = args[0].placements
            if any(not each.is_replicate() for each in placements):
                raise LossError(
                    "step: a number must not be read of what is computed from shards of a parameter, "
                    f"since each rank has its part ({', '.join(map(str, placements))}); call full_tensor() "
                    "on it first, as in float(weight.norm().full_tensor())"
                )
        return func(*args, **kwargs or {})
