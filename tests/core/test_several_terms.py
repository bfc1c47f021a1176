"""A loss of several terms: reports, precisions, graphs, evaluation, and terms without items."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import accel_fn as af
from accel_fn.testing import simulate
from tests import reference
from tests.support import strategies as ours
from tests.support.several_terms import (
    FIXED,
    NUM_PLACES,
    WEIGHTS,
    Detector,
    a_batch,
    by_hand,
    sums,
    terms,
)


def trained(state, *transforms, found=FIXED, loss_fn=terms, dtype=torch.float64):
    """Train on equal parts; return the model and the reports."""
    model = Detector(dtype)
    plan = af.Plan(loss_fn, model, ours.adamw(model.parameters()), WEIGHTS)
    state, step = af.build(af.compose(*transforms)(plan), state)
    reports = []
    for inputs, *masks in found:
        state, report = step(state, af.shard_batch((inputs.to(dtype), *masks), state))
        reports.append(report)
    return model, reports


def test_a_report_has_the_mean_and_the_weight_of_each_term():
    expected = terms(Detector(), FIXED[0])
    _, (report, other) = simulate(lambda s: trained(s, af.wrap_ddp()), world_size=2)[1]
    assert report.weight == {"cls": 3, "box": 3}
    assert list(report.terms) == ["cls", "box"]
    for name, mean in expected.items():
        torch.testing.assert_close(report.terms[name], mean.detach(), **ours.EXACT)
    assert report.loss == report.terms["cls"] + report.terms["box"]
    assert other.weight == {"cls": 4, "box": 0}
    assert other.terms["box"] == 0
    assert other.loss == other.terms["cls"]


@pytest.mark.parametrize(
    ("transforms", "world_size"), [((), 4), ((af.accumulate(2),), 2)], ids=["whole", "accumulate"]
)
def test_reproducible_is_exact_and_has_the_same_bits_for_every_number_of_ranks(
    transforms, world_size
):
    found = [a_batch([0, 2, 1, 0, 0, 0, 1, 3], [3, 0, 0, 0, 0, 0, 0, 1]), FIXED[1]]
    losses, expected = ours.trained_by_hand(Detector(), found, loss_fn=by_hand)
    recipe = (af.reproducible(4), *transforms)
    alone, said = trained(af.DistState(), *recipe, found=found)
    ours.assert_close(alone.state_dict(), expected)
    assert [float(each.loss) for each in said] == pytest.approx(losses, rel=1e-12)
    for model, reports in simulate(
        lambda s: trained(s, *recipe, found=found), world_size=world_size
    ):
        ours.assert_identical(model.state_dict(), alone.state_dict())
        assert [each.terms for each in reports] == [each.terms for each in said]
        assert [each.weight for each in reports] == [each.weight for each in said]


def test_terms_in_half_precision_are_added_up_in_full():
    def halved(model, batch):
        return {name: each.bfloat16() for name, each in terms(model, batch).items()}

    recipe = (af.accumulate(3),)
    found = [a_batch([3, 2, 1], [1, 3, 3])]
    _, (report,) = trained(af.DistState(), *recipe, found=found, loss_fn=halved)
    parts = [ours.rows(found[0], row, row + 1) for row in range(3)]
    for index, (name, mean) in enumerate(report.terms.items(), 1):
        counts = [part[index].sum() for part in parts]
        by_part = [halved(Detector(), part)[name].detach().double() for part in parts]
        expected = sum(n * each for n, each in zip(counts, by_part, strict=True)) / sum(counts)
        torch.testing.assert_close(mean, expected, **ours.EXACT)


def test_a_constant_stands_for_a_term_without_items():
    def constants(model, batch):
        return {
            name: each if batch[index].any() else torch.zeros((), dtype=torch.float64)
            for index, (name, each) in enumerate(terms(model, batch).items(), 1)
        }

    _, expected = ours.trained_by_hand(Detector(), FIXED, loss_fn=by_hand)
    for model, _ in simulate(lambda s: trained(s, af.wrap_ddp(), loss_fn=constants), world_size=3):
        ours.assert_close(model.state_dict(), expected)


class Broken(torch.autograd.Function):
    """A loss whose backward is nan, whatever it is given, as that of fused kernels for no items."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs.sum() * float("nan")

    @staticmethod
    def backward(ctx, gradient):
        return torch.full((1,), float("nan"), dtype=torch.float64).expand(2, NUM_PLACES)


