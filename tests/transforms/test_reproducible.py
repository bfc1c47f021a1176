"""reproducible: hashes of whole runs, draws by virtual rank, and single cases."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours
from tests.support.reproducible_runs import (
    RECIPES,
    Net,
    batches,
    built,
    fingerprint,
    fingerprints,
    kept,
    sha256,
    train,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:step. model should write the same in its forward"),
    pytest.mark.filterwarnings("ignore:step. loss_fn should return the mean"),
]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["average", "schedule", "freeze", "norm", "fp16"], marks=pytest.mark.slow),
        ["uniform average", "plateau", "spikes", "replicas"],
    ],
    ids=str,
)
def test_a_run_that_resumes_with_other_numbers_of_ranks_has_that_hash_too(names, tmp_path):
    recipe = af.compose(af.clip(0.5), *[RECIPES[name] for name in names])

    def leg(state, stop):
        model = Net()
        with torch.no_grad():
            model.heads[0].bias += state.rank + len(heard)  # a checkpoint replaces these parameters
        state, step = built(state, recipe, model)
        state = af.load(step, state, tmp_path) if heard else state
        state, said = train(state, step, batches(9)[state.step : stop])
        af.save(step, state, tmp_path)
        return said, sha256([*kept(state, step), *heard, *said])

    heard = []
    for world_size, stop in [(2, 3), (4, 6), (2, 9)]:
        ((said, found), *others) = simulate(
            lambda state, stop=stop: leg(state, stop), world_size=world_size
        )
        assert {each for _, each in others} == {found}
        heard += said
    assert {found} == fingerprints(recipe, worlds=(1,), data=batches(9))


def test_a_sharded_loader_gives_the_same_slots_to_every_number_of_ranks():
    """With `drop_last`, a short last batch is dropped; without, all ranks refuse it."""
    data = list(zip(*batches(1, 44)[0], strict=True))

    def run(state, drop_last):
        state, step = built(state, af.compose())
        loader = DataLoader(data, batch_size=16, shuffle=True, drop_last=drop_last)
        for epoch in af.shard_loader(loader, state).epochs(2, since=state):
            for batch in epoch:
                state, _ = step(state, batch)
        return sha256(ours.kept_tensors(step).values()), state.step

    ends = {
        each
        for size in (1, 4)
        for each in simulate(lambda state: run(state, drop_last=True), world_size=size)
    }
    assert len(ends) == 1
    assert ends.pop()[1] == 4

    def run_into_the_tail(state):
        with pytest.raises(ValueError, match="let it divide batch_size, and use drop_last=True"):
            run(state, drop_last=False)

    simulate(run_into_the_tail, world_size=2)


def test_a_batch_that_counts_for_nothing_is_a_gradient_of_zero_everywhere():
    def run(state):
        model = ours.token_model()
        plan = af.Plan(
            ours.token_loss, model, ours.sgd(model.parameters()), af.count_labels("labels")
        )
        state, step = af.build(af.reproducible(2)(plan), state)
        inputs, labels = torch.zeros(2, 3, 3).double(), torch.full((2, 3), -100)
        state, report = step(state, {"inputs": inputs, "labels": labels})
        return report.weight, float(report.loss), ours.kept_tensors(step)

    for weight, loss, tensors in simulate(run, world_size=2):
        assert (weight, loss) == (0, 0.0)
        ours.assert_identical(tensors, ours.token_model().state_dict())


def test_where_in_memory_a_slot_begins_does_not_matter():
    """Linear layers of this shape round differently if an address is no multiple of some number of
    bytes."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(16, 5, generator=generator)
    data = [
        (torch.randn(16, 5, generator=generator), torch.randn(16, 16, generator=generator))
        for _ in range(3)
    ]

    def run(state):
        model = nn.Linear(5, 16)
        with torch.no_grad():
            model.weight.copy_(weight)
            model.bias.copy_(weight[:, 0])
        return fingerprint(state, af.compose(), data, model=model)

    assert len({each for size in (1, 8) for each in simulate(run, world_size=size)}) == 1


def drawing(drawn):
    """Make a loss that draws from every generator, and records for which sample."""

    def loss_fn(model, batch):
        numbers = (torch.rand(()).item(), random.random(), np.random.random())
        drawn[int(batch[1][0])] = numbers
        return (model(batch[0]) * numbers[0]).mean()

    return loss_fn


def draws(world_size, *, seed=0, num_steps=2):
    """Return the draws by the first sample of each slice."""
    drawn = {}
    data = [
        (torch.ones(8, 3), torch.arange(8.0).unsqueeze(1) + 8 * index) for index in range(num_steps)
    ]

    def run(state):
        state, step = built(state, af.compose(), loss_fn=drawing(drawn))
        train(state, step, data)

    simulate(run, world_size=world_size, seed=seed)
    return drawn


def test_what_a_slot_draws_depends_on_seed_step_and_slot_alone():
    found = draws(1)
    assert len(found) == 16
    assert draws(4) == found
    other = draws(1, seed=1)
    every = [numbers for each in (found, other) for drawn in each.values() for numbers in drawn]
    assert len(set(every)) == 2 * 16 * 3


def test_generators_are_afterwards_where_they_were():
    def following():
        return torch.rand(3).tolist(), random.random(), np.random.random()

    def seed():
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)

    seed()
    expected = following()
    state, step = built(af.DistState(), af.compose(), loss_fn=drawing({}))
    state, failing = built(state, af.compose(), loss_fn=lambda model, batch: torch.rand(2))
    batch = (torch.ones(8, 3), torch.zeros(8, 1))
    seed()
    step(state, batch)
    assert following() == expected
    seed()
    with pytest.raises(ValueError, match="loss_fn must return a 0-dim"):
        failing(state, batch)
    assert following() == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_a_device_draws_by_slot_too_and_its_generator_is_afterwards_where_it_was():
    found, device = [], torch.get_device_module()
    for seed in (1, 2):
        state, step = built(af.init(), af.place())
        device.manual_seed(seed)
        before = device.get_rng_state()
        _, said = train(state, step, batches(3))
        assert torch.equal(device.get_rng_state(), before)
        found.append([float(each) for each in said])
    assert found[0] == found[1]
