"""Devices of a plan: an accelerator that nothing would use is refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import accel_fn as af


def plan_on(device):
    model = nn.Linear(2, 1, device=device)

    def loss_fn(model, batch):
        return F.mse_loss(model(batch), batch.sum(1, keepdim=True))

    return af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("recipe", [af.compose(), af.wrap_ddp(), af.accumulate(2)], ids=str)
def test_a_model_that_nothing_moves_to_the_accelerator_is_refused(recipe):
    with pytest.raises(
        ValueError,
        match=r"^build: model must be on cuda:1, the device of the state, got all parameters on the "
        r'CPU; add place\(\), or train there with init\(device="cpu"\)$',
    ):
        af.build(recipe(plan_on("cpu")), af.DistState(device="cuda:1"))


def test_a_model_that_the_user_has_moved_needs_no_place():
    """Meta tensors take the place of an accelerator's: nothing runs."""
    state, _ = af.build(plan_on("meta"), af.DistState(device="meta"))
    assert state.device == torch.device("meta")


def test_a_move_that_makes_new_parameters_is_refused():
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with pytest.raises(ValueError, match="optimizer must hold parameters of the model alone"):
            af.build(af.place()(plan_on("cpu")), af.DistState())
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
