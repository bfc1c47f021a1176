"""A loss that is a sum and its count has the mean over the global batch, for every W and k."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.errors import LossError
from accel_fn.testing import simulate, strategies
from tests.support import strategies as ours

WRAPS = {
    "wrap_ddp": af.wrap_ddp(),
    "wrap_fsdp": af.wrap_fsdp(blocks=torch.nn.Linear),
}


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
    ).double()


def a_batch(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 3, generator=generator).double()
    return inputs, inputs.sum(1, keepdim=True).sin()


def positives(model, batch):
    """All errors by the number of positives, which the forward decides; it may be 0."""
    out = model(batch[0])
    return (out - batch[1]).square().sum(), (out.detach() > 0.1).sum()


def two(model, batch):
    """Two terms with counts of their own, and a pair of a metric."""
    out = model(batch[0])
    chosen = out.detach() > 0
    terms = {
        "all": ((out - batch[1]).square().sum(), len(out)),
        "some": ((out - 1).abs()[chosen].sum(), chosen.sum()),
    }
    return terms, {"largest": (out.detach().sum(), len(out))}


def mean_of(loss_fn):
    """The loss of one process, written by hand."""

    def by_hand(model, batch):
        found = loss_fn(model, batch)
        found = found[0] if isinstance(found[0], dict) else found
        pairs = found.values() if isinstance(found, dict) else [found]
        return sum(total / count if count else 0 * total for total, count in pairs)

    return by_hand


def trained(state, loss_fn, parts, transform, **options):
    model = network()
    plan = transform(af.Plan(loss_fn, model, ours.sgd(model.parameters()), **options))
    state, step = af.build(state, plan)
    reports = []
    for batch in parts[state.rank]:
        state, report = step(state, batch)
        reports.append(report)
    return reports, ours.whole(model.state_dict())


def by_hand(loss_fn, batches):
    model, losses = network(), []
    optimizer = ours.sgd(model.parameters())
    for batch in batches:
        loss = mean_of(loss_fn)(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize(("loss_fn", "largest_k"), [(positives, 3), (two, 1)])
@ours.share(0.5)
@given(data=st.data())
def test_ranks_and_microbatches_are_one_process(wrap, loss_fn, largest_k, data):
    batches = [a_batch(data.draw(st.integers(2, 7)), seed) for seed in range(5, 8)]
    world_size = data.draw(strategies.world_sizes(3))
    sizes = [data.draw(strategies.uneven_parts(len(each[0]), world_size)) for each in batches]
    k = data.draw(st.integers(1, largest_k))
    losses, expected = by_hand(loss_fn, batches)
    parts = ours.dealt(batches, sizes)
    transform = af.compose(af.accumulate(k), WRAPS[wrap])
    ranks = simulate(lambda state: trained(state, loss_fn, parts, transform), world_size=world_size)
    for reports, actual in ranks:
        ours.assert_close(actual, expected)
        assert [float(each.loss) for each in reports] == pytest.approx(losses, rel=1e-12, abs=1e-12)
