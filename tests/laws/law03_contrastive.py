"""A loss over the rows of all ranks has the gradient of one process."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate, strategies
from tests.laws.law03_worlds import wrap_by_hand
from tests.support import strategies as ours
from tests.support.compilers import MARKS


def one_process(model, batch):
    """A contrastive loss with batch statistics by hand, written for one process."""
    inputs, targets = batch
    out = model(inputs)
    keys = F.normalize(torch.cat([out, inputs], 1))
    spread = (out - out.mean()).square().sum() / 7
    rows = F.cross_entropy(
        keys @ keys.T * out[0].square(), torch.arange(len(out)), reduction="none"
    )
    return (rows + (out - targets).square().squeeze(1) * spread).mean()


def all_ranks(state):
    """The same loss over this rank's rows against those of all ranks."""

    def loss_fn(model, batch):
        inputs, targets = batch
        out = model(inputs)
        own = F.normalize(torch.cat([out, inputs], 1))
        keys = af.gather({"keys": own, "unused": out}, state)["keys"]
        mean = af.reduce_mean({"mean": out.mean()}, state, weight=len(out))["mean"]
        spread = af.reduce_sum((out - mean).square().sum(), state) / 7
        scale = af.broadcast(out[0].square(), state)
        first = sum(af.gather([len(out)], state)[: state.rank])
        labels = first + torch.arange(len(out))
        rows = F.cross_entropy(own @ keys.T * scale, labels, reduction="none")
        return (rows + (out - targets).square().squeeze(1) * spread).mean()

    return loss_fn


def put_back_by_hand(state):
    """The loss of the whole batch on every rank, with its own rows put back."""

    def loss_fn(model, batch):
        out = model(batch[0])
        every = af.gather((out, *batch), state)
        first = sum(af.gather([len(out)], state)[: state.rank])
        every[0][first : first + len(out)] = out
        return one_process(lambda _: every[0], every[1:])

    return loss_fn


def trained(state, loss_of, parts, wrap):
    model = ours.regression_model()
    plan = af.Plan(loss_of(state), model, ours.sgd(model.parameters()))
    state, step = af.build(af.compose(af.place(), wrap)(plan), state)
    losses = []
    for batch in parts[state.rank]:
        state, report = step(state, batch)
        losses.append(float(report.loss))
    return losses, ours.whole(model.state_dict())


@st.composite
def dealt(draw):
    """Draw global batches, with at least one row for every rank."""
    batches = draw(strategies.batches(num_batches=2))
    world_size = draw(strategies.world_sizes(min(4, *map(af.count_samples, batches))))
    extra = [
        draw(strategies.uneven_parts(af.count_samples(batch) - world_size, world_size))
        for batch in batches
    ]
    return batches, [[1 + size for size in sizes] for sizes in extra]


WRAPPERS = {"wrap_ddp": af.wrap_ddp(), "by hand": wrap_by_hand, "wrap_fsdp": af.wrap_fsdp()}


@pytest.mark.parametrize(
    ("loss_of", "wrap"),
    [
        (all_ranks, "wrap_ddp"),
        (put_back_by_hand, "by hand"),
        pytest.param(all_ranks, "wrap_fsdp", marks=pytest.mark.slow),
    ],
)
@ours.share(0.2)
@given(dealt=dealt())
@example(dealt=([(torch.eye(3).double(), torch.ones(3, 1).double())], [[1, 2]]))
def test_a_loss_over_all_rows_trains_as_in_one_process(loss_of, wrap, dealt):
    batches, sizes = dealt
    expected = ours.trained_by_hand(
        ours.regression_model(), batches, loss_fn=one_process, optimizer=ours.sgd
    )
    parts = ours.dealt(batches, sizes)
    ranks = simulate(
        lambda state: trained(state, loss_of, parts, WRAPPERS[wrap]), world_size=len(parts)
    )
    ours.assert_trained(ranks, expected)


def spread(state):
    """Make a loss with the variance of the global batch; the graph of one rank can hold its
    collectives, which are of tensors."""

    def loss_fn(model, batch):
        out = model(batch[0])
        mean = af.reduce_mean(out.mean(), state, weight=len(out))
        return (out - mean).square().mean() + (out @ af.gather(out, state).T).square().mean()

    return loss_fn


def spread_in_one_process(model, batch):
    out = model(batch[0])
    return (out - out.mean()).square().mean() + (out @ out.T).square().mean()


# torch.compile raises this warning itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    ("wrap", "world_size"),
    [
        pytest.param(af.compose(af.wrap_ddp(), af.compiled()), 2, marks=MARKS),
        pytest.param(af.compiled(scope="step"), 1, marks=MARKS),
        (af.compose(af.wrap_ddp(), af.checkpoint_activations(blocks=torch.nn.Linear)), 2),
    ],
    ids=["compiled", "compiled step", "checkpoints"],
)
def test_graphs_and_activations_computed_again_change_nothing(wrap, world_size):
    batches = [(torch.eye(3).double(), torch.ones(3, 1).double())] * 2
    _, expected = ours.trained_by_hand(
        ours.regression_model(), batches, loss_fn=spread_in_one_process, optimizer=ours.sgd
    )
    parts = ours.dealt(batches, [[3] if world_size == 1 else [1, 2]] * 2)
    ranks = simulate(
        lambda state: trained(state, spread, parts, wrap), world_size=world_size, timeout_s=100
    )
    for _, actual in ranks:
        ours.assert_close(actual, expected)
