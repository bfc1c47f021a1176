"""Laws 10 and 12: the trace of learning rates, and old states."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate, strategies
from tests.support import strategies as ours


def scheduled(scheduler):
    """Make a user's transform: one step of a scheduler per applied update."""

    def advance(state, report):
        if report.applied:
            scheduler.step()
        return state

    return lambda plan: replace(plan, after_update=(*plan.after_update, advance))


def rates(batches, world_size, num_microbatches, poisoned):
    """Return the learning rate of every applied update, on every rank."""

    def run(state):
        model = ours.regression_model().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count))
        recipe = af.compose(
            af.wrap_ddp(),
            af.accumulate(num_microbatches),
            af.with_amp("fp16", init_scale=4.0),
            scheduled(scheduler),
        )
        state, step = af.build(state, recipe(af.Plan(ours.mse, model, optimizer)))
        trace = []
        for batch, is_bad in zip(batches, poisoned, strict=False):
            inputs, targets = (
                value.float().tensor_split(world_size)[state.rank] for value in batch
            )
            rate = optimizer.param_groups[0]["lr"]
            state, report = step(state, (inputs * float("nan") if is_bad else inputs, targets))
            if report.applied:
                trace.append(rate)
        return trace

    return simulate(run, world_size=world_size)


@given(
    batches=strategies.batches(num_batches=4),
    poisoned=st.lists(st.booleans(), min_size=4, max_size=4),
    world_size=st.sampled_from([1, 2, 4]),
    num_microbatches=st.sampled_from([1, 4]),
)
def test_the_learning_rate_is_a_function_of_applied_updates_only(
    batches, poisoned, world_size, num_microbatches
):
    skipped = sum(poisoned[: len(batches)])
    expected = [1 / (1 + count) for count in range(len(batches) - skipped)]
    assert rates(batches, world_size, num_microbatches, poisoned) == [expected] * world_size


@given(batches=strategies.batches(), world_size=st.integers(1, 3))
def test_stepping_twice_from_a_copy_of_everything_gives_the_same_twice(batches, world_size):
    def run(state):
        model = ours.regression_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        recipe = af.compose(
            af.wrap_ddp(), af.accumulate(2), af.clip(0.5), af.with_amp("fp16", init_scale=8.0)
        )
        state, step = af.build(state, recipe(af.Plan(ours.mse, model.float(), optimizer)))
        parts = [
            tuple(value.float().tensor_split(world_size)[state.rank] for value in batch)
            for batch in batches
        ]
        for part in parts[:-1]:
            state, _ = step(state, part)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        old, results = state, []
        for _ in range(2):
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(copy.deepcopy(saved[1]))
            new, report = step(old, parts[-1])
            results.append(
                (
                    copy.deepcopy(model.state_dict()),
                    new.step,
                    float(new.scaler.scale),
                    float(report.loss),
                )
            )
        return old.step, results

    for step_before, (first, second) in simulate(run, world_size=world_size):
        assert step_before == len(batches) - 1
        ours.assert_identical(first[0], second[0])
        assert first[1:] == second[1:]
        assert first[1] == len(batches)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_of_one_batch_outlive_those_of_the_next(world_size):
    """DDP's gradients live in its buckets; those that `grads` returns must not."""

    def run(state):
        state, step = ours.built(af.wrap_ddp(), state)
        batch = (torch.ones(2, 3).double(), torch.ones(2, 1).double())
        state, grads, _ = step.grads(state, batch)
        before = [tensor.clone() for tensor in grads.tensors]
        step.grads(state, (batch[0] * 5, batch[1]))
        return all(torch.equal(a, b) for a, b in zip(grads.tensors, before, strict=True))

    assert simulate(run, world_size=world_size) == [True] * world_size


def test_a_gradient_function_may_ask_for_gradients_twice():
    """SAM uses this slot: the first gradients are unchanged after the second call."""
    seen = []

    def twice(grad_fn):
        def averaged(state, batch):
            state, first, report = grad_fn(state, batch)
            kept = [tensor.clone() for tensor in first.tensors]
            state, _, _ = grad_fn(state, (batch[0] * 3, batch[1]))
            seen.append(all(torch.equal(a, b) for a, b in zip(first.tensors, kept, strict=True)))
            return state, first, report

        return averaged

    def run(state):
        plan = ours.plan()
        plan = replace(af.wrap_ddp()(plan), wrap_grad_fn=(twice,))
        state, step = af.build(state, plan)
        step(state, (torch.ones(2, 3).double(), torch.ones(2, 1).double()))

    simulate(run, world_size=2)
    assert seen == [True, True]
