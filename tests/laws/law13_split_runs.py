"""Law 13: overflows, rates, metrics and predictions of a model that `wrap_tp` splits are those of one
process."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import accel_fn as af
from accel_fn.testing import simulate
from tests.laws.law07_scaling import scaled
from tests.laws.law10_schedule import warm_up
from tests.laws.law13_tensor_parallel import BOTH, HEAD, SQUARE
from tests.support import language_model as lm
from tests.support import strategies as ours

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of outputs that are views

SPLIT = af.wrap_tp(lm.STYLES | HEAD)
MESHES = st.sampled_from([SQUARE, {"dp": 1, "tp": 2}, {"tp": 2, "dp": 2}, {"dp": 3, "tp": 2}])
BATCHES = lm.batches(4, 5, 6, 3)


def model_of(seed=0):
    return lm.language_model(seed, depth=1, is_tied=False)


def train_by_hand(skipped):
    """Return the rates of the applied updates, and the parameters, of one process."""
    model = model_of()
    optimizer = ours.adamw(model.parameters())
    scheduler = LambdaLR(optimizer, warm_up)
    rates = []
    for index, batch in enumerate(BATCHES):
        if index not in skipped:
            lm.token_loss(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return rates, model.state_dict()


def train(state, recipe, skipped, culprit):
    """Return the same of a rank, and its loss scale; in these batches, the culprit's gradients overflow."""
    model = model_of()
    optimizer = ours.adamw(model.parameters())
    index = 0

    def loss_fn(model, batch):
        loss = lm.token_loss(model, batch)
        if index in skipped and state.rank == culprit:
            own = model.head.weight.to_local()  # other ranks hold other rows
            loss = loss + 1e308 * (own - own.detach()).sum()
        return loss

    plan = af.Plan(loss_fn, model, optimizer, af.count_labels("labels"))
    recipe = af.compose(recipe, SPLIT, af.clip(0.5), af.schedule(warm_up), scaled(1024.0))
    now, step = af.build(recipe(plan), state, check_loss=False)
    rates = []
    for index, batch in enumerate(BATCHES):
        rate = optimizer.param_groups[0]["lr"]
        now, report = step(now, af.shard_batch(batch, now))
        assert bool(report.applied) == (index not in skipped)
        rates += [rate] if report.applied else []
    return rates, ours.whole(model.state_dict()), float(now.scaler.scale)


def check_overflows(wrap, mesh, skipped, culprit, num_microbatches):
    rates, expected = train_by_hand(skipped)
    recipe = af.compose(wrap, af.accumulate(num_microbatches))
    for found in simulate(lambda state: train(state, recipe, skipped, culprit), mesh=mesh):
        assert (found[0], found[2]) == (rates, 1024 * 0.5 ** len(skipped))
        ours.assert_close(found[1], expected)


@pytest.mark.slow
@BOTH
@ours.share(0.3)
@given(
    mesh=MESHES,
    skipped=st.sets(st.integers(0, 3), max_size=3),
    culprit=st.integers(0, 1),
    num_microbatches=st.integers(1, 3),
)
def test_an_overflow_on_any_rank_of_any_mesh_skips_the_update_on_all(
    wrap, mesh, skipped, culprit, num_microbatches
):
    check_overflows(wrap, mesh, skipped, culprit, num_microbatches)


def measured(model, batch):
    """Return the loss, a mean and a share."""
    logits, labels = model(batch["tokens"]), batch["labels"]
    right = logits.argmax(-1)[labels != -100] == labels[labels != -100]
    return lm.token_loss(model, batch), {
        "accuracy": right.double().mean(),
        "first": (logits[:, 0].sum(), len(logits)),
    }


def figures(state, recipe, num_rows, batch_size):
    """Train an epoch, evaluate, predict and gather; return all that this shows."""
    (data,) = lm.batches(num_rows)
    rows = [{name: each[i] for name, each in data.items()} for i in range(num_rows)]
    model = model_of()
    plan = af.Plan(measured, model, ours.adamw(model.parameters()), af.count_labels("labels"))
    state, step = af.build(recipe(plan), state, check_loss=False)
    numbers = []
    for start in range(0, num_rows, batch_size):
        batch = af.shard_batch(ours.rows(data, start, start + batch_size), state)
        state, report = step(state, batch)
        numbers += [report.loss, *report.metrics.values(), step.forward(state, batch)]
    loader = af.shard_loader(DataLoader(rows, batch_size=batch_size), state)
    predicted = af.predict(step, state, loader, lambda model, batch: model(batch["tokens"]))
    last = af.gather(batch["labels"], state, axis="dp" if state.axes else None)
    numbers += af.evaluate(step, state, loader).values()
    return {
        "numbers": torch.tensor([float(each) for each in numbers], dtype=torch.float64),
        "predicted": predicted,
        "last": last,
    }


def check_figures(recipe, mesh, num_rows, batch_size):
    expected = figures(af.DistState(), af.compose(), num_rows, batch_size)
    for found in simulate(lambda state: figures(state, recipe, num_rows, batch_size), mesh=mesh):
        ours.assert_close(found, expected)


@pytest.mark.slow
@BOTH
@ours.share(0.3)
@given(
    mesh=MESHES,
    num_rows=st.integers(3, 9),
    batch_size=st.integers(3, 5),
    num_microbatches=st.integers(1, 3),
)
def test_metrics_evaluations_and_predictions_on_any_mesh(
    wrap, mesh, num_rows, batch_size, num_microbatches
):
    recipe = af.compose(wrap, SPLIT, af.accumulate(num_microbatches))
    check_figures(recipe, mesh, num_rows, batch_size)
