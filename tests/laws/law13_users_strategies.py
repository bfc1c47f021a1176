"""Law 13: a user's strategies of torch's tensor parallelism, with replicas or FSDP, are one process."""

import copy
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import accel_fn as af
from accel_fn.testing import simulate, strategies
from tests.support import strategies as ours

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


class Replicas(af.Strategy):
    """Averages gradients along `dp` by hand, after the last backward."""

    finds_unused = False

    def average(self, state):
        for parameter in self.trainable():
            grad = parameter.grad
            own = grad.to_local() if isinstance(grad, DTensor) else grad
            own.copy_(af.reduce_mean(own, state, axis="dp"))


class Shards(af.Strategy):
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
        return [*[spare] * lacking, *parts], [*[0] * lacking, *weights]

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


BOTH = pytest.mark.parametrize("recipe", [replicas_of_parts, shards_of_parts])


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


def train_by_hand(model, batches, *, loss_fn=ours.token_loss, optimizer=ours.adamw):
    """Return losses, norms before clipping, weights and parameters of one process."""
    model = copy.deepcopy(model)
    made, found = optimizer(model.parameters()), []
    for batch in batches:
        loss = loss_fn(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        made.step()
        made.zero_grad()
        found.append((loss.item(), norm.item(), int((batch["labels"] != -100).sum())))
    return found, model.state_dict()


def train(state, model, parts, recipe, *, loss_fn=ours.token_loss, optimizer=ours.adamw, **given):
    """Return the same of a rank, which trains on `parts[its place along dp]`."""
    mine = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in mine.parameters():
            parameter.add_(state.rank)  # the values of rank 0 are everyone's
    plan = af.Plan(loss_fn, mine, optimizer(mine.parameters()), af.num_labels("labels"), **given)
    state, step = af.build(state, recipe(plan))
    found = []
    for part in parts[state.data.rank]:
        state, report = step(state, part)
        found.append((float(report.loss), float(report.grad_norm), report.weight))
    return found, ours.whole(mine.state_dict())


def assert_one_process(ranks, expected):
    reports, parameters = expected
    for found, actual in ranks:
        ours.assert_close(actual, parameters)
        assert found == [pytest.approx(each, rel=1e-6) for each in reports]


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


@BOTH
@ours.share(0.1)
@given(dealt=dealt(), num_microbatches=st.integers(1, 3))
@example(dealt=UNEVEN, num_microbatches=2)
def test_a_users_strategy_on_a_mesh_is_one_process(recipe, dealt, num_microbatches):
    found, sizes = dealt
    recipe = af.compose(recipe, af.accumulate(num_microbatches), af.clip(0.1))
    model, parts = perceptron(), ours.dealt(found, sizes)
    ranks = simulate(lambda state: train(state, model, parts, recipe), mesh=SQUARE)
    assert_one_process(ranks, train_by_hand(model, found))
