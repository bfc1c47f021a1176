"""Split a model over one axis of a mesh: layers by their styles, everything else as replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._pytree import tree_map_only

from accel_fn.base.state import DistState
from accel_fn.comm import primitives
from accel_fn.comm.dtensor import is_sharded, local, place_of
from accel_fn.comm.mesh import device_mesh
from accel_fn.transforms.tp.draws import draw_by_shard
from accel_fn.transforms.tp.same_blocks import compare_blocks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle


def split_model(
    state: DistState, model: nn.Module, styles: Mapping[str, ParallelStyle], axis: str
) -> None:
    """Split the layers that have a style over an axis, in place, from the values of rank 0.

    All other parameters are whole on every rank, and DTensors of the same axis too: so an optimizer, an
    average and a norm meet tensors of one kind.
    """
    _send_values(state, model)
    mesh = device_mesh(state)[axis]
    ties = _ties(model)
    for name, style in styles.items():
        # Without a source each rank cuts its own copy, which is rank 0's by now.
        parallelize_module(model.get_submodule(name), mesh, style, src_data_rank=None)
    for module in model.modules():
        _replicate(module, mesh)
    for (holder, its), *others in ties:
        for module, name in others:
            module._parameters[name] = holder._parameters[its]
    layers = {model.get_submodule(name): style for name, style in styles.items()}
    draw_by_shard(model, layers, state.along(axis).rank)
    names = [name for name, module in model.named_modules() if _holds_parts(module)]
    compare_blocks(model, names, state, axis)


def _send_values(state: DistState, model: nn.Module) -> None:
    """Overwrite parameters and buffers with those of rank 0; of parts, with those of rank 0 along `dp`."""
    data = state.along("dp")
    for tensor in (*model.parameters(), *model.buffers()):
        ranks = data if is_sharded(tensor) else state
        if ranks.world_size > 1:
            primitives.broadcast(local(tensor.detach()), ranks, 0, "build")


def _ties(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Find the parameters that several modules hold, or one under several names."""
    holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(parameter, []).append((module, name))
    return [each for each in holders.values() if len(each) > 1]


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Put the parameters that a module holds itself on the mesh, whole; its forward sees plain tensors."""
    names = [name for name, each in module._parameters.items() if _is_plain(each)]
    for name in names:
        plain = module._parameters[name]
        assert plain is not None
        whole = _whole(plain.detach(), mesh)
        module._parameters[name] = nn.Parameter(whole, requires_grad=plain.requires_grad)
    if names:
        vars(module)["forward"] = _PlainForward(module, names, mesh)


def _whole(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a tensor that is the same on all ranks, on the mesh."""
    if is_sharded(tensor):
        return tensor
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


def _holds_parts(module: nn.Module) -> bool:
    return any(place_of(each) for each in module._parameters.values() if each is not None)


def _is_plain(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and not is_sharded(parameter)


class _PlainForward:
    """The forward of a module, which sees the module's replicated parameters as plain tensors.

    So its operations are those of one rank: they cost no dispatch of DTensors, and none of them is unknown
    to it. The gradient of each replica is whole, since its input is the same on all ranks.
    """

    # No hooks, since what recomputes a forward may call it without them.

    def __init__(self, module: nn.Module, names: Sequence[str], mesh: DeviceMesh) -> None:
        update_wrapper(self, module.forward)
        self._module, self._forward = module, module.forward
        self._names, self._mesh = names, mesh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # The compiler does not follow what is put in place of a parameter.
            args, kwargs = tree_map_only(Tensor, partial(_whole, mesh=self._mesh), (args, kwargs))
            output = self._forward(*args, **kwargs)
            return tree_map_only(DTensor, DTensor.to_local, output)
        parameters: dict[str, Any] = self._module._parameters
        replicas = {name: parameters[name] for name in self._names}
        for name, replica in replicas.items():
            if is_sharded(replica):
                parameters[name] = _plain(replica)
        try:
            return self._forward(*args, **kwargs)
        finally:
            parameters.update(replicas)


def _plain(replica: DTensor) -> Tensor:
    return replica.to_local(grad_placements=replica.placements)
