"""Law 12: an old state stays valid, and so do gradients of an earlier batch."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate, strategies
from tests.support import strategies as ours


@ours.share(0.5)
@given(batches=strategies.batches(), world_size=st.integers(1, 3))
def test_stepping_twice_from_a_copy_of_everything_gives_the_same_twice(batches, world_size):
    def run(state):
        model = ours.regression_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        recipe = af.compose(
            af.wrap_ddp(), af.accumulate(2), af.clip(0.5), af.with_amp("fp16", init_scale=8.0)
        )
        state, step = af.build(recipe(af.Plan(ours.mse, model.float(), optimizer)), state)
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
            found = copy.deepcopy(model.state_dict())
            results.append((found, new.step, float(new.scaler.scale), float(report.loss)))
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
        state, step = af.build(plan, state)
        step(state, (torch.ones(2, 3).double(), torch.ones(2, 1).double()))

    simulate(run, world_size=2)
    assert seen == [True, True]
