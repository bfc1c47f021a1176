"""evaluate: its effect on the model, its output, and what it refuses, on every rank alike."""

import math
import multiprocessing
import random
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import accel_fn as af
from accel_fn.testing import simulate
from tests.support.operations import HOST_READ, OperationsNamed
from tests.support.screen import Screen
from tests.support.streams import Counting

DATA = TensorDataset(torch.arange(10.0).unsqueeze(1))


def loss_fn(model, batch):
    return model(batch[0]).mean()


def make(state, *transforms, model=None, **options):
    model = nn.Linear(1, 1) if model is None else model
    plan = af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    state, step = af.build(af.compose(af.wrap_ddp(), *transforms)(plan), state)
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
            af.evaluate(step, state, loader, metric_fn)
    else:
        assert af.evaluate(step, state, loader, metric_fn) == {"one": 1.0}
    assert set(seen) == {(False, False)}
    assert [module.training for module in model.modules()] == before
    assert state.step == 0


class Noisy(Dataset):
    """Samples whose noise is drawn in the main process."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return (torch.randn(1) + random.random() + float(np.random.rand()),)


def drawn():
    return torch.rand(()).item(), random.random(), np.random.rand()


def seed_all():
    torch.manual_seed(3), random.seed(3), np.random.seed(3)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("shard", [True, False])
def test_random_generators_go_on_as_if_nothing_had_been_evaluated(shard, fails):
    state, step, _ = make(af.DistState())
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True)
    loader = af.shard_loader(loader, state) if shard else loader

    def metric_fn(model, batch):
        drawn()
        if fails:
            raise OSError("gone")
        return {"one": torch.ones(len(batch[0]))}

    seed_all()
    expected = drawn(), drawn()
    seed_all()
    found = [drawn()]
    with pytest.raises(OSError, match="gone") if fails else nullcontext():
        af.evaluate(step, state, loader, metric_fn)
    assert (*found, drawn()) == expected


@pytest.mark.parametrize(
    ("data", "wrap"),
    [(range(10), af.prefetch), (Counting(10), lambda loader, state: loader)],
    ids=["map", "stream"],
)
def test_an_evaluation_that_fails_leaves_no_worker_behind(data, wrap):
    """The error is still held."""
    before = set(multiprocessing.active_children())
    state, step, _ = make(af.DistState())
    loader = af.shard_loader(DataLoader(data, batch_size=4, num_workers=2), state)
    with pytest.raises(ZeroDivisionError) as kept:
        af.evaluate(step, state, wrap(loader, state), lambda model, batch: {"x": 1 / 0})
    assert set(multiprocessing.active_children()) <= before
    assert kept.type is ZeroDivisionError


def test_it_runs_under_the_autocast_of_the_step():
    state, step, loader = make(af.DistState(), af.with_amp("bf16"))
    dtypes = set()

    def metric_fn(model, batch):
        dtypes.add(model(batch[0]).dtype)
        return {"one": torch.ones(len(batch[0]))}

    af.evaluate(step, state, loader, metric_fn)
    assert dtypes == {torch.bfloat16}


def test_a_metric_is_given_micro_batches():
    state, step, loader = make(af.DistState(), af.accumulate(2))
    sizes = []

    def metric_fn(model, batch):
        sizes.append(len(batch[0]))
        return {"one": torch.ones(len(batch[0]))}

    af.evaluate(step, state, loader, metric_fn)
    assert sizes == [2, 2, 2, 2, 1, 1]


def test_a_count_of_one_for_every_batch_is_warned_of():
    state, step, loader = make(af.DistState())
    found = af.evaluate(step, state, loader, lambda model, batch: {"x": (batch[0].mean(), 2)})
    with pytest.warns(UserWarning, match="gave 'x' with a count of 1 for each of 3 .*mean of mea"):
        same = af.evaluate(step, state, loader, lambda model, batch: {"x": (batch[0].mean(), 1)})
    assert same["x"] == pytest.approx(2 * found["x"])


@pytest.mark.parametrize(
    "count_of",
    [lambda rows: torch.tensor(1), lambda rows: len(rows), lambda rows: 1 if len(rows) < 4 else 2],
    ids=["counted", "rows", "once"],
)
def test_a_count_that_happens_to_be_one_is_not_warned_of(count_of):
    """A count may well be one, and a batch of one sample is its own mean."""
    state, step, loader = make(af.DistState())
    af.evaluate(step, state, loader, lambda model, batch: {"x": (1.0, count_of(batch[0]))})
    af.evaluate(step, state, [(torch.ones(1, 1),)] * 3, lambda model, batch: {"x": (1.0, 1)})


def test_what_is_no_sum_is_refused_on_all_ranks():
    text = "'x' as one value a sample.*got a tensor \\[\\]; .*mean of means"

    def run(state):
        state, step, loader = make(state)
        with pytest.raises(ValueError, match=f"evaluate: metric_fn must give {text}"):
            af.evaluate(step, state, loader, lambda model, batch: {"x": batch[0].mean()})

    simulate(run, world_size=2)


def test_other_things_that_a_metric_may_not_give():
    state, step, loader = make(af.DistState())
    names, widths = iter("abc"), iter([1, 2, 3])
    for metric_fn, error, text in (
        (lambda model, batch: batch[0], TypeError, r"names to values, got 'Tensor'; return .*m"),
        (lambda model, batch: {}, TypeError, "a mapping of names to values, got 'an empty one'"),
        (
            lambda model, batch: {next(names): batch[0]},
            ValueError,
            "the same metrics for every batch",
        ),
        (
            lambda model, batch: {"x": batch[0].expand(-1, next(widths))},
            ValueError,
            r"'x' one shape for every batch, \[1\] before, got \[2\]",
        ),
    ):
        with pytest.raises(error, match=text):
            af.evaluate(step, state, loader, metric_fn)


def test_metrics_must_be_the_same_on_every_rank():
    def run(state):
        state, step, loader = make(state)
        with pytest.raises(RuntimeError, match="the same metrics on every rank"):
            af.evaluate(step, state, loader, lambda model, batch: {str(state.rank): batch[0]})

    simulate(run, world_size=2)


class Talking(IterableDataset):
    """A stream that can be split: ranks exchange messages while its loader reads."""

    def __init__(self, items=range(11)):
        self.items = items

    def __iter__(self):
        return iter([(torch.tensor([float(item)]),) for item in self.items])

    def shard(self, num_shards, index):
        return Talking(list(self.items)[index::num_shards])


def test_whole_numbers_are_summed_exactly():
    """2**60 + 1 is no float64."""

    def run(state):
        state, step, loader = make(state)
        big = 2**60 + 1
        return af.evaluate(
            step, state, loader, lambda m, b: {"x": (torch.tensor(big) if 9 in b[0] else 1, 0.0625)}
        )

    found = simulate(run, world_size=2)
    assert found == [{"x": float(2**60 + 6) / (6 * 0.0625)}] * 2


@pytest.mark.parametrize(("progress", "shown"), [(True, True), (False, False), (None, False)])
def test_a_bar_is_shown_where_it_is_wanted(progress, shown, capfd):
    state, step, loader = make(af.DistState())
    af.evaluate(step, state, loader, progress=progress)
    assert ("batch" in capfd.readouterr().err) == shown


def ones(model, batch):
    return {"one": torch.ones(len(batch[0]))}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((0.1, torch.tensor(1)), 0.1),
        ((True, 4), 0.25),
        ((1.0, 0), math.nan),
        ((torch.tensor(1.0, dtype=torch.float16), 3.0), 1 / 3),
        ((torch.tensor([1, 2]), torch.tensor([4, 4])), torch.tensor([0.25, 0.5]).double()),
        ((torch.tensor([1, 2]), 4), torch.tensor([0.25, 0.5]).double()),
        ((torch.tensor([1, 0]), torch.tensor([4, 0])), torch.tensor([0.25, math.nan]).double()),
        (torch.tensor([True, True, False, False]), 0.5),
        (torch.full((4, 2), 0.1).double(), torch.tensor([0.1, 0.1]).double()),
        (torch.tensor([2.0**24, 1.0, 1.0, 1.0]), (2**24 + 3) / 4),
        (torch.tensor([2**53, 1, 0, 0]), (2**53 + 1) / 4),
    ],
)
def test_values_are_summed_in_the_widest_dtype(value, expected):
    state, step, _ = make(af.DistState())
    found = af.evaluate(step, state, [(torch.ones(4, 1),)] * 2, lambda m, b: {"x": value})["x"]
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, equal_nan=True)
    else:
        assert found == pytest.approx(expected, rel=1e-15, nan_ok=True)


def test_counts_that_come_as_float32_do_not_stop_growing():
    """2**24 + 1 is no float32."""
    state, step, _ = make(af.DistState())
    counts = iter([2.0**24, 1.0, 1.0])

    def metric_fn(model, batch):
        count = torch.tensor(next(counts))
        return {"x": (int(count), count)}

    assert af.evaluate(step, state, [0, 1, 2], metric_fn) == {"x": 1.0}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(1), "give 'x' as one.*got a tensor .*needs a count"),
        (1.5, "give 'x' as one value a sample.*mean of means"),
        ((1.0, "3"), "give 'x' a count, got '3'"),
        ((1.0, -1), "give 'x' finite counts >= 0, got -3"),
        ((1.0, math.inf), "give 'x' finite counts >= 0, got inf"),
        ((torch.ones(3), torch.ones(2)), r"give 'x' a count, got a tensor \[2\]; one number, or"),
        (("1", 1), "give 'x' a sum of real numbers, got '1'"),
        ((1j, 1), "give 'x' a sum of real numbers, got 1j"),
        (torch.ones(4).to(torch.complex64), "give 'x' as real numbers, got 'torch.complex64'"),
        (
            [1.0, 4],
            r"give 'x' as one value a sample, \[4, ...\], or \(sum, count\), got \[1.0, 4\]",
        ),
    ],
)
def test_what_cannot_be_summed_and_counted_is_refused(value, text):
    state, step, _ = make(af.DistState())
    with pytest.raises(ValueError, match=f"evaluate: metric_fn must {text}"):
        af.evaluate(step, state, [(torch.ones(4, 1),)] * 3, lambda model, batch: {"x": value})


def test_samples_that_cannot_be_counted_are_counted_by_the_metric():
    state, step, _ = make(af.DistState())
    graphs = [{"nodes": torch.ones(3), "edges": torch.ones(5, 2)}] * 2
    found = af.evaluate(step, state, graphs, lambda m, b: {"edges": (b["edges"].sum(), 1)})
    assert found == {"edges": 10.0}
    with pytest.raises(
        ValueError, match=r"'x' as one value a sample, \(sum, count\), got a tensor"
    ):
        af.evaluate(step, state, graphs, lambda m, b: {"x": b["nodes"]})


@pytest.mark.parametrize("metric_fn", [None, ones])
def test_a_loader_without_a_batch_is_refused(metric_fn):
    state, step, loader = make(af.DistState())
    batches = iter(loader)
    assert af.evaluate(step, state, batches, metric_fn)
    with pytest.raises(ValueError, match="loader must give a batch, got 'none'; an iterator gives"):
        af.evaluate(step, state, batches, metric_fn)


def test_a_loss_over_nothing_is_no_number():
    state, step, loader = make(af.DistState(), weight_fn=lambda batch: 0)
    assert math.isnan(af.evaluate(step, state, loader)["loss"])


@pytest.mark.parametrize("progress", [3, "yes"])
@pytest.mark.parametrize("given", [(af.evaluate,), (af.predict, ones)])
def test_a_bar_that_is_neither_wanted_nor_unwanted_is_refused(given, progress):
    (function, *fn), (state, step, loader) = given, make(af.DistState())
    text = f"^{function.__name__}: progress must be True, False or None, got {progress!r}$"
    with pytest.raises(TypeError, match=text):
        function(step, state, loader, *fn, progress=progress)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            lambda step, loader: (loader, loader),
            "step must be what build gave, got 'ShardedLoader'",
        ),
        (lambda step, loader: (step, loader, "accuracy"), "metric_fn must be a function"),
    ],
)
def test_arguments_of_another_kind_are_refused(arguments, text):
    state, step, loader = make(af.DistState())
    given_step, given_loader, *rest = arguments(step, loader)
    with pytest.raises(TypeError, match=f"evaluate: {text}"):
        af.evaluate(given_step, state, given_loader, *rest)


def test_an_argument_that_is_refused_on_one_rank_is_refused_on_all():
    def run(state):
        state, step, loader = make(state)
        mine = loader if state.is_main else DataLoader(DATA, batch_size=4)
        for given, metric_fn in ((mine, None), (loader, None if state.is_main else "accuracy")):
            with pytest.raises((ValueError, RuntimeError), match=r"shared out|be a function"):
                af.evaluate(step, state, given, metric_fn)

    simulate(run, world_size=2)


def test_an_epoch_that_is_read_ahead_is_a_loader_too():
    def run(state):
        state, step, loader = make(state)
        epoch = af.prefetch(next(loader.epochs(1)), state)
        return af.evaluate(step, state, epoch, lambda m, b: {"x": b[0].squeeze(1)})

    assert simulate(run, world_size=2) == [{"x": 4.5}] * 2


def test_a_window_is_evaluated_by_a_step_that_takes_windows():
    def run(state):
        state, step, loader = make(state, af.accumulate(2, split=None))
        return af.evaluate(
            step, state, af.group_batches(loader, 2), lambda m, b: {"x": b[0].squeeze(1)}
        )

    assert simulate(run, world_size=2) == [{"x": 4.5}] * 2


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            (torch.ones(2), {}),
            r"return \(loss, metrics\) with a 0-dim floating-point loss, got .*2",
        ),
        ((torch.tensor(1.0), {"loss": 1.0}), 'name metrics by strings other than "loss"'),
        ((torch.tensor(1.0), [1.0]), "return metrics as a mapping of names to values beside the"),
    ],
)
def test_a_loss_that_is_no_mean_and_metrics_without_names_are_refused(found, text):
    state, step, loader = make(af.DistState())
    with pytest.raises(ValueError, match=f"evaluate: metric_fn must {text}"):
        af.evaluate(step, state, loader, lambda model, batch: found)


class NormedLoss(nn.Module):
    """A loss module with a training mode of its own."""

    def __init__(self):
        super().__init__()
        self.modes = []

    def forward(self, model, batch):
        self.modes.append(self.training)
        return model(batch[0]).mean()


def test_a_loss_that_is_a_module_is_in_evaluation_mode_too():
    loss, model = NormedLoss(), nn.Linear(1, 1)
    plan = af.Plan(loss, model, torch.optim.SGD(model.parameters(), lr=0.1))
    state, step = af.build(plan, af.DistState())
    af.evaluate(step, state, [(torch.ones(2, 1),)])
    assert loss.modes == [False]
    assert loss.training


def test_an_interrupt_reads_no_more_where_an_error_reads_to_the_end():
    """After an error, ranks must read on, since others may wait for them; after an interrupt they
    do not."""

    def left(error):
        def run(state):
            state, step, _ = make(state)
            batches = iter([(torch.full((1, 1), float(state.rank)),)] * 5)

            def metric_fn(model, batch):
                raise error

            with pytest.raises(error):
                af.evaluate(step, state, batches, metric_fn, progress=True)
            assert step.plan.model.training
            return len(list(batches))

        return simulate(run, world_size=2)

    assert left(KeyboardInterrupt) == [4, 4]
    assert left(OSError) == [0, 0]


@pytest.mark.parametrize("metric_fn", [None, ones])
def test_no_batch_makes_the_host_wait(metric_fn):
    state, step, _ = make(af.DistState(), af.accumulate(2))

    def reads(num_batches):
        with OperationsNamed(HOST_READ) as mode:
            af.evaluate(step, state, [(torch.ones(4, 1),)] * num_batches, metric_fn)
        return len(mode.seen)

    assert reads(2) == reads(9) > 0


@pytest.mark.parametrize("data", [DATA, Talking(range(10))], ids=["map", "of unknown length"])
def test_a_bar_is_shown_on_a_terminal(data, monkeypatch):
    state, step, _ = make(af.DistState())
    loader = af.shard_loader(DataLoader(data, batch_size=4), state)
    monkeypatch.setattr(sys, "stderr", Screen())
    assert af.evaluate(step, state, loader, ones) == {"one": 1.0}
    assert ("0/3" if data is DATA else "0batch") in sys.stderr.getvalue()
