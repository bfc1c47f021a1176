"""Parameters that DeepSpeed's ZeRO manages: sharded, or with a second copy that ZeRO updates.

This module finds them by the attributes that DeepSpeed sets: importing DeepSpeed takes time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from accel_fn.core.state import DistState


def is_partitioned(model: object) -> bool:
    """Return whether each rank holds only shards of the parameters, as in stage 3 of ZeRO."""
    return isinstance(model, nn.Module) and any(hasattr(p, "ds_id") for p in model.parameters())


def is_copied(model: object) -> bool:
    """Return whether ZeRO overwrites the parameters with its own copy in every update."""
    return isinstance(model, nn.Module) and any(map(_is_held, model.parameters()))


def is_born_sharded(model: nn.Module) -> bool:
    """Return whether the model was made under `deepspeed.zero.Init` and has no engine."""
    return any(hasattr(p, "ds_id") and not hasattr(p, "_z3_optimizer") for p in model.parameters())


def _is_held(parameter: Tensor) -> bool:
    """Return whether an engine of ZeRO stage 1 to 3, or `zero.Init`, manages this parameter."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Gather the whole parameters on every rank inside the context, only for reading."""
    if not is_partitioned(model):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([*model.parameters()]):
        yield


def world_of(model: nn.Module) -> list[DistState]:
    """Return the ranks that hold the shards of a model; an empty list if it is whole."""
    if not is_partitioned(model):
        return []
    group = torch.distributed.group.WORLD
    assert group is not None
    return [DistState(rank=group.rank(), world_size=group.size(), group=group)]
