"""Law 13: data of a user's own code are the same on ranks that hold the same rows, or are refused."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader, Sampler, random_split

import accel_fn as af
from accel_fn.testing import simulate
from tests.laws.law13_meshes import SQUARE, four_batches
from tests.support import strategies as ours
from tests.support.runs_on_meshes import STYLES, perceptron

PAIR = {"dp": 1, "tp": 2}
INPUTS, TARGETS = (torch.cat(each) for each in zip(*four_batches(), strict=True))
REFUSED = (
    "batch must be the same on ranks that differ in other axes than dp, got other rows on rank 1"
)


class Weighted(Sampler):
    """Draws samples by weights that the loop changes."""

    def __init__(self):
        self.weights = torch.ones(len(INPUTS), dtype=torch.float64)

    def __iter__(self):
        for _ in range(len(self)):
            yield int(torch.multinomial(self.weights, 1))

    def __len__(self):
        return 16


@pytest.mark.parametrize("mesh", [SQUARE, PAIR])
def test_a_sampler_that_the_main_rank_alone_changes_gives_the_batches_of_one_process(mesh):
    def read(state):
        sampler = Weighted()
        loader = DataLoader(range(len(INPUTS)), batch_size=4, sampler=sampler)
        found = []
        for epoch in af.shard_loader(loader, state).epochs(2):
            for batch in epoch:
                found.append(af.gather(batch, state).tolist())
                if state.is_main:
                    sampler.weights[found[-1]] *= 0.1
        return found

    (expected,) = simulate(read, world_size=1)
    for found in simulate(read, mesh=mesh):
        assert found == expected


def test_data_sets_that_differ_along_another_axis_than_dp_are_refused():
    def split(state):
        generator = torch.Generator().manual_seed(state.rank)
        part, _ = random_split(range(9), [6, 3], generator=generator)
        af.shard_loader(DataLoader(part, batch_size=2), state)

    with pytest.raises(RuntimeError, match="data set must be the same on every rank"):
        simulate(split, mesh=PAIR)


@pytest.mark.parametrize("first", [0, 9])
def test_random_draws_that_differ_on_ranks_with_the_same_rows_are_refused(first):
    """As those of augmentation that begins later."""

    def train(state):
        state, step = ours.built(af.wrap_ddp(), state)
        for number in range(10):
            factor = 1.0 + (state.rank if number >= first else 0)
            state, _ = step(state, af.shard_batch((INPUTS * factor, TARGETS), state))

    with pytest.raises(ValueError, match=f"step: {REFUSED}.*seed random draws alike"):
        simulate(train, mesh=SQUARE)


@pytest.mark.parametrize("recipe", [af.wrap_ddp(), af.wrap_tp(STYLES)])
@pytest.mark.parametrize("function", [af.evaluate, af.predict])
def test_rows_that_are_cut_by_the_rank_in_the_world_are_refused(function, recipe):
    def run(state):
        state, step = ours.built(recipe, state, model=perceptron())
        mine = [(INPUTS[state.rank :: state.world_size], TARGETS[state.rank :: state.world_size])]
        given = [] if function is af.evaluate else [lambda model, batch: model(batch[0])]
        function(step, state, mine, *given)

    with pytest.raises(ValueError, match=f"{function.__name__}: {REFUSED}"):
        simulate(run, mesh=PAIR)


def test_outputs_of_a_split_model_are_gathered_summed_and_sent_as_in_one_process():
    # With a bias, the output is a sum that has waited for the collective.
    given = perceptron(bias=False)

    def run(state):
        model = copy.deepcopy(given)
        state, _ = ours.built(af.compose(af.wrap_ddp(), af.wrap_tp(STYLES)), state, model=model)
        out = model(af.shard_batch(INPUTS, state))
        whole = af.gather(out.detach(), state)
        return {
            "whole": whole,
            "items": torch.cat([item["out"] for item in af.gather([{"out": out.detach()}], state)]),
            "sum": af.reduce_sum(out.detach().sum(0), state),
            "largest": af.reduce_max(model(INPUTS).detach(), state),
            "sent": af.broadcast(model(INPUTS).detach(), state),
        }

    (expected,) = simulate(run, world_size=1)
    for found in simulate(run, mesh=SQUARE):
        ours.assert_close(found, expected)