def test_the_gradients_of_a_term_without_items_are_zeros_also_where_a_function_gives_nan():
    def loss_fn(model, batch):
        return {**terms(model, batch), "box": Broken.apply(model(batch[0])[1])}

    found = [a_batch([1, 2], [0, 0])]
    _, expected = ours.trained_by_hand(Detector(), found, loss_fn=by_hand)
    model, _ = trained(af.DistState(), found=found, loss_fn=loss_fn)
    ours.assert_close(model.state_dict(), expected)


class Tables(nn.Module):
    """A table for each term, with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(5, 1, sparse=True) for _ in WEIGHTS])
        with torch.no_grad():
            for index, table in enumerate(self.tables, 1):
                table.weight.copy_(torch.arange(5.0)[:, None] / index)
        self.double()

    def forward(self, inputs):
        numbers = (inputs[..., 0] * 2).long().clamp(-2, 2) + 2
        return [table(numbers).squeeze(-1) for table in self.tables]


def test_terms_may_have_tables_with_sparse_gradients():
    expected = Tables()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    reference.train(expected, by_hand, optimizer, FIXED)

    def run(state):
        model = Tables()
        plan = af.Plan(terms, model, torch.optim.SGD(model.parameters(), lr=0.1), WEIGHTS)
        state, step = af.build(af.compose(af.wrap_ddp(), af.accumulate(2))(plan), state)
        for batch in FIXED:
            state, _ = step(state, af.shard_batch(batch, state))
        return model.state_dict()

    for found in simulate(run, world_size=2):
        ours.assert_close(found, expected.state_dict())


def with_metrics(model, batch):
    return terms(model, batch), {"error": (sums(model, batch)[1] / 2, batch[2].sum())}


def built(state, loss_fn):
    model = Detector()
    plan = af.Plan(loss_fn, model, ours.adamw(model.parameters()), WEIGHTS)
    return af.build(af.compose(af.wrap_ddp(), af.accumulate(2))(plan), state)


def evaluated(state, batch, loss_fn=with_metrics, metric_fn=None):
    state, step = built(state, loss_fn)
    data = list(zip(*batch, strict=True))
    loader = af.shard_loader(DataLoader(data, batch_size=3), state)
    return af.evaluate(step, state, loader, metric_fn)


@pytest.mark.parametrize("metric_fn", [None, with_metrics], ids=["loss_fn", "metric_fn"])
def test_evaluate_gives_each_term_over_its_own_items_and_their_sum(metric_fn):
    batch = a_batch([0, 2, 1, 0, 0], [3, 0, 0, 0, 0])
    model = Detector().requires_grad_(False)
    expected = {name: float(each) for name, each in terms(model, batch).items()}
    expected |= {"loss": sum(expected.values()), "error": expected["box"] / 2}
    loss_fn = terms if metric_fn else with_metrics
    for found in simulate(lambda state: evaluated(state, batch, loss_fn, metric_fn), world_size=3):
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "metric_fn", [None, lambda model, batch: (terms(model, batch), None)], ids=["loss_fn", "fn"]
)
def test_evaluate_gives_nan_for_a_term_without_items_and_leaves_it_out_of_the_sum(metric_fn):
    found = evaluated(af.DistState(), FIXED[1], terms, metric_fn)
    assert found["loss"] == found["cls"]
    assert math.isnan(found["box"])
    nothing = evaluated(af.DistState(), a_batch([0, 0], [0, 0]), terms, metric_fn)
    assert sorted(nothing) == ["box", "cls", "loss"]
    assert all(map(math.isnan, nothing.values()))
