"""place: move models and batches to the device of the state."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accel_fn.core.batch import moved
from accel_fn.core.empty import move_values
from accel_fn.core.plan import SlotFunction
from accel_fn.core.state import DistState
from accel_fn.core.transform import Transform, fill, transform
from accel_fn.errors import ArgumentTypeError, message


@transform
def place(*, frozen_dtype: torch.dtype | None = None) -> Transform:
    """Move models to `state.device` in `build`, and every micro-batch just before its forward.

    Parameters on the meta device, as in a model from `empty`, stay there until `build` allocates
    memory on each rank.

    Law: the identity if everything is on the device already, and no `frozen_dtype` is given.
    Tests: `tests/laws/law03_parts.py`.

    Args:
        frozen_dtype: the dtype of the floating-point tensors of frozen models, such as
            `torch.bfloat16`; default: unchanged. Outside of `with_amp`, the loss must give these
            models inputs of this dtype.

    Returns:
        A transform.

    Raises:
        TypeError: `frozen_dtype` is neither None nor a floating-point dtype.

    Cost: one copy per micro-batch, none for tensors on the device. From pinned memory, the
    copy overlaps with the device's work.

    >>> import accel_fn as af
    >>> af.place()(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=count_samples, place_model=[place()], place_frozen=[place()], \
place_batch=[place()])
    """
    is_float = isinstance(frozen_dtype, torch.dtype) and frozen_dtype.is_floating_point
    if frozen_dtype is not None and not is_float:
        rule = "be a floating-point torch.dtype or None"
        raise ArgumentTypeError(message("place", "frozen_dtype", rule, frozen_dtype))
    return fill(
        place_model=SlotFunction(move_to_device),
        place_frozen=SlotFunction(move_frozen, dtype=frozen_dtype),
        place_batch=SlotFunction(move_batch),
    )


def move_to_device(state: DistState, model: nn.Module) -> nn.Module:
    """Move the model to the state's device, in place; its parameters stay the same objects."""
    move_values(model, state.device)
    return model


def move_frozen(state: DistState, model: nn.Module, *, dtype: torch.dtype | None) -> nn.Module:
    """Move a frozen model to the state's device and to a dtype, in place."""
    return model.to(device=state.device, dtype=dtype)


def move_batch(state: DistState, batch: Any) -> Any:
    """Move the batch to the state's device."""
    return moved(batch, state.device)
