"""Refuse reads of shards as if they were whole, and writes that DeepSpeed's engine would overwrite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_fn.errors import StateError

IS_GATHERED = ContextVar("IS_GATHERED", default=False)
"""Whether `ZeRO.whole` has gathered parameters and optimizer state, so that the program may use them."""


def is_held(parameter: Tensor) -> bool:
    """Return whether an engine of stage 1 to 3 holds this parameter."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


@contextmanager
def gathered(model: nn.Module, *, writes: bool) -> Iterator[None]:
    """Give every rank the whole parameters. With `writes`, keep the values that rank 0 wrote."""
    import deepspeed

    parameters = [*model.parameters()]
    is_partitioned = any(hasattr(each, "ds_id") for each in parameters)
    source = 0 if writes else None
    token = IS_GATHERED.set(True)
    try:
        with (
            deepspeed.zero.GatheredParameters(parameters, modifier_rank=source)
            if is_partitioned
            else nullcontext()
        ):
            yield
    finally:
        IS_GATHERED.reset(token)


def refuse_state_dicts(model: nn.Module, optimizer: Optimizer) -> None:
    """Make `state_dict` and `load_state_dict` of model and optimizer raise where they would be wrong.

    `state_dict` is wrong if it returns empty tensors or shards. `load_state_dict` is wrong if the
    engine's next update overwrites the loaded values.
    """
    for module in model.modules():
        # Register functions of this file, not closures: pickle cannot save closures, and the user
        # may pickle the model.
        module.register_state_dict_pre_hook(_check_read)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(_check_write)  # type: ignore[no-untyped-call]
    optimizer.register_state_dict_pre_hook(_refuse("optimizer.state_dict"))
    optimizer.register_load_state_dict_pre_hook(_refuse("optimizer.load_state_dict"))


def _check_read(module: nn.Module, *_: Any) -> None:
    # The type is `Any`, since DeepSpeed has added attributes to parameters.
    held: list[Any] = [*module.parameters(recurse=False)]
    if any(each.numel() != getattr(each, "ds_numel", each.numel()) for each in held):
        raise StateError(
            "state_dict: model must be whole, got empty tensors by wrap_deepspeed(stage=3), whose ranks "
            "hold shards; call whole_state_dict or save_model on every rank"
        )


def _check_write(module: nn.Module, *_: Any) -> None:
    if not IS_GATHERED.get() and any(map(is_held, module.parameters(recurse=False))):
        raise StateError(
            "load_state_dict: model must be loaded before build under wrap_deepspeed, whose engine would "
            "write its own copy of the parameters over it, got one in use; load first, or use load"
        )


def _refuse(function: str) -> Callable[..., None]:
    def refuse(optimizer: Optimizer, *_: Any) -> None:
        if not IS_GATHERED.get():
            raise StateError(
                f"{function}: optimizer must be saved and loaded by save and load under wrap_deepspeed, "
                "whose engine keeps its state in shards, got one in use; call those on every rank"
            )

    return refuse


def is_overwritten(zero: Any, parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether parameters of this rank's shard differ from the engine's copy of them.

    Cost: one comparison of the shard.
    """
    return any(not _equal_bits(*pair) for pair in _copies(zero, parameters))


def _copies(zero: Any, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of tensors that must be equal: a part of the parameters, and the engine's copy of it."""
    # Only stages 1 and 2 have this attribute.
    if hasattr(zero, "single_partition_of_fp32_groups"):
        for number, copy in enumerate(zero.single_partition_of_fp32_groups):
            rank = torch.distributed.get_rank(zero.real_dp_process_group[number])
            yield zero.parallel_partitioned_bit16_groups[number][rank], copy
    elif getattr(zero, "optimizer_swapper", None) is None and not zero.params_in_nvme_and_cpu:
        # The type is `Any`, since DeepSpeed has added attributes to parameters.
        held: list[Any] = [*parameters]
        for each in held:
            size = each.ds_tensor.numel()
            start = size * torch.distributed.get_rank()
            # The rest of the shard is padding.
            num = max(0, min(size, each.ds_numel - start))
            shard, offset, _ = zero.grad_position[zero.get_param_id(each)]
            yield each.ds_tensor[:num], zero.fp32_partitioned_groups_flat[shard][offset:][:num]
            # Small parameters stay whole, so compare the whole parameter with its shard, too.
            if each.numel() == each.ds_numel:
                yield each.flatten()[start:][:num], each.ds_tensor[:num]


def _equal_bits(first: Tensor, second: Tensor) -> bool:
    first, second = first.detach(), second.detach().to(first.device)
    # Compare bits, so that NaN equals NaN.
    return torch.equal(first.view(torch.int32), second.view(torch.int32))
