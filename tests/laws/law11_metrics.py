"""Metrics beside the loss are those of the global batch, for any ranks, micro-batches and
weights."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate, strategies
from tests.laws.law03_worlds import dealt_batches
from tests.support import strategies as ours


def measured(model, batch):
    """Return the loss, and metrics of every kind: means, a pair, Python numbers, integers and
    bools."""
    inputs, targets = batch
    outputs = model(inputs)
    errors = (outputs - targets).squeeze(1)
    return errors.square().mean(), {
        "error": errors.abs().mean(),
        "near": ((errors.abs() < 1).sum(), len(errors)),
        "three": 3,
        "squares": (errors.detach().square().sum(), 0.5 * len(errors)),
        "whole": torch.tensor(2),
        "true": torch.tensor(True),
    }


def expected_metrics(model, batch):
    """Return the metrics of one process and one batch."""
    _, found = measured(model, batch)
    count, size = found["near"]
    return {
        "error": found["error"].item(),
        "near": count.item() / size,
        "three": 3.0,
        "whole": 2.0,
        "true": 1.0,
    }


def run_measured(parts, recipe, loss_fn=measured, **options):
    """Return the metrics of each rank and step, and evaluate's at the end; `parts[rank]` has that
    rank's batches."""

    def run(state):
        model = ours.regression_model()
        plan = af.Plan(loss_fn, model, ours.adamw(model.parameters()), **options)
        state, step = af.build(recipe(plan), state)
        reports = []
        for batch in parts[state.rank]:
            state, report = step(state, batch)
            assert not any(each.requires_grad or each.ndim for each in report.metrics.values())
            assert {each.dtype for each in report.metrics.values()} <= {torch.float64}
            reports.append({name: float(value) for name, value in report.metrics.items()})
        return reports

    return simulate(run, world_size=len(parts))


@pytest.mark.parametrize(
    "wrap",
    [af.wrap_ddp(find_unused_parameters=True), af.wrap_fsdp()],
    ids=["ddp", "fsdp"],
)
@ours.share(0.34)
@given(dealt=dealt_batches(strategies.batches(), 4), num_microbatches=st.integers(1, 3))
def test_metrics_are_those_of_one_process(wrap, dealt, num_microbatches):
    batches, sizes = dealt
    model = ours.regression_model()
    optimizer = ours.adamw(model.parameters())
    expected = []
    for batch in batches:
        expected.append(expected_metrics(model, batch))
        measured(model, batch)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    recipe = af.compose(wrap, af.accumulate(num_microbatches))
    for reports in run_measured(ours.dealt(batches, sizes), recipe):
        for report, wanted in zip(reports, expected, strict=True):
            assert {name: report[name] for name in wanted} == pytest.approx(wanted, rel=1e-12)


@given(dealt=dealt_batches(strategies.labelled_batches(), 4), num_microbatches=st.integers(1, 3))
def test_means_are_weighted_as_the_loss_is(dealt, num_microbatches):
    batches, sizes = dealt

    def loss_fn(model, batch):
        logits = model(batch["inputs"]).flatten(0, 1)
        labels = batch["labels"].flatten()
        loss = F.cross_entropy(logits, labels)
        right = logits.argmax(1)[labels != -100] == labels[labels != -100]
        return loss, {"perplexity": loss * 2, "accuracy": right.double().mean()}

    def run(state):
        model = ours.token_model()
        plan = af.Plan(loss_fn, model, ours.sgd(model.parameters()), af.count_labels("labels"))
        recipe = af.compose(af.wrap_ddp(), af.accumulate(num_microbatches))
        state, step = af.build(recipe(plan), state)
        state, report = step(state, ours.dealt(batches, sizes)[state.rank][0])
        return float(report.loss), {name: float(each) for name, each in report.metrics.items()}

    loss, metrics = loss_fn(ours.token_model(), batches[0])
    for found_loss, found in simulate(run, world_size=len(sizes[0])):
        assert found_loss == pytest.approx(loss.item(), rel=1e-12)
        wanted = {name: each.item() for name, each in metrics.items()}
        assert found == pytest.approx(wanted, rel=1e-12, nan_ok=True)


@given(dealt=dealt_batches(strategies.batches(num_batches=1), 3))
def test_evaluate_gives_the_metrics_of_the_loss(dealt):
    """Ranks whose part has no items get them too, although they do not know the names."""
    (batch,), sizes = dealt
    world_size = len(sizes[0])
    data = torch.utils.data.TensorDataset(*batch)

    def run(state):
        model = ours.regression_model()
        plan = af.Plan(measured, model, ours.adamw(model.parameters()))
        state, step = af.build(af.compose(af.wrap_ddp(), af.accumulate(2))(plan), state)
        loader = torch.utils.data.DataLoader(data, batch_size=3)
        return af.evaluate(step, state, af.shard_loader(loader, state))

    model = ours.regression_model()
    wanted = {"loss": measured(model, batch)[0].item(), **expected_metrics(model, batch)}
    for found in simulate(run, world_size=world_size):
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-12)
