"""evaluate: what it does to the model, what it shows, and what it refuses, on every rank alike."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import accel_fn as af
from accel_fn.testing import simulate

DATA = TensorDataset(torch.arange(10.0).unsqueeze(1))


def loss_fn(model, batch):
    return model(batch[0]).mean()


def make(state, *transforms, model=None, **options):
    model = nn.Linear(1, 1) if model is None else model
    plan = af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    state, step = af.build(state, af.compose(af.wrap_ddp(), *transforms)(plan))
    return state, step, af.shard_loader(DataLoader(DATA, batch_size=4), state)


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_in_evaluation_mode_for_the_time_being(fails):
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(), nn.Sequential(nn.Dropout()))
    model[1].eval()
    before = [module.training for module in model.modules()]
    seen = []

    def metric_fn(model, batch):
        seen.append((any(m.training for m in model.modules()), torch.is_grad_enabled()))
        if fails:
            raise OSError("gone")
        return {"one": torch.ones(len(batch[0]))}

    state, step, loader = make(af.DistState(), model=model)
    if fails:
        with pytest.raises(OSError, match="gone"):
            af.evaluate(step, loader, state, metric_fn)
    else:
        assert af.evaluate(step, loader, state, metric_fn) == {"one": 1.0}
    assert set(seen) == {(False, False)}
    assert [module.training for module in model.modules()] == before
    assert state.step == 0


def test_it_runs_under_the_autocast_of_the_step():
    state, step, loader = make(af.DistState(), af.with_amp("bf16"))
    dtypes = set()

    def metric_fn(model, batch):
        dtypes.add(model(batch[0]).dtype)
        return {"one": torch.ones(len(batch[0]))}

    af.evaluate(step, loader, state, metric_fn)
    assert dtypes == {torch.bfloat16}


def test_a_metric_is_given_micro_batches():
    state, step, loader = make(af.DistState(), af.accumulate(2))
    sizes = []

    def metric_fn(model, batch):
        sizes.append(len(batch[0]))
        return {"one": torch.ones(len(batch[0]))}

    af.evaluate(step, loader, state, metric_fn)
    assert sizes == [2, 2, 2, 2, 1, 1]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            lambda rows: rows.mean(),
            "'x' as one value a sample.*got a tensor \\[\\]; .*mean of means",
        ),
        (lambda rows: float(rows.mean()), "'x' as one value a sample.*mean of means"),
        (lambda rows: rows[:1], "'x' as one.*got a tensor .*needs a count"),
        (lambda rows: (rows.sum(), "3"), "'x' a count, got '3'"),
    ],
)
def test_what_is_no_sum_is_refused(value, text, world_size):
    def run(state):
        state, step, loader = make(state)
        with pytest.raises(ValueError, match=f"evaluate: metric_fn must give {text}"):
            af.evaluate(step, loader, state, lambda model, batch: {"x": value(batch[0])})

    simulate(run, world_size=world_size)


def test_other_things_that_a_metric_may_not_give():
    state, step, loader = make(af.DistState())
    with pytest.raises(TypeError, match="return a mapping of names to values, got 'Tensor'"):
        af.evaluate(step, loader, state, lambda model, batch: batch[0])
    names = iter("abc")
    with pytest.raises(ValueError, match="the same metrics for every batch"):
        af.evaluate(step, loader, state, lambda model, batch: {next(names): batch[0]})
    widths = iter([1, 2, 3])
    with pytest.raises(
        ValueError, match="'x' one shape for every batch, \\[1\\] before, got \\[2\\]"
    ):
        af.evaluate(
            step, loader, state, lambda model, batch: {"x": batch[0].expand(-1, next(widths))}
        )


def test_metrics_must_be_the_same_on_every_rank():
    def run(state):
        state, step, loader = make(state)
        with pytest.raises(RuntimeError, match="the same metrics on every rank"):
            af.evaluate(step, loader, state, lambda model, batch: {str(state.rank): batch[0]})

    simulate(run, world_size=2)


class Talking(IterableDataset):
    """A stream that can be split: its loader makes the ranks talk while they read."""

    def __init__(self, items=range(11)):
        self.items = items

    def __iter__(self):
        return iter([(torch.tensor([float(item)]),) for item in self.items])

    def shard(self, num_shards, index):
        return Talking(list(self.items)[index::num_shards])


@pytest.mark.parametrize("data", [DATA, Talking()], ids=["map", "talking"])
def test_a_failure_on_one_rank_is_raised_on_all(data):
    def run(state):
        state, step, _ = make(state)
        loader = af.shard_loader(DataLoader(data, batch_size=4), state)

        def metric_fn(model, batch):
            if state.rank == 1:
                raise OSError("gone")
            return {"one": torch.ones(len(batch[0]))}

        with pytest.raises((OSError, RuntimeError)) as caught:
            af.evaluate(step, loader, state, metric_fn)
        return str(caught.value)

    first, second = simulate(run, world_size=2)
    assert second == "gone"
    assert "evaluate: failed on rank 1: OSError('gone')" in first


def test_a_loader_that_every_rank_would_read_whole_is_refused():
    def run(state):
        state, step, _ = make(state)
        with pytest.raises(ValueError, match=r"be shared out over 2 ranks.*shard_loader"):
            af.evaluate(step, DataLoader(DATA, batch_size=4), state)

    simulate(run, world_size=2)
    state, step, _ = make(af.DistState())
    assert af.evaluate(step, DataLoader(DATA, batch_size=4), state).keys() == {"loss"}


def test_nothing_counted_is_no_number():
    state, step, loader = make(af.DistState())
    found = af.evaluate(step, loader, state, lambda model, batch: {"x": (0.0, 0)})
    assert math.isnan(found["x"])


def test_whole_numbers_are_summed_exactly():
    """2**60 + 1 is no float64."""

    def run(state):
        state, step, loader = make(state)
        big = 2**60 + 1
        return af.evaluate(
            step, loader, state, lambda m, b: {"x": (torch.tensor(big) if 9 in b[0] else 1, 0.0625)}
        )

    found = simulate(run, world_size=2)
    assert found == [{"x": float(2**60 + 6) / (6 * 0.0625)}] * 2


@pytest.mark.parametrize(("progress", "shown"), [(True, True), (False, False), (None, False)])
def test_a_bar_is_shown_where_it_is_wanted(progress, shown, capfd):
    state, step, loader = make(af.DistState())
    af.evaluate(step, loader, state, progress=progress)
    assert ("batch" in capfd.readouterr().err) == shown


def test_one_bar_for_all_ranks(capfd):
    def run(state):
        state, step, loader = make(state)
        af.evaluate(step, loader, state, progress=state.rank == 1)

    simulate(run, world_size=2)
    assert capfd.readouterr().err == ""
