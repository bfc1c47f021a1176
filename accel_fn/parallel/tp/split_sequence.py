"""The style "sequence", for norms: each rank runs the norm on its part of the sequence."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle

from accel_fn.errors import PlanError


class SplitSequence(ParallelStyle):
    """Split dim 1 of a plain input that is equal on all ranks, and gather the output along dim 1.

    The gradients of the module's parameters are DTensors with placement Partial.
    """

    # torch's SequenceParallel takes a plain tensor for the rank's shard. If the tensor is equal on
    # all W ranks, torch would join the copies to a sequence that is W times as long, without an
    # error.

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, _split, _gather)  # type: ignore[arg-type]


def _split(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
    first = inputs[0] if inputs else None
    if not isinstance(first, Tensor) or first.ndim < 2:
        got = f"{type(module).__name__}({', '.join(type(each).__name__ for each in inputs)})"
        rule = "be called with a tensor [batch, sequence, ...] as its first argument"
        raise PlanError(f'step: a module of style "sequence" must {rule}, got {got}')
    whole = DTensor.from_local(first, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(1)]), *inputs[1:]


def _gather(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
    return output.redistribute(placements=[Replicate()]).to_local()
