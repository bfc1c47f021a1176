"""Law 13: a user's strategies of torch's tensor parallelism, with replicas or FSDP, are one process."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from accel_fn.testing import simulate, strategies
from tests.support import strategies as ours
from tests.support.runs_on_meshes import assert_one_process, train, train_by_hand

SQUARE = {"dp": 2, "tp": 2}

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of outputs that are views


def split(state, model):
    """Split a model over `tp`, from rank 0's values, by the styles that it names."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.copy_(af.broadcast(tensor.detach(), state))
    mesh = af.device_mesh(state)["tp"]
    return parallelize_module(model, mesh, model.styles(), src_data_rank=None)


def split_and_shard(state, model):
    """Split a model over `tp`, then its blocks and the rest over `dp`."""
    split(state, model)
    options = {"mesh": af.device_mesh(state)["dp"], "reshard_after_forward": True}
    for name in model.blocks:
        fully_shard(model.get_submodule(name), **options)
    return fully_shard(model, **options)


class Replicas(af.extend.Strategy):
    """Averages gradients along `dp` by hand, after the last backward."""

    finds_unused = False

    def average(self, state):
        for parameter in self.trainable():
            own = parameter.grad
            if isinstance(own, DTensor):
                # That of a table of embeddings is still to be summed, that of an idle rank is not.
                parameter.grad = own.redistribute(placements=parameter.placements)
                own = parameter.grad.to_local()
            own.copy_(af.reduce_mean(own, state, axis="dp"))


class Shards(af.extend.Strategy):
    """FSDP's hooks average gradients along `dp`; every rank runs as many forwards."""

    finds_unused = False
    pads = True

    def trainable(self):
        found = []
        for unit in self.model.modules():
            if isinstance(unit, FSDPModule):
                unit.unshard()
                found += unit.parameters()
                unit.reshard()
        return [*found, *self.model.parameters()]

    def pad(self, state, mean, parts, weights):
        if mean is not None:
            mean.total()  # a rank that could not count its batch raises here, as do all others
        if not any(weights):
            parts, weights = [], []  # a loss of nothing may be 0 / 0
        most = af.reduce_max(len(parts), state)
        source = af.reduce_min(state.rank if len(parts) == most else state.world_size, state)
        spare = af.broadcast(parts[-1] if parts else None, state, source=source)
        lacking = most - len(parts)
        return [*[spare] * lacking, *parts], [*[()] * lacking, *weights]

    @contextmanager
    def no_sync(self):
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def backward(self, loss, seed):
        loss.backward(seed)


def replicas_of_parts(plan):
    """Tensor parallelism along `tp`, replicas along `dp`."""
    return replace(plan, shard_model=(split,), strategy=(Replicas,))


def shards_of_parts(plan):
    """Tensor parallelism along `tp`, FSDP along `dp`."""
    return replace(plan, shard_model=(split_and_shard,), strategy=(Shards,))


BOTH = pytest.mark.parametrize(
    "recipe", [replicas_of_parts, pytest.param(shards_of_parts, marks=pytest.mark.slow)]
)


class Perceptron(nn.Sequential):
    """A layer that is split by rows, one by columns, and one that every rank along `tp` holds whole."""

    blocks = ("0",)

    def __init__(self):
        super().__init__(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4), nn.LayerNorm(4))
        self.double()

    def styles(self):
        return {"0": ColwiseParallel(), "2": RowwiseParallel()}


def perceptron():
    torch.manual_seed(0)
    return Perceptron()


