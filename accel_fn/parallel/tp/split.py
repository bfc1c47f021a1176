"""Split a model over one axis of a mesh: layers by their styles, everything else as replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._pytree import tree_map_only

from accel_fn.core import primitives
from accel_fn.core.batch import tensors_of
from accel_fn.core.dtensor import is_sharded, local, place_of
from accel_fn.core.state import DistState
from accel_fn.errors import LossError
from accel_fn.parallel.mesh import device_mesh
from accel_fn.parallel.tp.draws import draw_by_shard
from accel_fn.parallel.tp.model_plan import PARAMETER_LISTS, READS_WEIGHTS
from accel_fn.parallel.tp.same_blocks import compare_blocks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle


def split_model(
    state: DistState, model: nn.Module, styles: Mapping[str, ParallelStyle], axis: str
) -> None:
    """Split the layers that have a style over an axis, in place, from the values of rank 0.

    All other parameters stay whole on every rank, and become DTensors on the same axis too. So the
    optimizer, averages of weights and the gradient norm get only DTensors.
    """
    _send_values(state, model)
    cut_layers(model, styles, device_mesh(state)[axis])
    layers = {model.get_submodule(name): style for name, style in styles.items()}
    draw_by_shard(model, layers, state.along(axis).rank)
    names = [name for name, module in model.named_modules() if _holds_parts(module)]
    # Watch layers that hold parts too: if the model was split before this build, no layer has a
    # style.
    for name in {*styles, *names}:
        model.get_submodule(name).register_forward_hook(_watch_backward)
    compare_blocks(model, names, state, axis)


def cut_layers(model: nn.Module, styles: Mapping[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """Cut the layers that have a style over a mesh of one axis; replicate all other tensors."""
    ties = _ties(model)
    for name, style in styles.items():
        # Without a source rank, each rank cuts its own copy, which holds rank 0's values already.
        parallelize_module(model.get_submodule(name), mesh, style, src_data_rank=None)
    for module in model.modules():
        _replicate(module, mesh)
    for (holder, its), *others in ties:
        for module, name in others:
            module._parameters[name] = holder._parameters[its]


def _send_values(state: DistState, model: nn.Module) -> None:
    """Overwrite parameters and buffers with the values of rank 0.

    A shard gets the values of the first rank along `dp` that has the same shard.
    """
    data = state.along("dp")
    for tensor in (*model.parameters(), *model.buffers()):
        ranks = data if is_sharded(tensor) else state
        if ranks.world_size > 1 and not tensor.is_meta:
            primitives.broadcast(local(tensor.detach()), ranks, 0, "build")


def _ties(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Find the parameters that several modules hold, or that one module holds under several names."""
    holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(parameter, []).append((module, name))
    return [each for each in holders.values() if len(each) > 1]


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make a module's own parameters replicas on the mesh; pass plain tensors to the module's forward."""
    lists = [each for each in module.children() if isinstance(each, PARAMETER_LISTS)]
    readers = module.modules() if isinstance(module, READS_WEIGHTS) else [module, *lists]
    read = [
        (each, name)
        for each in readers
        for name, parameter in each._parameters.items()
        if _is_plain(parameter)
    ]
    if read:
        vars(module)["forward"] = _PlainForward(module, read, mesh)
    for name, plain in module._parameters.items():
        if _is_plain(plain):
            whole = _whole(plain.detach(), mesh)
            module._parameters[name] = nn.Parameter(whole, requires_grad=plain.requires_grad)


def _whole(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """Make a replicated DTensor of a plain tensor, which is equal on all ranks; return a DTensor as it is."""
    if is_sharded(tensor):
        return tensor
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


def _holds_parts(module: nn.Module) -> bool:
    return any(place_of(each) for each in module._parameters.values() if each is not None)


def _is_plain(parameter: nn.Parameter | None) -> TypeGuard[nn.Parameter]:
    return parameter is not None and not is_sharded(parameter)


class _PlainForward:
    """The forward of a module in which the module's replicated parameters are plain tensors.

    So the operations of the forward are those of one rank. They avoid the dispatch of DTensors,
    which costs time and does not support all operations. The gradient of each replica is whole,
    since the module's input is equal on all ranks.
    """

    # Replace the forward, and do not use hooks: code that recomputes a forward may call it without
    # hooks.

    def __init__(
        self, module: nn.Module, read: Sequence[tuple[nn.Module, str]], mesh: DeviceMesh
    ) -> None:
        update_wrapper(self, module.forward)
        self._forward, self._read, self._mesh = module.forward, read, mesh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # The compiler does not track a tensor that replaces a parameter. So make the inputs
            # DTensors instead.
            args, kwargs = tree_map_only(Tensor, partial(_whole, mesh=self._mesh), (args, kwargs))
            output = self._forward(*args, **kwargs)
            return tree_map_only(DTensor, DTensor.to_local, output)
        homes: list[tuple[dict[str, Any], str]] = [(m._parameters, name) for m, name in self._read]
        replicas = [home[name] for home, name in homes]
        for (home, name), replica in zip(homes, replicas, strict=True):
            if is_sharded(replica):
                home[name] = _plain(replica)
        try:
            return self._forward(*args, **kwargs)
        finally:
            for (home, name), replica in zip(homes, replicas, strict=True):
                home[name] = replica


def _plain(replica: DTensor) -> Tensor:
    return replica.to_local(grad_placements=replica.placements)


def _watch_backward(layer: nn.Module, inputs: Any, output: Any) -> None:
    """Refuse gradients of gradients, which would be wrong: DTensors' backward has no graph."""
    if torch.compiler.is_compiling():
        # A compiled graph itself refuses gradients of gradients.
        return
    for each in tensors_of(output):
        if each.requires_grad:
            each.register_hook(_refuse_graph)  # type: ignore[no-untyped-call]


def _refuse_graph(gradient: Tensor) -> None:
    # Gradients are enabled in a backward only if it records a graph.
    if torch.is_grad_enabled():
        raise LossError(
            "step: wrap_tp must have a loss_fn without gradients of gradients, got one that calls "
            "torch.autograd.grad with create_graph=True; use wrap_ddp alone"
        )
