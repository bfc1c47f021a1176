"""wrap_fsdp with other parts of a step: optimizers, autocast, micro-batches, evaluation,
failures."""

import pytest
import torch
from torch.distributed.tensor import DTensor

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours
from tests.support.block_models import (
    assert_trains_as_alone,
    batches,
    part,
    stack,
)

pytestmark = pytest.mark.filterwarnings("ignore:step. model should write the same in its forward")


def warmed_up(model, optimizer):
    """Train a few steps before the model is sharded."""
    for batch in batches(2):
        ours.mse(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def in_two_groups(kind, **settings):
    def make(parameters):
        each = list(parameters)
        groups = [{"params": each[:3], "lr": 0.01}, {"params": each[3:][::-1], "weight_decay": 0.3}]
        return kind(groups, lr=0.05, **settings)

    return make


@pytest.mark.parametrize(
    "optimizer",
    [in_two_groups(torch.optim.AdamW, amsgrad=True), in_two_groups(torch.optim.SGD, momentum=0.9)],
    ids=["adamw", "sgd"],
)
def test_an_optimizer_made_before_keeps_its_groups_and_what_it_holds(optimizer):
    assert_trains_as_alone(af.wrap_fsdp(), optimizer=optimizer, before=warmed_up)


@pytest.mark.parametrize("reshard", [True, False])
def test_ranks_exchange_gradients_only_in_the_last_micro_batch(reshard):
    """With reshard_after_forward=False, blocks also stay whole from one micro-batch to the next."""

    def run(state):
        model, seen = stack(), []
        optimizer = ours.sgd(model.parameters())

        def loss_fn(model, batch):
            held = [each for group in optimizer.param_groups for each in group["params"]]
            is_whole = not isinstance(model.blocks[0].inner[0].weight, DTensor)
            seen.append((all(each.grad is None for each in held), is_whole))
            return ours.mse(model, batch)

        recipe = af.compose(af.wrap_fsdp(reshard_after_forward=reshard), af.accumulate(3))
        state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), state, check_loss=False)
        for batch in batches(2):
            state, _ = step(state, part(batch, state))
        return seen

    kept = [(True, False), (True, not reshard), (True, not reshard)]
    assert simulate(run, world_size=2) == [kept * 2] * 2
