"""Preemption: a request on one rank reaches all ranks after the same step, and changes nothing
else."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours

RECIPES = {
    "in the bucket": af.wrap_ddp(),
    "beside a hook": af.wrap_ddp(comm_hook="bf16"),
    "in shards": af.wrap_fsdp(),
    "micro-batches": af.compose(af.accumulate(3), af.wrap_ddp()),
    "a gradient function": lambda plan: replace(
        af.wrap_ddp()(plan), wrap_grad_fn=(lambda inner: lambda *given: inner(*given),)
    ),
}


def train(state, recipe, asked):
    """Train some steps; return each rank's stop flags, its number of collectives, and the parameters.

    `asked` is a set of (step, rank).
    """
    preemption = af.Preemption(())
    model = ours.regression_model()
    plan = af.Plan(ours.mse, model, ours.adamw(model.parameters()))
    listening = preemption if asked is not None else af.compose()
    state, step = af.build(af.compose(recipe, listening)(plan), state)
    stops, counts = [], []
    for number in range(4):
        if (number, state.rank) in (asked or ()):
            preemption.ask()
        inputs = torch.full((state.rank * 2 % 5, 3), 0.1 * number + state.rank).double()
        before = state.group._get_sequence_number_for_group()
        state, report = step(state, (inputs, inputs[:, :1] + 1))  # rank 0 has no samples
        stops.append(report.extras.get("stop"))
        counts.append(state.group._get_sequence_number_for_group() - before)
    tensors = ours.whole(model.state_dict())
    return stops, counts, {name: value.clone() for name, value in tensors.items()}


@ours.share(0.5)
@given(
    world_size=st.integers(2, 4),
    recipe=st.sampled_from(sorted(RECIPES)),
    asked=st.frozensets(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=2),
)
def test_all_ranks_learn_of_it_after_the_same_step_which_is_the_step_it_is(
    world_size, recipe, asked
):
    asked = {(number, rank) for number, rank in asked if rank < world_size}
    first = min((number for number, _ in asked), default=4)
    silent = simulate(lambda state: train(state, RECIPES[recipe], None), world_size=world_size)
    heard = simulate(lambda state: train(state, RECIPES[recipe], asked), world_size=world_size)
    for (_, num_collectives, expected), (stops, counts, found) in zip(silent, heard, strict=True):
        assert stops == [number >= first for number in range(4)]
        assert counts == num_collectives  # the flag travels in a collective that exists anyway
        assert min(counts) > 0
        ours.assert_identical(found, expected)
