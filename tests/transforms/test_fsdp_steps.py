"""wrap_fsdp with other parts of a step: optimizers, autocast, micro-batches, evaluation,
failures."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours
from tests.support.block_models import (
    assert_trains_as_alone,
    batches,
    part,
    stack,
    train,
    weights_after,
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


def test_the_optimizer_points_at_the_parameters_of_the_model():
    def run(state):
        model = stack()
        optimizer = in_two_groups(torch.optim.SGD)(model.parameters())
        af.build(state, af.wrap_fsdp()(af.Plan(ours.mse, model, optimizer)))
        mine = [id(each) for each in model.parameters()]
        first, second = optimizer.param_groups
        assert [id(each) for each in (*first["params"], *second["params"][::-1])] == mine
        assert all(isinstance(each, DTensor) for each in model.parameters())
        return first["lr"], second["lr"], second["weight_decay"]

    assert simulate(run, world_size=2) == [(0.01, 0.05, 0.3)] * 2


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
        state, step = af.build(state, recipe(af.Plan(loss_fn, model, optimizer)), check_loss=False)
        for batch in batches(2):
            state, _ = step(state, part(batch, state))
        return seen

    kept = [(True, False), (True, not reshard), (True, not reshard)]
    assert simulate(run, world_size=2) == [kept * 2] * 2


@pytest.mark.parametrize("reshard", [True, False])
def test_a_block_stays_whole_from_its_forward_to_its_backward_only_without_resharding(reshard):
    def run(state):
        model, seen = stack(), []

        def look(*_):
            seen.append({not isinstance(each, DTensor) for each in model.blocks.parameters()})

        def loss_fn(model, batch):
            loss = ours.mse(model, batch)
            look()
            loss.register_hook(look)
            return loss

        wrap = af.wrap_fsdp(reshard_after_forward=reshard)
        recipe = af.compose(wrap, af.accumulate(3))
        state, step = ours.built(recipe, state, model=model, loss_fn=loss_fn)
        for batch in batches(2):
            state, _ = step(state, part(batch, state))
        look()
        return seen

    looks = [{not reshard}] * 2 * 3 * 2  # after a forward and before its backward
    assert simulate(run, world_size=2) == [[*looks, {False}]] * 2


@pytest.mark.slow
def test_autocast_trains_and_skips_what_overflows():
    def run(state):
        model = stack().float()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
        recipe = af.compose(af.wrap_fsdp(), af.with_amp("fp16", init_scale=2.0**10))
        plan = recipe(af.Plan(ours.mse, model, optimizer))
        state, step = af.build(state, plan, check_loss=False)
        before = ours.whole(model.state_dict())
        batch = torch.ones(2, 3), torch.ones(2, 1)
        far = batch[0] * 1e6 if state.is_main else batch[0]
        state, report = step(state, (far, batch[1]))
        assert not report.applied
        assert float(state.scaler.scale) == 2.0**9
        for name, parameter in ours.whole(dict(model.named_parameters())).items():
            assert torch.equal(parameter, before[name])
        losses = []
        for _ in range(8):
            state, report = step(state, batch)
            losses.append(float(report.loss))
        return losses[-1] < losses[0] / 2

    assert simulate(run, world_size=2) == [True, True]


def test_frozen_parameters_stay_as_they_are():
    def freeze(model, _):
        model.first.requires_grad_(False)
        model.blocks[1].requires_grad_(False)

    assert_trains_as_alone(af.wrap_fsdp(), before=freeze)


@pytest.mark.filterwarnings("ignore:step. loss_fn should reach what is trained")
def test_another_model_in_the_loss_keeps_its_gradients():
    def run(state):
        critic = nn.Linear(1, 1).double()
        critic.weight.grad = torch.full((1, 1), 7.0).double()
        loss_fn = lambda model, batch: critic(model(batch[0])).square().mean()
        train(state, af.wrap_fsdp(), loss_fn=loss_fn)
        return float(critic.weight.grad), critic.bias.grad

    assert simulate(run, world_size=2) == [(7.0, None)] * 2


def test_a_forward_alone_leaves_shards_and_gives_the_loss_of_the_global_batch():
    batch = batches(1)[0]
    expected = ours.mse(stack(), batch).item()

    def run(state):
        state, step = ours.built(af.compose(af.wrap_fsdp(), af.accumulate(3)), state, model=stack())
        mine = batch if state.rank == 1 else ours.rows(batch, 0, 0)
        loss = float(step.forward(state, mine))
        with torch.no_grad():
            step.plan.model(batch[0])
        return loss, all(isinstance(each, DTensor) for each in step.plan.model.parameters())

    assert simulate(run, world_size=3) == [(pytest.approx(expected, rel=1e-6), True)] * 3


def failing_in_the_loss(model, batch):
    model(batch[0])
    raise ZeroDivisionError


def failing_in_a_block(model, batch):
    handle = model.blocks[1].inner[0].register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        return ours.mse(model, batch)
    finally:
        handle.remove()


def failing_in_the_backward(model, batch):
    hidden = model.encode(batch[0])
    hidden.register_hook(lambda gradient: 1 / 0)
    return F.mse_loss(model.last(hidden), batch[1])


@pytest.mark.parametrize(
    ("failing", "num_microbatches"),
    [(failing_in_a_block, 2), pytest.param(failing_in_the_backward, 1, marks=pytest.mark.slow)],
)
def test_a_step_that_fails_can_be_followed_by_one(failing, num_microbatches):
    def run(state):
        model, calls = stack(), []

        def loss_fn(model, batch):
            calls.append(None)
            return (failing if len(calls) == num_microbatches + 1 else ours.mse)(model, batch)

        recipe = af.compose(af.wrap_fsdp(), af.accumulate(num_microbatches))
        state, step = ours.built(recipe, state, model=model, optimizer=ours.adamw, loss_fn=loss_fn)
        for index, batch in enumerate(batches()):
            if index == 1:
                with pytest.raises(ZeroDivisionError):
                    step(state, part(batch, state))
                assert all(isinstance(each, DTensor) for each in model.parameters())
            state, _ = step(state, part(batch, state))
        return ours.whole(dict(model.named_parameters()))

    (expected,) = weights_after(af.compose(), 1)
    for actual in simulate(run, world_size=2):
        for name, value in actual.items():
            torch.testing.assert_close(value, expected[name], **ours.EXACT)


@pytest.mark.slow
def test_nothing_is_left_of_the_micro_batches_before_one_that_fails():
    """The gradients are added up in another dtype than their own."""

    def run(state, fails):
        calls = []

        def loss_fn(model, batch):
            calls.append(None)
            return (failing_in_the_loss if fails and len(calls) == 2 else ours.mse)(model, batch)

        model = stack().float()
        recipe = af.compose(af.wrap_fsdp(param_dtype=torch.bfloat16), af.accumulate(2))
        state, step = ours.built(recipe, state, model=model, optimizer=ours.adamw, loss_fn=loss_fn)
        batch = part([each.float() for each in batches(1)[0]], state)
        if fails:
            with pytest.raises(ZeroDivisionError):
                step(state, batch)
        step(state, batch)
        return ours.whole(dict(model.named_parameters()))

    found = simulate(lambda state: run(state, fails=True), world_size=2)
    expected = simulate(lambda state: run(state, fails=False), world_size=2)
    for one, other in zip(found, expected, strict=True):
        ours.assert_identical(one, other)
