"""Law 14 for wrap_fsdp: ranks that use other units than their peers train exactly, or all raise."""

import re

import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours

NUM_EXPERTS, LONGEST = 3, 4
NAMES_A_UNIT = re.compile(
    r"step: every rank must use the same FSDP units in the same order, got (the gradient of )?"
    r"(experts\.|head|the model outside of its blocks|the end)"
)
routes = st.lists(st.integers(0, NUM_EXPERTS - 1), max_size=LONGEST).map(tuple)
"""The experts that a micro-batch goes through, in this order."""


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(3, width), nn.Linear(width, 3)

    def forward(self, inputs):
        return inputs + self.down(torch.tanh(self.up(inputs)))


class Routed(nn.Module):
    """A model whose batch names the experts to use; some have the same shapes, one has others."""

    def __init__(self, *, recomputes=False):
        super().__init__()
        self.experts = nn.ModuleList(Expert(width) for width in (3, 3, 5))
        self.scale = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(3, 1)
        self.unused = nn.Linear(3, 1)
        self.recomputes = recomputes

    def forward(self, inputs, route):
        hidden = self.scale * inputs
        for expert in route:
            if self.recomputes:
                hidden = checkpoint(self.experts[expert], hidden, use_reentrant=False)
            else:
                hidden = self.experts[expert](hidden)
        return self.head(hidden)


def routed(**settings):
    model = Routed(**settings).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def loss_fn(model, batch):
    """A micro-batch takes the route of its first sample."""
    inputs, targets, named = batch
    return F.mse_loss(model(inputs, [each for each in named[0].tolist() if each >= 0]), targets)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def batch_of(rank, index, own):
    """One sample for each micro-batch of a rank, with its route."""
    generator = torch.Generator().manual_seed(10 * index + rank)
    inputs = torch.randn(len(own), 3, generator=generator, dtype=torch.float64)
    named = torch.tensor([[*route, *[-1] * (LONGEST - len(route))] for route in own])
    return inputs, inputs.sum(dim=1, keepdim=True), named


def train_by_hand(steps, **settings):
    """One process: the mean over all samples, each on its own route."""
    model = routed(**settings)
    optimizer = optimizer_of(model)
    for index, ranks in steps:
        optimizer.zero_grad()
        parts = [batch_of(rank, index, own) for rank, own in enumerate(ranks)]
        samples = [tuple(t[i : i + 1] for t in part) for part in parts for i in range(len(part[0]))]
        torch.stack([loss_fn(model, each) for each in samples]).mean().backward()
        optimizer.step()
    return model.state_dict()


@st.composite
def programs(draw):
    """Numbers of ranks and of groups of shards, and for each step every rank's routes of micro-batches."""
    world_size, groups = draw(st.sampled_from([(2, 1), (2, 2), (3, 1), (4, 2)]))
    num_microbatches = draw(st.integers(1, 2))
    own = st.lists(routes, min_size=num_microbatches, max_size=num_microbatches).map(tuple)
    known = draw(own)
    shorter = st.integers(0, LONGEST).map(lambda size: tuple(each[:size] for each in known))
    alike = (st.just(known) | shorter | own).map(lambda each: (each,) * world_size)
    rank = st.integers(0, world_size - 1)
    one_leaves = st.builds(
        lambda rank, other: tuple(other if each == rank else known for each in range(world_size)),
        rank,
        shorter | own,
    )
    apart = st.lists(own, min_size=world_size, max_size=world_size).map(tuple)
    steps = st.lists(alike | one_leaves | apart, min_size=1, max_size=4)
    return world_size, groups, [(known,) * world_size, *draw(steps)]


def train(state, steps, wrap, **settings):
    """The parameters after the steps that were not refused, and which those are."""
    model = routed(**settings)
    recipe = af.compose(wrap, af.accumulate(len(steps[0][0])))
    plan = recipe(af.Plan(loss_fn, model, optimizer_of(model)))
    state, step = af.build(plan, state, check_loss=False)
    taken, refused = [], []
    for index, ranks in enumerate(steps):
        try:
            state, _ = step(state, batch_of(state.rank, index, ranks[state.rank]))
        except af.errors.LossError as error:
            refused.append(str(error))
        else:
            taken.append(index)
    assert all(map(NAMES_A_UNIT.search, refused))
    return ours.whole(model.state_dict()), taken


@ours.share(0.3)
@given(
    program=programs(),
    recomputes=st.booleans(),
    reshard=st.booleans(),
    blocks=st.sampled_from([Expert, "experts.0", nn.Linear, (Expert, nn.Linear)]),
)
@example((2, 1, [(((0, 1),),) * 2, (((0, 1),), ((0, 2),))]), False, True, Expert)
@example((2, 1, [(((0, 1),),) * 2, (((0,),), ((0, 1),))]), False, True, Expert)
@example((2, 1, [(((0, 1),), ((0,),))]), False, False, Expert)
@example((4, 2, [(((0, 1),),) * 4, (*(((0, 1),),) * 3, ((0, 2),))]), False, True, Expert)
def test_a_step_is_that_of_one_process_or_raises_on_all_ranks(program, recomputes, reshard, blocks):
    world_size, replicate, steps = program
    wrap = af.wrap_fsdp(blocks=blocks, replicate=replicate, reshard_after_forward=reshard)
    run = lambda state: train(state, steps, wrap, recomputes=recomputes)
    every = simulate(run, world_size=world_size, timeout_s=5.0)
    taken = every[0][1]
    alike = {index for index, ranks in enumerate(steps) if len(set(ranks)) == 1}
    assert alike <= set(taken)  # whose ranks do the same is not refused
    expected = train_by_hand([(index, steps[index]) for index in taken], recomputes=recomputes)
    for actual, same in every:
        assert same == taken
        ours.assert_close(actual, expected)
