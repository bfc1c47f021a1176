"""The collectives of an FSDP unit, each of which keeps to the order that all ranks know."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_fn.comm import primitives
from accel_fn.transforms.fsdp.unit_order import Event, UnitOrder

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class OrderedGather:
    """All-gather of the shards of a unit; FSDP calls it by the protocol of `AllGather`."""

    def __init__(self, order: UnitOrder, unit: int, name: str, records: Sequence[Any]) -> None:
        self._order = order
        self._code = unit, 0
        self._name = name
        self._records = records
        """FSDP's own of the unit's parameters."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> primitives.Work | None:
        like = torch.empty_like(input_tensor, device="meta")
        stand_in = partial(self._stand_in, like, input_tensor.device, group)
        self._order.meet(Event(self._code, self._name, stand_in))
        return primitives.gather_shards(output_tensor, input_tensor, group, async_op)

    def _stand_in(self, like: Tensor, device: torch.device, group: ProcessGroup) -> None:
        # The shard as it is: a rank in order must not fail for another reason before all raise.
        shards = [each._sharded_param_data.to(device, like.dtype) for each in self._records]
        shard = torch.cat(shards)
        if shard.shape != like.shape:  # dtypes are mixed, or a subclass gathers something else
            shard = torch.zeros_like(like, device=device)
        primitives.gather_shards(shard.new_empty(len(shard) * group.size()), shard, group, False)


class OrderedReduce:
    """Reduce-scatter of the gradients of a unit; FSDP calls it by the protocol of `ReduceScatter`."""

    def __init__(
        self, order: UnitOrder, unit: int, name: str, replicas: ProcessGroup | None, num_shards: int
    ) -> None:
        self._order = order
        self._unit = unit
        self._name = name
        self._replicas = replicas
        """The group that FSDP then averages the shards over, if there is one."""
        self._num_shards = num_shards
        self._has_input = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        # Called for the input, then for the output. Shards that are the whole are not scattered.
        tensor = torch.empty(*size, dtype=dtype, device=device)
        if self._num_shards == 1:
            if not self._has_input:
                self._meet(tensor, None, None)
            self._has_input = not self._has_input
        return tensor

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> primitives.Work | None:
        self._meet(input_tensor, group, op)
        return primitives.reduce_to_shards(output_tensor, input_tensor, group, op, async_op)

    def _meet(self, whole: Tensor, group: ProcessGroup | None, op: Any) -> None:
        text = f"the gradient of {self._name} ({whole.numel()} numbers)"
        like = torch.empty_like(whole, device="meta")
        stand_in = partial(self._stand_in, like, whole.device, group, op)
        self._order.meet(Event((self._unit, 1, whole.numel()), text, stand_in))

    def _stand_in(
        self, like: Tensor, device: torch.device, group: ProcessGroup | None, op: Any
    ) -> None:
        whole = torch.zeros_like(like, device=device)
        shard = whole[: len(whole) // self._num_shards].clone()
        if group is not None:
            primitives.reduce_to_shards(shard, whole, group, op, False)
        if self._replicas is not None:
            primitives.sum_over(shard, self._replicas)
