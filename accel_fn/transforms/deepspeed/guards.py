"""What a program does beside the step that DeepSpeed's engine would lose: refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from accel_fn.comm.zero import IS_GATHERED, is_held
from accel_fn.errors import StateError


def refuse_state_dicts(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse state that is empty, in shards, or overwritten by the next update."""
    for module in model.modules():
        # Functions of a module, so that a copy of the model can be pickled.
        module.register_state_dict_pre_hook(_check_read)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(_check_write)  # type: ignore[no-untyped-call]
    optimizer.register_state_dict_pre_hook(_refuse("optimizer.state_dict"))
    optimizer.register_load_state_dict_pre_hook(_refuse("optimizer.load_state_dict"))


def _check_read(module: nn.Module, *_: Any) -> None:
    held: list[Any] = [*module.parameters(recurse=False)]  # DeepSpeed has added attributes
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


def is_overwritten(zero: Any) -> bool:
    """Has the program written parameters of this rank's shard, which the engine has a copy of?

    Cost: at stages 1 and 2 a comparison of the shard.
    """
    # At stage 3 the engine has a copy only if it offloads, and the model holds no whole parameters.
    copies = getattr(zero, "single_partition_of_fp32_groups", ())
    for number, copy in enumerate(copies):
        parts = zero.parallel_partitioned_bit16_groups[number]
        rank = torch.distributed.get_rank(zero.real_dp_process_group[number])
        # Of bits, since NaN differs from NaN.
        if not torch.equal(_bits(parts[rank].to(copy.device)), _bits(copy)):
            return True
    return False


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(torch.int32)
