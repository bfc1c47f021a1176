"""A check that an optimizer can update sharded parameters."""

from __future__ import annotations

from torch import Tensor
from torch.optim import SGD, Adafactor, Adagrad, Muon, Optimizer, Rprop

from accel_fn.errors import PlanError

_WHOLE_ONLY = (Adafactor, Rprop)
_NOT_FUSED = (SGD, Adagrad)


def check_updates_shards(optimizer: Optimizer, transform: str) -> None:
    """Refuse an optimizer of torch whose update torch cannot compute on shards."""
    name = type(optimizer).__name__
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if isinstance(optimizer, Muon):
        rule = "update elements one by one: of a shard of a matrix it computes another update"
        repair = "use AdamW, for example, or wrap_ddp alone"
    elif isinstance(optimizer, _WHOLE_ONLY):
        rule, repair = "be one that can update shards", "use AdamW, for example"
    elif fused and isinstance(optimizer, _NOT_FUSED):
        rule, repair, name = "have a kernel for shards", "leave out fused", f"{name}(fused=True)"
    else:
        rule, repair, name = _broken_state(optimizer)
    if rule:
        raise PlanError(f"build: {transform}'s optimizer must {rule}, got {name}; {repair}")


def _broken_state(optimizer: Optimizer) -> tuple[str, str, str]:
    """Find a state that differs in shape from its parameter; return rule, repair and shapes.

    If every shape fits, return three empty strings.
    """
    for parameter, held in optimizer.state.items():
        for name, value in held.items():
            if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
                shapes = f"{name!r} of shape {list(value.shape)} for one of {list(parameter.shape)}"
                return "hold tensors of its parameters' shapes", "make a new optimizer", shapes
    return "", "", ""
