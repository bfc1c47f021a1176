"""wrap_fsdp where ranks route by their samples: what is refused, where, what repairs it, and the cost."""

import pytest
import torch
from torch import nn

import accel_fn as af
from accel_fn.errors import LossError
from accel_fn.testing import simulate
from accel_fn.testing.internals import num_calls
from tests.support import strategies as ours

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
BOTH = torch.tensor([1.0, -1.0] * 4)
"""Every rank has samples of both experts."""
APART = torch.tensor([1.0] * 4 + [-1.0] * 4)
"""The first of two ranks has samples of the first expert alone, the second of the other."""
REFUSED = r"every rank must use the same FSDP units in the same order, got experts\.1 as number 2 on rank 1"


class Experts(nn.Module):
    """A mixture of experts; those without samples are skipped, or called with no rows."""

    def __init__(self, *, skips=True):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 1)
        self.skips = skips

    def forward(self, inputs):
        masks = [inputs[:, 0] > 0, inputs[:, 0] <= 0]
        routed = zip(self.experts, masks, strict=True)
        hidden = [each(inputs[mask]) for each, mask in routed if mask.any() or not self.skips]
        return self.head(torch.cat(hidden))


def experts(**settings):
    model = Experts(**settings).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def batch_of(state, signs):
    inputs = X.clone()
    inputs[:, 0] = inputs[:, 0].abs() * signs
    return inputs.tensor_split(state.world_size)[state.rank]


def square(model, batch):
    return model(batch).square().mean()


def built(state, recipe, loss_fn=square, **settings):
    model = experts(**settings)
    plan = af.Plan(loss_fn, model, ours.adamw(model.parameters()))
    return af.build(recipe(plan), state, check_loss=False)


def refusals(state, recipe=None, loss_fn=square):
    """What three steps raise, of which the ranks are apart in the second."""
    state, step = built(state, af.wrap_fsdp() if recipe is None else recipe, loss_fn)
    found = []
    for signs in (BOTH, APART, BOTH):
        try:
            state, _ = step(state, batch_of(state, signs))
            found.append("")
        except LossError as error:
            found.append(str(error))
    return found


def test_ranks_that_skip_an_expert_raise_an_error_that_names_it_and_the_repair():
    for first, second, third in simulate(refusals, world_size=2):
        assert "got experts.1 as number 2 on rank 1 and " in second
        assert "call each unit on every rank, with no rows where it has nothing to do" in second
        assert first == third == ""


def test_a_forward_alone_is_refused_on_all_ranks_and_a_step_can_follow():
    def run(state):
        state, step = built(state, af.wrap_fsdp())
        for _ in range(2):
            step.forward(state, batch_of(state, BOTH))
            with pytest.raises(LossError, match=REFUSED):
                step.forward(state, batch_of(state, APART))
        _, report = step(state, batch_of(state, BOTH))
        return float(report.loss)

    _, expected = built(af.DistState(), af.compose())
    loss = float(expected.forward(af.DistState(), batch_of(af.DistState(), BOTH)))
    assert simulate(run, world_size=2) == [pytest.approx(loss, rel=1e-12)] * 2


@pytest.mark.parametrize("metric_fn", [None, lambda model, batch: {"it": model(batch).squeeze(1)}])
def test_an_evaluation_is_refused_on_all_ranks(metric_fn):
    """Each has a sample of a batch; those of the third are of two experts."""
    rows = X.clone()
    rows[:, 0] = rows[:, 0].abs() * torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, -1.0, 1.0, 1.0])

    def run(state):
        state, step = built(state, af.wrap_fsdp())
        loader = af.shard_loader(torch.utils.data.DataLoader(rows, batch_size=2), state)
        with pytest.raises(LossError, match="same FSDP units in the same order, got experts"):
            af.evaluate(step, state, loader, metric_fn)
        step(state, batch_of(state, BOTH))

    simulate(run, world_size=2)


def test_steps_after_the_first_two_have_three_small_collectives():
    """Of weights, of what has been run, and of losses."""

    def run(state):
        state, step = built(state, af.compose(af.wrap_fsdp(), af.accumulate(2)))
        counts = []
        for _ in range(5):
            before = num_calls()
            state, _ = step(state, batch_of(state, BOTH))
            counts.append(num_calls() - before)
        step.forward(state, batch_of(state, BOTH))
        before = num_calls()
        step.forward(state, batch_of(state, BOTH))
        step(state, batch_of(state, BOTH))
        return counts[2:], num_calls() - before

    assert simulate(run, world_size=2) == [([3, 3, 3], 6)] * 2
