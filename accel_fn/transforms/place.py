"""place: model and batches go to the device of the state."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from accel_fn.base.batch import map_tensors, tensors_of
from accel_fn.base.state import DistState
from accel_fn.step.plan import SlotFunction
from accel_fn.step.transform import Transform, fill, transform


@transform
def place() -> Transform:
    """Move the model to `state.device` in `build`, and every micro-batch just before its forward.

    Law: the identity where everything is on the device already.

    Returns:
        A transform.

    Cost: nothing for a tensor that is there already; else one copy per micro-batch,
    which overlaps with the device's work where its memory is pinned.

    >>> import accel_fn as af
    >>> af.place()(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=num_samples, place_model=[place()], place_batch=[place()])
    """
    return fill(place_model=SlotFunction(move_to_device), place_batch=SlotFunction(to_device))


def to_device(state: DistState, batch: Any) -> Any:
    """The batch with its tensors on the state's device."""
    device = state.device
    elsewhere = [tensor for tensor in tensors_of(batch) if tensor.device != device]
    if not elsewhere:
        return batch
    overlap = device.type != "cpu"  # a copy to the host that nobody waits for is read too early

    def to(tensor: Tensor) -> Tensor:
        return tensor if tensor.device == device else tensor.to(device, non_blocking=overlap)

    return map_tensors(to, batch)


def move_to_device(state: DistState, model: nn.Module) -> nn.Module:
    """The model on the state's device: the same parameters, moved in place."""
    return model.to(state.device)
