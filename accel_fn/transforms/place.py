"""place: model and batches go to the device of the state."""

from __future__ import annotations

from typing import Any

from torch import nn

from accel_fn.base.batch import to_device
from accel_fn.base.state import DistState
from accel_fn.step.plan import SlotFunction
from accel_fn.step.transform import Transform, fill, transform


@transform
def place() -> Transform:
    """Move the model to `state.device` in `build`, and every micro-batch just before its forward.

    Law: the identity if everything is on the device already.

    Returns:
        A transform.

    Cost: one copy per micro-batch, none for tensors on the device. From pinned memory, the
    copy overlaps with the device's work.

    >>> import accel_fn as af
    >>> af.place()(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=num_samples, place_model=[place()], place_batch=[place()])
    """
    return fill(place_model=SlotFunction(move_to_device), place_batch=SlotFunction(move_batch))


def move_to_device(state: DistState, model: nn.Module) -> nn.Module:
    """The model on the state's device: the same parameters, moved in place."""
    return model.to(state.device)


def move_batch(state: DistState, batch: Any) -> Any:
    """The batch on the state's device."""
    return to_device(batch, state)
