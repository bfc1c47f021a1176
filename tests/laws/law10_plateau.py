"""Law 10 for a schedule by a metric: it follows the metric of the updates made."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours
from tests.support.late_reads import read_late
from tests.support.schedules import by_device_and_metric, plateau, sgd


def plateau_by_hand(batches, is_late):
    """Return the rates of the applied updates; batches without a finite loss are skipped."""
    model = ours.regression_model()
    optimizer = sgd(model.parameters())
    scheduler, waiting = plateau(optimizer), []
    for batch in batches:
        loss = ours.mse(model, batch)
        if not loss.isfinite():
            continue
        yield optimizer.param_groups[0]["lr"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        waiting.append(loss.item())
        if len(waiting) > is_late:
            scheduler.step(waiting.pop(0))


def on_the_host(optimizer):
    """Advance as `schedule` does if the host knows whether an update was applied."""
    return af.schedule(plateau(optimizer))


def read_late_on_the_host(optimizer):
    """Advance as on an accelerator where the host waits for the result."""
    return reading_late(on_the_host(optimizer))


def on_the_device(optimizer):
    """Advance as on an accelerator where the host does not wait."""
    return reading_late(by_device_and_metric(plateau(optimizer), lambda report: report.loss))


def reading_late(transform):
    """Let the schedule read the metric of an update one step late."""

    def begin(state, plan, *, added):
        schedule = added(state, plan)
        read_late(schedule)
        return schedule

    def add(plan):
        *others, added = transform(plan).after_update
        return replace(
            plan, after_update=(*others, af.extend.Stateful(partial(begin, added=added)))
        )

    return add


@ours.share(0.34)
@given(
    make=st.sampled_from([on_the_host, read_late_on_the_host, on_the_device]),
    is_anew=st.booleans(),
    saved_after=st.integers(2, 9),
    world_size=st.sampled_from([1, 2]),
    num_microbatches=st.sampled_from([1, 4]),
)
@example(make=read_late_on_the_host, is_anew=True, saved_after=4, world_size=2, num_microbatches=1)
@example(make=on_the_device, is_anew=False, saved_after=5, world_size=2, num_microbatches=1)
def test_a_plateau_is_seen_in_the_updates_made_on_any_ranks_also_where_a_run_resumes(
    tmp_path_factory, world_size, num_microbatches, saved_after, is_anew, make
):
    """It advances by each applied update, or by the one before if results are read late."""
    folder = tmp_path_factory.mktemp("run")
    nan = float("nan")
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
    targets = [0.0, 1.0, nan, 2.0, nan, 0.0, nan, nan, 3.0, nan, 3.0, 0.0, 0.0]
    batches = [(inputs, torch.full((4, 1), target).double()) for target in targets]

    def built(state):
        model = ours.regression_model()
        optimizer = sgd(model.parameters())
        recipe = af.compose(
            af.wrap_ddp(), af.accumulate(num_microbatches), af.skip_nonfinite(), make(optimizer)
        )
        return af.build(recipe(af.Plan(ours.mse, model, optimizer)), state)

    def go_on(state, step, batches):
        rates = []
        for batch in batches:
            rate = float(step.plan.optimizer.param_groups[0]["lr"])
            mine = [each.tensor_split(state.world_size)[state.rank] for each in batch]
            state, report = step(state, mine)
            rates += [rate] if report.applied else []
        return state, rates

    def run(state):
        state, step = built(state)
        state, rates = go_on(state, step, batches[:saved_after])
        af.save(step, state, folder)
        state, _ = go_on(state, step, batches[:2])
        state, step = built(state) if is_anew else (state, step)
        state = af.load(step, state, folder)
        return rates + go_on(state, step, batches[saved_after:])[1]

    expected = list(plateau_by_hand(batches, is_late=make is not on_the_host))
    assert len(set(expected)) > 2
    for rates in simulate(run, world_size=world_size):
        on_device = make is on_the_device
        # the rate is in float32
        assert rates == (pytest.approx(expected, rel=1e-7) if on_device else expected)
