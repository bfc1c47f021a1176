"""Observers: what they see of a step, when, and what becomes of their errors."""

from dataclasses import replace

import pytest
import torch

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours

BATCH = (torch.randn(6, 3).double(), torch.randn(6, 1).double())


class Notes(af.extend.Observer):
    """Notes each call."""

    def __init__(self, plan, strategy, state):
        self.calls = []

    def before(self, state, batch):
        self.calls.append(("before", state.step, len(batch[0])))

    def on_outcome(self, rows, outcome):
        self.calls.append(("outcome", len(rows[0]), float(outcome[0].detach())))

    def on_update(self, state, grads, report):
        self.calls.append(("update", float(grads.norm())))

    def after(self, state, batch, report):
        applied = None if report.applied is None else bool(report.applied)
        self.calls.append(("after", state.step, applied, batch is None))

    def failed(self, state, error):
        self.calls.append(("failed", state.step, str(error)))

    def saved(self, state, seconds, folder):
        self.calls.append(("saved", state.step))

    def loaded(self, state, seconds, folder):
        self.calls.append(("loaded", state.step))

    def evaluated(self, state, seconds):
        self.calls.append(("evaluated", state.step))


class EverySecond(Notes):
    def wants(self, state):
        return state.step % 2 == 1


def built(make, *transforms, state=None, **options):
    plan = af.compose(*transforms)(ours.plan())
    plan = replace(plan, observers=(*plan.observers, make))
    state, step = af.build(plan, state or af.DistState(), **options)
    (found,) = [each for each in step.observers.every if isinstance(each, Notes)]
    return state, step, found


def test_an_observer_sees_the_batch_each_micro_batch_the_update_and_the_report():
    state, step, notes = built(Notes, af.accumulate(2), af.clip(1e-3))
    state, report = step(state, BATCH)
    before, *outcomes, update, after = notes.calls
    assert before == ("before", 0, 6)
    assert [name for name, *_ in outcomes] == ["outcome"] * 2
    losses = [loss for *_, loss in outcomes]
    assert sum(losses) / 2 == pytest.approx(float(report.loss), rel=1e-12)
    assert update == ("update", pytest.approx(1e-3))  # what the optimizer gets
    assert after == ("after", 1, True, False)


def test_gradients_and_their_update_are_two_ends_of_a_step():
    state, step, notes = built(Notes)
    state, grads, report = step.grads(state, BATCH)
    assert notes.calls[-1] == ("after", 0, None, False)
    step.update(state, grads, report)
    assert [name for name, *_ in notes.calls[-2:]] == ["update", "after"]
    assert notes.calls[-1] == ("after", 1, True, True)


def test_nothing_of_a_step_is_shown_to_an_observer_that_does_not_want_it():
    state, step, notes = built(EverySecond)
    for _ in range(4):
        state, _ = step(state, BATCH)
    assert {call[1] for call in notes.calls if call[0] == "before"} == {1, 3}
    assert sum(call[0] == "outcome" for call in notes.calls) == 2


def test_events_of_a_run_are_shown(tmp_path):
    state, step, notes = built(EverySecond)
    af.save(step, state, tmp_path)
    state = af.load(step, state, tmp_path)
    af.evaluate(step, state, [BATCH])
    assert [name for name, *_ in notes.calls] == ["saved", "loaded", "evaluated"]


def test_a_step_that_fails_is_shown_to_those_that_did_not_want_it_too():
    def loss_fn(model, batch):
        raise ValueError("no loss")

    plan = replace(ours.plan(), loss_fn=loss_fn, observers=(EverySecond,))
    state, step = af.build(plan, af.DistState())
    with pytest.raises(ValueError, match="no loss"):
        step(state, BATCH)
    (notes,) = [each for each in step.observers.every if isinstance(each, Notes)]
    assert notes.calls == [("failed", 0, "no loss")]


@pytest.mark.parametrize("transform", [af.accumulate(2), af.reproducible(num_virtual_ranks=2)])
def test_an_error_of_one_rank_before_a_step_is_raised_on_all_and_changes_nothing(transform):
    class Refuses(af.extend.Observer):
        def __init__(self, plan, strategy, state):
            self.rank = state.rank

        def before(self, state, batch):
            if state.step == 1 and self.rank == 1:
                raise ValueError("this rank refuses")

    recipe = (
        transform if "reproducible" in repr(transform) else af.compose(transform, af.wrap_ddp())
    )
    mine = [tuple(each[rank * 2 :][:2] for each in BATCH) for rank in range(2)]

    def run(state):
        plan = replace(recipe(ours.plan()), observers=(Refuses,))
        state, step = af.build(plan, state)
        state, _ = step(state, mine[state.rank])
        values = [each.detach().clone() for each in plan.model.parameters()]
        with pytest.raises(ValueError) as error:  # noqa: PT011
            step(state, mine[state.rank])
        assert all(map(torch.equal, values, plan.model.parameters()))
        return str(error.value)

    first, second = simulate(run, world_size=2)
    assert "another rank could not" in first
    assert "this rank refuses" in second


def test_the_checks_are_observers_that_a_step_can_do_without():
    _, step = af.build(ours.plan(), af.DistState(), checks=())
    assert step.observers.every == ()
    _, step = af.build(ours.plan(), af.DistState(), checks=(Notes,))
    assert [*map(type, step.observers.every)] == [Notes]
    _, step = af.build(ours.plan(), af.DistState())
    assert len(step.observers.every) == 1


def test_what_is_no_observer_is_refused():
    with pytest.raises(TypeError, match="observers must return an Observer, got 'int'"):
        af.build(ours.plan(), af.DistState(), checks=(lambda plan, strategy, state: 1,))
    with pytest.raises(TypeError, match="checks must be a sequence of functions"):
        af.build(ours.plan(), af.DistState(), checks=(1,))


def test_a_step_that_nobody_holds_is_collected_at_once():
    import weakref

    _, step, notes = built(Notes)
    found = weakref.ref(notes)
    del step, notes
    assert found() is None
