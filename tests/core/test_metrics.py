"""Metrics beside the loss: names, kinds, and what every rank refuses."""

import math

import pytest
import torch

import accel_fn as af
from accel_fn.testing import internals, simulate
from tests.laws.law11_metrics import run_measured
from tests.support import strategies as ours


def test_batches_without_items_have_no_names_and_then_nan():
    batch = (torch.ones(4, 3).double(), torch.ones(4, 1).double())
    empty = ours.rows(batch, 0, 0)
    parts = [[empty, batch, empty], [empty, empty, empty]]
    for first, second, third in run_measured(parts, af.wrap_ddp()):
        assert first == {}
        assert second["three"] == 3.0
        assert third.keys() == second.keys()
        assert all(map(math.isnan, third.values()))


def other_names(rank, step):
    """Make a loss of one rank that gives a metric another name at one step."""
    calls = {}

    def loss_fn(model, batch):
        mine = int(batch[0][0, 0])
        calls[mine] = calls.get(mine, 0) + 1
        name = "other" if (mine, calls[mine]) == (rank, step) else "name"
        loss = ours.mse(model, batch)
        return loss, {name: loss}

    return loss_fn


@pytest.mark.parametrize(
    ("recipe", "step"), [(af.wrap_ddp(), 2), (af.wrap_fsdp(), 1), (af.reproducible(2), 2)]
)
def test_other_names_on_another_rank_are_refused_on_all(recipe, step):
    loss_fn = other_names(1, step)

    def run(state):
        model = ours.regression_model()
        plan = af.Plan(loss_fn, model, ours.adamw(model.parameters()))
        state, train = af.build(recipe(plan), state, check_loss=False)
        batch = (torch.full((2, 3), float(state.rank)).double(), torch.ones(2, 1).double())
        for _ in range(step - 1):
            state, _ = train(state, batch)
        before = ours.whole(model.state_dict())
        before = {name: each.clone() for name, each in before.items()}
        with pytest.raises(af.errors.LossError, match="must return the same metrics in every step"):
            train(state, batch)
        ours.assert_identical(ours.whole(model.state_dict()), before)
        state, report = train(state, batch)
        return list(report.metrics)

    assert simulate(run, world_size=2) == [["name"]] * 2


WRONG = {
    "shape": ({"a": torch.ones(2)}, r"metric 'a' as a real 0-dim tensor.* got a tensor \[2\]"),
    "complex": ({"a": torch.tensor(1j)}, "complex64"),
    "string": ({"a": "b"}, "got str"),
    "none": ({"a": None}, "got NoneType"),
    "triple": ({"a": (1, 2, 3)}, r"got \(int, int, int\)"),
    "pair": ({"a": (torch.ones(2), 2)}, r"got \(a tensor \[2\] of torch.float32, int\)"),
    "loss": ({"loss": 1.0}, "name metrics by strings other than \"loss\", got 'loss'"),
    "key": ({1: 1.0}, "name metrics by strings"),
    "outputs": (torch.ones(2), "return metrics as a mapping of names .* got Tensor"),
}


@pytest.mark.parametrize("name", WRONG)
def test_metrics_of_the_wrong_kind_are_refused_on_all_ranks(name):
    """The error comes also on a rank without items, whose loss is not called."""
    metrics, words = WRONG[name]

    def run(state):
        model = ours.regression_model()
        plan = af.Plan(
            lambda model, batch: (ours.mse(model, batch), metrics),
            model,
            ours.adamw(model.parameters()),
        )
        state, step = af.build(af.wrap_ddp()(plan), state)
        rows = 0 if state.rank else 2
        batch = (torch.ones(rows, 3).double(), torch.ones(rows, 1).double())
        with pytest.raises(af.errors.LossError, match=words):
            step(state, batch)

    simulate(run, world_size=2)


def test_names_that_differ_between_micro_batches_are_refused():
    def loss_fn(model, batch):
        loss = ours.mse(model, batch)
        return loss, {"big": loss} if batch[0][0, 0] else {}

    model = ours.regression_model()
    plan = af.Plan(loss_fn, model, ours.adamw(model.parameters()))
    state, step = af.build(af.accumulate(2)(plan), af.DistState())
    inputs = torch.tensor([[0.0] * 3, [1.0] * 3]).double()
    with pytest.raises(af.errors.LossError, match=r"\[\] at first, got \['big'\]"):
        step(state, (inputs, torch.ones(2, 1).double()))


@pytest.mark.parametrize("wrap", [af.wrap_ddp(), af.wrap_fsdp()], ids=["ddp", "fsdp"])
def test_metrics_need_no_collective_of_their_own(wrap):
    def with_metrics(model, batch):
        loss = ours.mse(model, batch)
        return loss, {"mean": loss.detach() * 2, "pair": (len(batch[0]), 2)}

    def run(state):
        calls = []
        for loss_fn in (ours.mse, with_metrics):
            model = ours.regression_model()
            plan = af.Plan(loss_fn, model, ours.adamw(model.parameters()))
            now, step = af.build(af.compose(wrap, af.accumulate(2))(plan), state, check_loss=False)
            batch = (torch.ones(4, 3).double(), torch.ones(4, 1).double())
            before = internals.num_calls()
            for _ in range(3):
                now, _ = step(now, batch)
            calls.append(internals.num_calls() - before)
        return calls

    for plain, measured in simulate(run, world_size=2):
        assert 0 < plain == measured
