"""Draws are the same for every number of ranks, and so are several steps on one batch that use them."""

import copy
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

POSITIONS = st.builds(
    af.DistState,
    seed=st.integers(0, 2**31),
    step=st.integers(0, 2**20),
    call=st.integers(0, 9),
)


@given(
    state=POSITIONS,
    num_rows=st.integers(0, 20),
    world_size=st.integers(1, 9),
    name=st.text(max_size=8),
)
def test_the_draws_of_the_ranks_joined_are_the_draw_of_one_rank(state, num_rows, world_size, name):
    def fn(generator):
        times = torch.randint(1000, (num_rows,), generator=generator)
        return {"noise": torch.randn(num_rows, 3, generator=generator), "times": times}

    whole = af.draw(fn, state, name)
    ranks = [replace(state, rank=rank, world_size=world_size) for rank in range(world_size)]
    parts = [af.draw(fn, each, name) for each in ranks]
    for key, rows in whole.items():
        assert torch.equal(torch.cat([part[key] for part in parts]), rows)
    sizes = [len(part["noise"]) for part in parts]
    assert max(sizes) <= min(sizes) + 1


@given(positions=st.lists(POSITIONS, min_size=2, max_size=2), names=st.tuples(st.text(), st.text()))
def test_two_draws_are_equal_where_all_of_their_keys_are(positions, names):
    def key(state, name):
        return state.seed, state.step, state.call, name

    one, other = zip(positions, names, strict=True)
    drawn = [af.draw(lambda g: torch.rand(2, generator=g), *each) for each in (one, other)]
    assert torch.equal(*drawn) == (key(*one) == key(*other))


class Gan:
    """A generator, a critic, and what a run trains them on: real rows, and noise that is drawn."""

    def __init__(self, num_critic, sizes):
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(2, 3).double(), ours.regression_model()
        self.num_critic, self.sizes = num_critic, sizes
        rows = torch.Generator().manual_seed(1)
        self.real = [torch.randn(size, 3, generator=rows).double() for size in sizes]
        self.optimizers = {"g": ours.adamw(self.generator.parameters())}
        self.optimizers["d"] = ours.sgd(self.critic.parameters())

    def critic_loss(self, critic, batch):
        real, noise = batch
        with torch.no_grad():
            fake = self.generator(noise)
        return F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()

    def generator_loss(self, generator, noise):
        return F.softplus(-self.critic(generator(noise))).mean()

    def noise(self, state):
        size = self.sizes[state.step]
        return af.draw(lambda g: torch.randn(size, 2, generator=g, dtype=torch.float64), state)

    def weights(self):
        models = {"g": self.generator, "d": self.critic}
        named = ((key, model.state_dict()) for key, model in models.items())
        return {f"{key} {name}": each.clone() for key, w in named for name, each in w.items()}

    def built(self, state, recipe):
        losses = {"d": (self.critic_loss, self.critic), "g": (self.generator_loss, self.generator)}
        steps = {}
        for name, (loss_fn, model) in losses.items():
            plan = af.Plan(loss_fn, model, self.optimizers[name])
            state, steps[name] = af.build(recipe(plan), state)
        return state, steps


def by_hand(gan, seed):
    for number, real in enumerate(gan.real):
        for call in range(gan.num_critic + 1):
            noise = gan.noise(af.DistState(seed=seed, step=number, call=call))
            is_last = call == gan.num_critic
            optimizer = gan.optimizers["g" if is_last else "d"]
            optimizer.zero_grad()
            if is_last:
                gan.generator_loss(gan.generator, noise).backward()
            else:
                gan.critic_loss(gan.critic, (real, noise)).backward()
            optimizer.step()
    return gan.weights()


def train(gan, state, steps, stop=None):
    """Train to the end, or to a position `(step, call)`."""
    while state.step < len(gan.real) and (state.step, state.call) != stop:
        if state.call < gan.num_critic:
            real = af.shard_batch(gan.real[state.step], state)
            state, _ = steps["d"](state, (real, gan.noise(state)), advance=False)
        else:
            state, _ = steps["g"](state, gan.noise(state))
    return state


@ours.share(0.5)
@given(
    num_critic=st.integers(0, 2),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=2),
    world_size=strategies.world_sizes(3),
    num_microbatches=st.integers(1, 3),
    seed=st.integers(0, 9),
)
@example(num_critic=1, sizes=[5, 2], world_size=3, num_microbatches=2, seed=0)
def test_several_steps_a_batch_are_the_loop_by_hand(
    num_critic, sizes, world_size, num_microbatches, seed
):
    fresh = Gan(num_critic, sizes)
    expected = by_hand(copy.deepcopy(fresh), seed)
    recipe = af.compose(af.wrap_ddp(), af.accumulate(num_microbatches))
    gans = [copy.deepcopy(fresh) for _ in range(world_size)]

    def run(state):
        gan = gans[state.rank]
        state, steps = gan.built(replace(state, seed=seed), recipe)
        state = train(gan, state, steps)
        return (state.step, state.call), gan.weights()

    for position, weights in simulate(run, world_size=world_size):
        assert position == (len(sizes), 0)
        ours.assert_close(weights, expected)


RESUMED = {"replicas": af.wrap_ddp(), "reproducible": af.reproducible(4)}


@pytest.mark.parametrize(
    ("recipe", "stop", "worlds"),
    [("replicas", (1, 1), (2, 2)), ("reproducible", (1, 0), (2, 4))],
    ids=str,
)
def test_a_run_resumes_between_two_steps_of_a_batch(worlds, stop, recipe, tmp_path):
    """To the bit in a world of one size, and in any under `reproducible`."""
    gan = Gan(2, [8, 4, 8])
    exact = worlds[0] == worlds[1] or recipe == "reproducible"
    recipe = af.compose(RESUMED[recipe], af.clip(0.5))

    def leg(state, stop=None):
        own = copy.deepcopy(gan)
        state, steps = own.built(replace(state, seed=5), recipe)
        state = af.resume(steps, state, tmp_path)
        start = state.step, state.call
        state = train(own, state, steps, stop)
        if stop:
            af.save(steps, state, tmp_path)
        return start, own.weights()

    (_, expected), *_ = simulate(leg, world_size=worlds[1])
    simulate(lambda state: leg(state, stop), world_size=worlds[0])
    for start, found in simulate(leg, world_size=worlds[1]):
        assert start == stop
        (ours.assert_identical if exact else ours.assert_close)(found, expected)
