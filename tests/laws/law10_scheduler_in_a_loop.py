"""Law 10 for a scheduler of the user's loop: its rates follow applied updates alone."""

from dataclasses import replace

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
        amp = af.with_amp("fp16", init_scale=4.0)
        recipe = af.compose(
            af.wrap_ddp(), af.accumulate(num_microbatches), amp, scheduled(scheduler)
        )
        state, step = af.build(state, recipe(af.Plan(ours.mse, model, optimizer)))
        trace = []
        for batch, is_bad in zip(batches, poisoned, strict=False):
            inputs, targets = af.part(tuple(value.float() for value in batch), state)
            rate = optimizer.param_groups[0]["lr"]
            state, report = step(state, (inputs * float("nan") if is_bad else inputs, targets))
            trace += [rate] if report.applied else []
        return trace

    return simulate(run, world_size=world_size)


@ours.share(0.5)
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
