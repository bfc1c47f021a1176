"""Rows and items that a state counts, and rates that are a function of it."""

import pytest

import accel_fn as af
from accel_fn.errors import AccelError
from accel_fn.testing import simulate
from tests.support import strategies as ours
from tests.support.longer_runs import batches_of

BATCHES = batches_of()


def built(recipe, *, state=None, **options):
    model = ours.regression_model()
    loss_fn = options.pop("loss_fn", ours.mse)
    plan = af.Plan(loss_fn, model, ours.sgd(model.parameters()), **options)
    return af.build(recipe(plan), af.DistState() if state is None else state)


def counts(state):
    return state.step, state.samples, state.items


def test_items_are_the_weights_of_all_terms_and_gradients_apart_count_too():
    def loss_fn(model, batch):
        return {name: ours.mse(model, batch) for name in ("a", "b")}

    weights = {"a": lambda batch: 2 * len(batch[0]), "b": lambda batch: 0.5}
    state, step = built(af.compose(), loss_fn=loss_fn, weight_fn=weights)
    state, grads, report = step.grads(state, BATCHES[0])
    assert counts(state) == (0, 0, 0)
    state, _ = step.update(state, grads, report)
    assert counts(state) == (1, 6, 12.5)


@pytest.mark.parametrize("wrap", [af.wrap_ddp(), af.wrap_fsdp(), af.reproducible(2)])
def test_all_ranks_count_the_rows_of_all(wrap):
    def run(state):
        state, step = built(wrap, state=state, weight_fn=lambda batch: 3.0 * len(batch[0]))
        rows = 6 // state.world_size
        state, _ = step(state, ours.rows(BATCHES[0], rows * state.rank, rows * (state.rank + 1)))
        return counts(state)

    assert simulate(run, world_size=2) == [(1, 6, 18)] * 2


def test_a_step_of_another_plan_moves_the_rate_of_the_next():
    state, first = built(af.schedule(lambda state: 1 / (1 + state.samples)))
    state, second = built(af.compose(), state=state)
    group = first.plan.optimizer.param_groups[0]
    rate = group["lr"]
    state, _ = first(state, BATCHES[0])
    assert group["lr"] == pytest.approx(rate / 7)
    state, _ = second(state, BATCHES[0])
    before, found = [each.clone() for each in first.plan.model.parameters()], []
    first.plan.model.register_forward_hook(lambda *_: found.append(group["lr"]))
    first(state, BATCHES[0])
    assert found[0] == pytest.approx(rate / 13)
    assert not before[0].equal(next(first.plan.model.parameters()))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: af.schedule(lambda state: 1.0, every=2),
            "every must be left out beside a function of the state, got 2; state.step counts batches",
        ),
        (
            lambda: af.schedule(lambda num_updates, state: 1.0),
            "be a function of state alone where it has a parameter of that name",
        ),
        (
            lambda: built(af.schedule(lambda state: float("nan"))),
            "scheduler_or_fn must give a finite number, after 0 batches, got nan",
        ),
        (
            lambda: af.DistState(items=-1.0),
            "DistState: items must be a finite number >= 0, got -1.0",
        ),
        (lambda: af.DistState(items=float("nan")), "items must be a finite number >= 0, got nan"),
        (lambda: af.DistState(samples=-1), "DistState: samples must be an integer >= 0, got -1"),
    ],
)
def test_mistakes_are_refused(make, text):
    with pytest.raises(AccelError, match=text):
        make()


def test_extras_are_put_back_before_a_function_is_called(tmp_path):
    def run(seen):
        state, step = built(af.schedule(lambda num_updates: 1 / seen["total"]))
        return state, step, {"seen": seen}

    state, step, extras = run({"total": 8})
    state, _ = step(state, BATCHES[0])
    af.save(step, state, tmp_path, extras=extras)
    rate = step.plan.optimizer.param_groups[0]["lr"]
    seen = {"total": 2}
    state, other, extras = run(seen)
    af.load(other, state, tmp_path, extras=extras)
    assert seen == {"total": 8}
    assert other.plan.optimizer.param_groups[0]["lr"] == rate


def test_ranks_with_the_same_rows_count_once():
    def run(state):
        state, step = built(af.wrap_ddp(), state=state)
        state, _ = step(state, af.shard_batch(BATCHES[0], state))
        return counts(state)

    assert simulate(run, mesh={"dp": 2, "tp": 2}) == [(1, 6, 6)] * 4