def summed_loss(model, batch):
    logits = model(batch["inputs"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def by_group(parameters):
    """AdamW of two groups, which is what two optimizers compute."""
    first, *others = parameters
    groups = [{"params": [first], "lr": 0.02}, {"params": others}]
    return torch.optim.AdamW(groups, lr=0.05)


def two_optimizers(parameters):
    first, *others = parameters
    return {"first": torch.optim.AdamW([first], lr=0.02), "others": ours.adamw(others)}


def by_hand(model, found, *, loss_fn=ours.token_loss, **given):
    return train_by_hand(model, found, loss_fn=loss_fn, max_norm=0.1, **given)


def on_rank(state, model, parts, recipe, *, loss_fn=ours.token_loss, **given):
    return train(state, model, parts, recipe, loss_fn=loss_fn, **given)


@st.composite
def dealt(draw):
    """Draw global batches of masked tokens, and any split over two ranks, also empty parts."""
    batches = draw(strategies.labelled_batches(num_batches=2))
    sizes = [draw(strategies.uneven_parts(len(each["labels"]), 2)) for each in batches]
    return batches, sizes


def batches(*sizes):
    """Make batches of masked tokens."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for size in sizes:
        labels = torch.randint(0, 4, (size, 3), generator=generator)
        labels[torch.rand(size, 3, generator=generator) < 0.4] = -100
        labels[0, 0] = 1
        inputs = torch.randn(size, 3, 3, generator=generator).double()
        found.append({"inputs": inputs, "labels": labels})
    return found


UNEVEN = (batches(5, 6, 3), [[2, 3], [0, 6], [3, 0]])


@pytest.mark.slow
@BOTH
@ours.share(0.4)
@given(dealt=dealt(), num_microbatches=st.integers(1, 3))
def test_any_split_over_a_mesh_is_one_process(recipe, dealt, num_microbatches):
    found, sizes = dealt
    recipe = af.compose(recipe, af.accumulate(num_microbatches), af.clip(0.1))
    model, parts = perceptron(), ours.dealt(found, sizes)
    ranks = simulate(lambda state: on_rank(state, model, parts, recipe), mesh=SQUARE)
    assert_one_process(ranks, by_hand(model, found))


@BOTH
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"loss_fn": summed_loss, "reduction": "sum"}, {"loss_fn": summed_loss}),
        pytest.param(
            {"optimizer": two_optimizers}, {"optimizer": by_group}, marks=pytest.mark.slow
        ),
    ],
    ids=["a sum", "two optimizers"],
)
def test_sums_and_two_optimizers_on_a_mesh_are_those_of_one_process(recipe, given, expected):
    found, sizes = UNEVEN
    recipe = af.compose(recipe, af.accumulate(2), af.clip(0.1))
    model, parts = perceptron(), ours.dealt(found, sizes)
    ranks = simulate(lambda state: on_rank(state, model, parts, recipe, **given), mesh=SQUARE)
    assert_one_process(ranks, by_hand(model, found, **expected))


@BOTH
def test_a_stop_and_a_failure_on_one_rank_before_the_first_forward_are_known_on_all(recipe):
    (batch,) = batches(4)

    def run(state):
        def weight_fn(batch):
            if state.rank == 1 and state_now.step == 1:
                raise ZeroDivisionError
            return af.count_labels("labels")(batch)

        plan = recipe(ours.plan(model=perceptron(), loss_fn=ours.token_loss, weight_fn=weight_fn))
        plan = replace(plan, should_stop=(lambda: state.rank == 3,))
        state_now, step = af.build(plan, state, check_loss=False)
        state_now, report = step(state_now, af.shard_batch(batch, state))
        with pytest.raises((ZeroDivisionError, ValueError)) as caught:
            step(state_now, af.shard_batch(batch, state))
        return report.extras["stop"], caught.type is ZeroDivisionError, str(caught.value)

    found = simulate(run, mesh=SQUARE)
    assert [stop for stop, *_ in found] == [True] * 4
    assert [is_own for _, is_own, _ in found] == [False, True, False, False]
    assert ["another rank could not" in text for *_, text in found] == [True, False, True, True]


@BOTH
def test_evaluate_predict_and_forward_on_a_mesh_are_those_of_one_process(recipe):
    (whole,) = batches(5)
    rows = TensorDataset(whole["inputs"], whole["labels"])

    def loss_fn(model, batch):
        return ours.token_loss(model, {"inputs": batch[0], "labels": batch[1]})

    def run(state):
        weight_fn = lambda batch: int((batch[1] != -100).sum())
        plan = ours.plan(model=perceptron(), loss_fn=loss_fn, weight_fn=weight_fn)
        state, step = af.build(recipe(plan) if state.world_size > 1 else plan, state)
        loader = af.shard_loader(DataLoader(rows, batch_size=3), state)
        loss = af.evaluate(step, state, loader)["loss"]
        found = af.predict(step, state, loader, lambda model, batch: model(batch[0]))
        last = af.shard_batch(
            tuple(each[:1] for each in rows.tensors), state
        )  # one row for two ranks
        return {"loss": torch.as_tensor(loss), "rows": found, "last": step.forward(state, last)}

    expected = run(af.DistState())
    for found in simulate(run, mesh=SQUARE):
        ours.assert_close(found, expected)


def test_an_evaluation_whose_batch_fails_on_one_rank_ends_on_all():
    """Its peers along `tp` would wait for it in the next forward."""

    def run(state):
        plan = ours.plan(model=perceptron(), loss_fn=ours.token_loss)
        state, step = af.build(replicas_of_parts(plan), state, check_loss=False)

        def loader():
            yield from batches(2)
            if state.rank == 1:
                raise FileNotFoundError
            yield from batches(3)

        with pytest.raises((FileNotFoundError, RuntimeError)) as caught:
            af.evaluate(step, state, loader())
        return caught.type is FileNotFoundError, str(caught.value)

    found = simulate(run, mesh=SQUARE)
    others = (False, "evaluate: failed on rank 1: FileNotFoundError()")
    assert found == [others, (True, ""), others, others]
