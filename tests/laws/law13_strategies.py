"""Law 13: a user's strategy that splits a model over `tp`, and batches over `dp`, is one process."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate, strategies
from tests.support import strategies as ours


class Copied(torch.autograd.Function):
    """The same input on every rank, whose gradients add up."""

    @staticmethod
    def forward(ctx, tensor, state):
        ctx.state = state
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient, ctx.state), None


class Summed(torch.autograd.Function):
    """The sum of the ranks' outputs, which all of them go on with."""

    @staticmethod
    def forward(ctx, tensor, state):
        return summed(tensor, state)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def summed(tensor, state):
    total = tensor.clone()
    if state.world_size > 1:
        state.group.allreduce([total]).wait()
    return total


class Split(nn.Module):
    """A perceptron, of which each rank along `tp` holds some of the hidden units."""

    def __init__(self, whole, state):
        super().__init__()
        self.state = state
        first, _, last = whole
        parts = (first.weight, first.bias, last.weight.T)
        mine = [each.detach().chunk(state.world_size)[state.rank].clone() for each in parts]
        self.up, self.bias, self.down = map(nn.Parameter, mine)
        self.last = nn.Parameter(last.bias.detach().clone())  # whole on every rank

    def forward(self, inputs):
        hidden = F.linear(Copied.apply(inputs, self.state), self.up, self.bias).tanh()
        return Summed.apply(hidden @ self.down, self.state) + self.last


class SplitOverTP(af.extend.Strategy):
    """Averages gradients along `dp`; its norm counts the units of all ranks along `tp`."""

    finds_unused = False

    def placements(self, tensors):
        tp = self.model.state
        return dict.fromkeys(("up", "bias", "down"), (tp.rank,)) if tp.world_size > 1 else {}

    def average(self, state):
        for parameter in self.trainable():
            total = summed(parameter.grad, state.along("dp"))
            parameter.grad = total / state.data.world_size

    def norm(self, tensors):
        *of_units, of_all = [each.square().sum() for each in tensors]
        return (summed(torch.stack(of_units).sum(), self.model.state) + of_all).sqrt()


def built(state, whole, recipe):
    model = Split(whole, state.along("tp"))
    plan = af.Plan(ours.mse, model, ours.adamw(model.parameters()))
    state, step = af.build(recipe(replace(plan, strategy=(SplitOverTP,))), state)
    return state, step, model


@st.composite
def dealt(draw):
    """Draw global batches, a mesh, and any split over its data axis, also empty parts."""
    found = draw(strategies.batches())
    mesh = draw(st.sampled_from([{"dp": 2, "tp": 2}, {"dp": 3, "tp": 2}, {"dp": 1, "tp": 3}]))
    sizes = [draw(strategies.uneven_parts(af.count_samples(batch), mesh["dp"])) for batch in found]
    return found, mesh, sizes


@ours.share(0.3)
@given(dealt=dealt(), num_microbatches=st.integers(1, 3))
@example(
    dealt=([(torch.eye(3).double(), torch.ones(3, 1).double())], {"dp": 2, "tp": 2}, [[0, 3]]),
    num_microbatches=2,
)
def test_a_strategy_over_two_axes_is_one_process(dealt, num_microbatches):
    batches, mesh, sizes = dealt
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    losses, expected = ours.trained_by_hand(whole, batches, max_norm=0.05)
    parts = ours.dealt(batches, sizes)

    def run(state):
        recipe = af.compose(af.accumulate(num_microbatches), af.clip(0.05))
        state, step, model = built(state, whole, recipe)
        found = []
        for part in parts[state.data.rank]:
            state, report = step(state, part)
            found.append(float(report.loss))
        joined = {
            "0.weight": af.gather(model.up, state, axis="tp"),
            "0.bias": af.gather(model.bias, state, axis="tp"),
            "2.weight": af.gather(model.down, state, axis="tp").T,
            "2.bias": model.last,
        }
        return found, {name: each.detach() for name, each in joined.items()}

    for found, actual in simulate(run, mesh=mesh):
        ours.assert_close(actual, expected)
        assert found == pytest.approx(losses, rel=1e-6)


BATCH = (torch.eye(3).double(), torch.ones(3, 1).double())


def perceptron():
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()


@pytest.mark.parametrize(("name", "rank"), [("up", 3), ("down", 2)])
def test_one_changed_element_is_found_among_the_ranks_that_hold_the_same_units(name, rank):
    """On 2 x 2, ranks 0 and 2 hold the same units, and ranks 1 and 3."""
    whole = perceptron()

    def run(state):
        state, step, model = built(state, whole, af.check_replicas(2))
        state, _ = step(state, BATCH)
        if state.rank == rank:
            with torch.no_grad():
                model.get_parameter(name).view(-1)[-1] += 1e-9
        with pytest.raises(RuntimeError, match=f"at step 2, {name} differs on rank {rank};"):
            step(state, BATCH)

    simulate(run, mesh={"dp": 2, "tp": 2})


def test_units_of_one_rank_in_a_plain_tensor_are_not_saved_as_the_whole(tmp_path):
    whole = perceptron()

    def run(state):
        state, step, _ = built(state, whole, lambda plan: plan)
        rule = (
            "must hold tensors of the model whole or as DTensors, got a plain part of 'up' on each"
        )
        words = f"save: step {rule} rank by SplitOverTP; hold parts as DTensors on af.device_mesh"
        with pytest.raises(ValueError, match=words):
            af.save(step, state, tmp_path)
        return af.resume(step, state, tmp_path).step

    assert simulate(run, mesh={"dp": 1, "tp": 2}) == [0, 0]

    def run_alone(state):
        state, step, _ = built(state, whole, lambda plan: plan)
        af.save(step, state, tmp_path)

    simulate(run_alone, mesh={"dp": 2, "tp": 1})

    def load(state):
        state, step, _ = built(state, whole, lambda plan: plan)
        with pytest.raises(ValueError, match="load: step must hold tensors of the model whole"):
            af.resume(step, state, tmp_path)

    simulate(load, mesh={"dp": 1, "tp": 2})
