"""Metrics beside the loss are those of the global batch, for any ranks, micro-batches and
weights."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate, strategies
from tests.laws.law03_worlds import dealt_batches
from tests.support import strategies as ours
from tests.support.processes import launch


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
        "largest": (errors.detach().square().sum(), 0.5),
        "whole": torch.tensor(2),
        "true": torch.tensor(True),
    }


def expected_metrics(model, batch, num_parts=1):
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
        state, step = af.build(state, recipe(plan))
        reports = []
        for batch in parts[state.rank]:
            state, report = step(state, batch)
            assert not any(each.requires_grad or each.ndim for each in report.metrics.values())
            assert {each.dtype for each in report.metrics.values()} <= {torch.float64}
            reports.append({name: float(value) for name, value in report.metrics.items()})
        return reports

    return simulate(run, world_size=len(parts))


strategy = pytest.mark.parametrize(
    "wrap",
    [
        af.wrap_ddp(),
        af.wrap_ddp(find_unused_parameters=True),
        af.wrap_fsdp(),
    ],
    ids=["ddp", "ddp_unused", "fsdp"],
)


@strategy
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
        plan = af.Plan(loss_fn, model, ours.sgd(model.parameters()), af.num_labels("labels"))
        recipe = af.compose(af.wrap_ddp(), af.accumulate(num_microbatches))
        state, step = af.build(state, recipe(plan))
        state, report = step(state, ours.dealt(batches, sizes)[state.rank][0])
        return float(report.loss), {name: float(each) for name, each in report.metrics.items()}

    loss, metrics = loss_fn(ours.token_model(), batches[0])
    for found_loss, found in simulate(run, world_size=len(sizes[0])):
        assert found_loss == pytest.approx(loss.item(), rel=1e-12)
        wanted = {name: each.item() for name, each in metrics.items()}
        assert found == pytest.approx(wanted, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize(
    "recipe",
    [
        af.local_sgd(every=2),
        af.compose(af.wrap_ddp(), af.accumulate("auto")),
        af.compose(af.reproducible(4), af.accumulate(2)),
        af.compose(af.wrap_ddp(), af.clip(1.0), af.skip_nonfinite(), af.average(0.9)),
        pytest.param(af.compose(af.wrap_ddp(), af.compiled()), marks=pytest.mark.slow),
    ],
    ids=["local_sgd", "auto", "reproducible", "transforms", "compiled"],
)
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_every_strategy_reports_metrics(recipe, world_size):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    batch = (inputs, inputs.sum(1, keepdim=True))
    wanted = expected_metrics(ours.regression_model(), batch)
    for reports in run_measured(ours.dealt_evenly([batch, batch], world_size), recipe):
        assert {name: reports[0][name] for name in wanted} == pytest.approx(wanted, rel=1e-12)


@pytest.mark.slow
def test_a_step_in_one_graph_reports_metrics():
    inputs = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(8, 3)
    batch = (inputs, inputs.sum(1, keepdim=True))
    plain = run_measured([[batch] * 4], af.accumulate(2))
    graph = run_measured([[batch] * 4], af.compose(af.accumulate(2), af.compiled(scope="step")))
    for ours_, theirs in zip(plain[0], graph[0], strict=True):
        assert ours_ == pytest.approx(theirs, rel=1e-9)


@given(dealt=dealt_batches(strategies.batches(num_batches=1), 3))
def test_evaluate_gives_the_metrics_of_the_loss(dealt):
    """Ranks whose part has no items get them too, although they do not know the names."""
    (batch,), sizes = dealt
    world_size = min(len(sizes[0]), len(batch[0]))
    data = torch.utils.data.TensorDataset(*batch)

    def run(state):
        model = ours.regression_model()
        plan = af.Plan(measured, model, ours.adamw(model.parameters()))
        state, step = af.build(state, af.compose(af.wrap_ddp(), af.accumulate(2))(plan))
        loader = torch.utils.data.DataLoader(data, batch_size=max(world_size, 3))
        return af.evaluate(step, af.shard_loader(loader, state), state)

    model = ours.regression_model()
    wanted = {"loss": measured(model, batch)[0].item(), **expected_metrics(model, batch)}
    for found in simulate(run, world_size=world_size):
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-12)


def test_what_is_not_finite_is_reported_and_does_not_stop_the_step():
    def loss_fn(model, batch):
        loss = ours.mse(model, batch)
        return loss, {"nan": loss * math.nan, "none": (0, 0), "inf": math.inf}

    batch = (torch.ones(4, 3).double(), torch.ones(4, 1).double())
    for (report,) in run_measured(ours.dealt_evenly([batch], 2), af.wrap_ddp(), loss_fn):
        assert math.isnan(report["nan"])
        assert math.isnan(report["none"])
        assert report["inf"] == math.inf


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
        # The check of the first batch calls this in evaluation mode, which is not a step.
        calls[mine] = calls.get(mine, 0) + model.training
        name = "other" if (mine, calls[mine]) == (rank, step) else "name"
        loss = ours.mse(model, batch)
        return loss, {name: loss}

    return loss_fn


@pytest.mark.parametrize("recipe", [af.wrap_ddp(), af.wrap_fsdp(), af.reproducible(2)])
@pytest.mark.parametrize("step", [1, 2])
def test_other_names_on_another_rank_are_refused_on_all(recipe, step):
    loss_fn = other_names(1, step)

    def run(state):
        model = ours.regression_model()
        plan = af.Plan(loss_fn, model, ours.adamw(model.parameters()))
        state, train = af.build(state, recipe(plan))
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


def test_metrics_that_one_rank_begins_to_return_are_refused_on_all():
    def run(state):
        begun = []

        def loss_fn(model, batch):
            loss = ours.mse(model, batch)
            return (loss, {"late": loss}) if begun and state.rank else loss

        model = ours.regression_model()
        plan = af.Plan(loss_fn, model, ours.adamw(model.parameters()))
        state, step = af.build(state, af.wrap_ddp()(plan))
        batch = (torch.ones(2, 3).double(), torch.ones(2, 1).double())
        state, _ = step(state, batch)
        begun.append(True)
        with pytest.raises(af.errors.LossError, match="must return the same metrics in every step"):
            step(state, batch)

    simulate(run, world_size=2)


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


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", WRONG)
def test_metrics_of_the_wrong_kind_are_refused_on_all_ranks(name, world_size):
    """The error comes also on a rank without items, whose loss is not called."""
    metrics, words = WRONG[name]

    def run(state):
        model = ours.regression_model()
        plan = af.Plan(
            lambda model, batch: (ours.mse(model, batch), metrics),
            model,
            ours.adamw(model.parameters()),
        )
        state, step = af.build(state, af.wrap_ddp()(plan))
        rows = 0 if state.rank else 2
        batch = (torch.ones(rows, 3).double(), torch.ones(rows, 1).double())
        with pytest.raises(af.errors.LossError, match=words):
            step(state, batch)

    simulate(run, world_size=world_size)


def test_names_that_differ_between_micro_batches_are_refused():
    def loss_fn(model, batch):
        loss = ours.mse(model, batch)
        return loss, {"big": loss} if batch[0][0, 0] else {}

    model = ours.regression_model()
    plan = af.Plan(loss_fn, model, ours.adamw(model.parameters()))
    state, step = af.build(af.DistState(), af.accumulate(2)(plan))
    inputs = torch.tensor([[0.0] * 3, [1.0] * 3]).double()
    with pytest.raises(af.errors.LossError, match=r"\[\] at first, got \['big'\]"):
        step(state, (inputs, torch.ones(2, 1).double()))


TRAIN = """
import json, torch
import accel_fn as af
from tests.support import strategies as ours
from tests.laws.law11_metrics import measured
from tests.laws.law03_real_processes import batches, shard

state = af.init(device="cpu", timeout_s=60)
model = ours.regression_model()
plan = af.Plan(measured, model, ours.adamw(model.parameters()))
state, step = af.build(state, af.compose(af.place(), {wrap}, af.accumulate(2))(plan))
found = []
for index, batch in enumerate(batches("mse")):
    state, report = step(state, shard(batch, state, index))
    found.append([float(report.metrics["error"]), float(report.metrics["near"])])
say(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["af.wrap_ddp()", "af.wrap_fsdp()"])
def test_metrics_of_processes_are_those_of_one(wrap):
    from tests.laws.law03_real_processes import batches

    model = ours.regression_model()
    plan = af.Plan(measured, model, ours.adamw(model.parameters()))
    state, step = af.build(af.DistState(), plan)
    expected = []
    for batch in batches("mse"):
        state, report = step(state, batch)
        expected += [float(report.metrics["error"]), float(report.metrics["near"])]
    for line in launch(TRAIN.format(wrap=wrap), num_processes=2).splitlines():
        found = [number for each in json.loads(line) for number in each]
        assert found == pytest.approx(expected, rel=1e-12)
