"""Convert ZeRO's optimizer state from shards to whole tensors, which any strategy can load, and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_fn.errors import CheckpointError

States = defaultdict[Tensor, Any]


def gather_state(
    zero: Any, optimizer: Optimizer, groups: Sequence[Sequence[nn.Parameter]]
) -> States:
    """Return the whole state of each parameter, gathered from flat shards; every rank must call this."""
    from deepspeed.utils import safe_get_full_optimizer_state

    found: States = defaultdict(dict)
    _link(zero)
    for flat, parameters in _shards(zero, groups):
        for key, value in optimizer.state.get(flat, {}).items():
            for each in parameters:
                if _is_of_elements(value, flat):
                    found[each][key] = safe_get_full_optimizer_state(each, key)
                else:
                    found[each][key] = value.clone() if isinstance(value, Tensor) else value
    return found


def write_state(
    zero: Any,
    optimizer: Optimizer,
    groups: Sequence[Sequence[nn.Parameter]],
    whole: Mapping[Tensor, Mapping[str, Any]],
) -> None:
    """Write this rank's part of whole parameters, and of their state, to the optimizer's flat shards."""
    for flat, parameters in _shards(zero, groups):
        with _in_memory(zero, flat):
            _make_entries(optimizer.state[flat], flat, parameters, whole)
    _link(zero)
    for flat, parameters in _shards(zero, groups):
        for each in parameters:
            _set(each, each.detach().float(), None)
            for key, value in optimizer.state[flat].items():
                if _is_of_elements(value, flat):
                    held = whole.get(each, {}).get(key)
                    _set(each, torch.zeros_like(each) if held is None else held, key)


def _link(zero: Any) -> None:
    """At stages 1 and 2, let DeepSpeed's `safe_*` functions find the optimizer's state of a parameter."""
    # DeepSpeed links parameters with state only once, when the first group has state. Link them
    # again, since the state of the other groups would be missing.
    if not _is_stage_3(zero):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def _is_stage_3(zero: Any) -> bool:
    return hasattr(zero, "fp32_partitioned_groups_flat")


@contextmanager
def _in_memory(zero: Any, flat: Tensor) -> Iterator[None]:
    """Hold a flat shard and its state in memory, if the engine offloads them to files."""
    swapper = getattr(zero, "optimizer_swapper", None)
    if swapper is None:
        yield
        return
    swapper.swap_in_optimizer_state(flat)
    yield
    swapper.swap_out_optimizer_state(flat)


def _shards(
    zero: Any, groups: Sequence[Sequence[nn.Parameter]]
) -> Iterator[tuple[Tensor, list[nn.Parameter]]]:
    """Yield every flat shard of this rank, and the parameters in it."""
    trained = [[each for each in group if each.requires_grad] for group in groups]
    if _is_stage_3(zero):
        of_shard: dict[int, list[nn.Parameter]] = defaultdict(list)
        for each in (each for group in trained for each in group):
            of_shard[zero.grad_position[zero.get_param_id(each)][0]].append(each)
        for number, parameters in sorted(of_shard.items()):
            yield zero.fp32_partitioned_groups_flat[number], parameters
    else:
        yield from zip(zero.single_partition_of_fp32_groups, trained, strict=True)


def _is_of_elements(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape


def _make_entries(
    entries: dict[str, Any],
    flat: Tensor,
    parameters: Sequence[nn.Parameter],
    whole: Mapping[Tensor, Mapping[str, Any]],
) -> None:
    """Give a shard the state keys of its parameters: zeros for values per element, copies of other values."""
    # A 0-dim parameter's state has the shape of a step count. So learn from the other parameters
    # which keys hold a value for each element.
    items = [(p, key, value) for p in parameters for key, value in whole.get(p, {}).items()]
    of_elements = {
        k for p, k, v in items if p.ndim and isinstance(v, Tensor) and v.shape == p.shape
    }
    for each in parameters:
        for key, value in whole.get(each, {}).items():
            if key in of_elements:
                if key not in entries:
                    entries[key] = torch.zeros_like(flat, dtype=value.dtype)
                continue
            first = next(whole[p][key] for p in parameters if key in whole.get(p, {}))
            if not _equal(first, value):
                raise CheckpointError(
                    f"load: wrap_deepspeed must have one {key!r} for all parameters of a group, got {first} "
                    f"and {value}; load by wrap_fsdp"
                )
            entries[key] = value.clone() if isinstance(value, Tensor) else value


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return bool(first == second)


def _set(parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
    """Write this rank's part of `value` to its shard: of a parameter, or with `key`, of that state tensor."""
    from deepspeed.utils import (
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_optimizer_state,
    )

    if not hasattr(parameter, "ds_id"):
        if key is None:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, key)
        return
    # At stage 3, DeepSpeed pads a parameter, so that all shards have the same size. Its function for
    # whole values does not pad them, so pad them here. The type is `Any`, since DeepSpeed has added
    # attributes to parameters.
    held: Any = parameter
    size = held.ds_tensor.numel()
    padded = value.new_zeros(size * torch.distributed.get_world_size())
    padded[: value.numel()] = value.flatten()
    part = padded[size * torch.distributed.get_rank() :][:size]
    if key is None:
        safe_set_local_fp32_param(parameter, part)
    else:
        safe_set_local_optimizer_state(parameter, part, key)
