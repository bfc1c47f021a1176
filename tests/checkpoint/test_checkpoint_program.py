"""load: what comes from the checkpoint, what stays each rank's own, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

import accel_fn as af
from accel_fn.testing import simulate
from tests.checkpoint.test_checkpoint import Counter, advance, differences, kept, make
from tests.support import strategies as ours


def with_buffer(state, number):
    """Make a step of a model with a counter in a buffer, set to another number on every rank."""
    model = ours.regression_model()
    model.register_buffer("seen", torch.zeros(2))
    state, step = make(model=model, recipe=af.wrap_ddp(), state=state)
    model.seen.fill_(number)  # after `build`, which gives all ranks the buffers of rank 0
    return state, step


def scheduled(by, *options):
    return lambda plan: af.schedule(by(plan.optimizer, *options))(plan)


def test_another_schedule_starts_fresh_if_not_strict(tmp_path, capsys):
    """It starts at the saved learning rate."""
    state, step = make(recipe=scheduled(StepLR, 1))
    path = af.save(step, advance(state, step), tmp_path)
    state, other = make(3, recipe=scheduled(CosineAnnealingLR, 10))
    fresh = other.plan.after_update[0].state_dict()
    state = af.load(other, state, tmp_path, strict=False)
    assert capsys.readouterr().err == (
        f"{path} is of another program:\n  after_update: ['schedule(StepLR)'] saved, "
        "['schedule(CosineAnnealingLR)'] here\n"
    )
    assert (state.step, other.plan.after_update[0].state_dict()) == (2, fresh)
    rates = [each.plan.optimizer.param_groups[0]["lr"] for each in (step, other)]
    assert rates == pytest.approx([0.05 / 100] * 2)
    ours.assert_identical(ours.kept_tensors(other), ours.kept_tensors(step))
    advance(state, other)


@pytest.mark.parametrize(("world_size", "expected"), [(2, [1, 2]), (1, [1]), (3, [1, 1, 1])])
def test_buffers_are_each_ranks_own_in_a_world_of_the_same_size(tmp_path, world_size, expected):
    """In a world of another size, all ranks get the buffers of rank 0."""

    def load(state):
        state, step = with_buffer(state, 7)
        af.load(step, state, tmp_path)
        return step.plan.model.seen.tolist()

    simulate(
        lambda state: af.save(*reversed(with_buffer(state, 1 + state.rank)), tmp_path), world_size=2
    )
    assert simulate(load, world_size=world_size) == [[each] * 2 for each in expected]


SETTINGS = [
    (torch.optim.AdamW, {"amsgrad": True, "maximize": True, "lr": 0.5}),
    (torch.optim.AdamW, {"weight_decay": 0.3, "betas": (0.5, 0.6), "eps": 1e-3}),
    (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.3}),
]


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
def test_settings_of_the_optimizer_become_those_that_were_saved(tmp_path, kind, settings):
    state, step = make(optimizer=lambda parameters: kind(parameters, **settings))
    state = advance(state, step)
    af.save(step, state, tmp_path)
    loaded, other = make(3, optimizer=lambda parameters: kind(parameters, lr=0.1))
    loaded = af.load(other, loaded, tmp_path)
    (group,) = other.plan.optimizer.param_groups
    assert {name: group[name] for name in settings} == settings
    advance(state, step)
    advance(loaded, other)
    torch.testing.assert_close(kept(other), kept(step), rtol=0, atol=0)


@pytest.mark.parametrize("option", ["foreach", "fused", "capturable", "differentiable"])
def test_the_implementation_of_an_optimizer_is_that_of_the_program(tmp_path, option):
    """The run may go on with a device or a torch that lacks the saved implementation."""
    state, step = make(optimizer=lambda each: torch.optim.Adam(each, lr=0.1, **{option: True}))
    af.save(step, state, tmp_path)
    state, other = make(optimizer=lambda each: torch.optim.Adam(each, lr=0.3, **{option: False}))
    af.load(other, state, tmp_path)
    (group,) = other.plan.optimizer.param_groups
    assert (group[option], group["lr"]) == (False, 0.1)


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        (af.clip(0.5), af.clip(2.0)),
        (af.ema(0.9), af.ema(0.5)),
        (af.skip_nonfinite(3), af.skip_nonfinite(5)),
        (af.compose(), af.accumulate(4)),
    ],
    ids=["clip", "ema", "skip_nonfinite", "accumulate"],
)
def test_arguments_of_transforms_are_those_of_the_program(tmp_path, saved, here):
    """A run may go on with another bound, and with another number of micro-batches."""
    state, step = make(recipe=saved)
    af.save(step, advance(state, step), tmp_path)
    state, other = make(3, recipe=here)
    before = repr(other.plan)
    assert af.load(other, state, tmp_path).step == 2
    assert repr(other.plan) == before


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_rank_has_its_extras_and_new_ranks_those_of_rank_0(tmp_path, world_size):
    def save(state):
        state, step = make(recipe=af.wrap_ddp(), state=state)
        af.save(step, state, tmp_path, extras={"own": {"rank": 10 + state.rank}})

    def load(state):
        state, step = make(recipe=af.wrap_ddp(), state=state)
        own = {"rank": 0}
        af.load(step, state, tmp_path, extras={"own": own})
        return own["rank"]

    simulate(save, world_size=2)
    assert simulate(load, world_size=world_size) == [10, 11, 10, 10][:world_size]


class Comparing(Counter):
    """A counter that can compare itself with a saved one."""

    def differences_from(self, saved):
        return [f"{word}: {saved['number']} saved, {self.number} here" for word in ("one", "two")]


def test_differences_of_a_users_extra_are_listed_with_the_others(tmp_path):
    state, step = make()
    extras = {"counter": Counter(4), "other": Counter(5)}
    af.save(step, advance(state, step), tmp_path, extras=extras)
    extras = {"counter": Comparing(9), "other": Counter(8)}
    assert differences(tmp_path, *make(3, recipe=af.clip(1.0)), extras=extras) == [
        "gradients: nothing saved, ['clip'] here",
        "extras/counter: one: 4 saved, 9 here",
        "extras/counter: two: 4 saved, 9 here",
    ]
    assert [each.number for each in extras.values()] == [9, 8]
