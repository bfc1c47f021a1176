"""Law 8 for `order=`: in any world, the batches of torch's own loader, draw for draw."""

import itertools
import json
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours
from tests.support.processes import launch

NUM_PASSES = 3
VIEWS = {
    "plain": lambda loader, state: loader,
    "prefetch": lambda loader, state: af.prefetch(loader, state),
    "window": lambda loader, state: af.group_batches(loader, 1),
}


@dataclass
class Program:
    """A loop over passes that draws from the global generator as it goes, on rank 0."""

    num_samples: int
    batch_size: int
    draws: list[int]
    """How many numbers the loop draws after each batch and after each pass, in turn."""
    shuffle: bool = True
    drop_last: bool = False
    generator: bool = False
    sampler: bool = False
    is_ready: bool = False
    view: str = "plain"
    options: tuple[tuple[str, object], ...] = ()

    def loader(self):
        own = {"generator": torch.Generator().manual_seed(5)} if self.generator else {}
        data = torch.arange(self.num_samples)
        options = {**dict(self.options), **own}
        if self.is_ready:
            # Each item is a batch of three rows.
            data = torch.arange(3 * self.num_samples).view(-1, 3)
            return DataLoader(data, batch_size=None, shuffle=self.shuffle, **options)
        if self.sampler:
            batches = BatchSampler(RandomSampler(data, **own), self.batch_size, self.drop_last)
            return DataLoader(data, batch_sampler=batches, **dict(self.options))
        sizes = {"batch_size": self.batch_size, "drop_last": self.drop_last}
        return DataLoader(data, shuffle=self.shuffle, **sizes, **options)

    def alone(self):
        """Return the batches that torch's loader gives to a loop on one process."""
        torch.manual_seed(3)
        loader, draws, found = self.loader(), itertools.cycle(self.draws), []
        for _ in range(NUM_PASSES):
            for batch in loader:
                found.append(batch.tolist())
                torch.rand(next(draws))
            torch.rand(next(draws))
        return found

    def part(self, state, saved, num_batches):
        """Run until so many batches were received; return them and what a checkpoint holds."""
        loader = af.shard_loader(self.loader(), state, order="torch")
        draws, found = Draws(self.draws, state, saved), []
        if saved is not None:
            loader.load_state_dict(saved["loader"])
        for _ in range(loader.epoch, NUM_PASSES):
            for batch in VIEWS[self.view](loader, state):
                [batch] = batch if self.view == "window" else [batch]
                found.append(af.gather(batch, state).tolist())
                draws.next()
                if len(found) == num_batches:
                    break
            # A pass that has been received whole is over: its loop draws after it.
            if loader.state_dict()["batch"] == 0:
                draws.next()
            if len(found) == num_batches:
                break
        return found, {"loader": loader.state_dict(), **draws.state_dict()}


class Draws:
    """The draws of a loop from the global generator, on rank 0: simulated ranks share it."""

    def __init__(self, sizes, state, saved):
        self.sizes, self.state = sizes, state
        self.number = 0 if saved is None else saved["number"]
        if state.is_main and saved is None:
            torch.manual_seed(3)
        elif state.is_main:
            torch.set_rng_state(saved["random"])
        af.barrier(state)

    def next(self):
        size = self.sizes[self.number % len(self.sizes)]
        self.number += 1
        if self.state.is_main:
            torch.rand(size)
        # Without it, another rank may collate an empty part, with the generators seeded meanwhile.
        af.barrier(self.state)

    def state_dict(self):
        random = torch.get_rng_state() if self.state.is_main else None
        return {"number": self.number, "random": random}


@st.composite
def programs(draw):
    """Draw a loop over a loader that is read in this process."""
    batch_size = draw(st.integers(1, 6))
    drop_last = draw(st.booleans())
    return Program(
        draw(st.integers(batch_size, 20)),
        batch_size,
        draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)),
        shuffle=draw(st.booleans()),
        drop_last=drop_last,
        generator=draw(st.booleans()),
        sampler=draw(st.booleans()),
        is_ready=draw(st.integers(0, 4)) == 0,
        view=draw(st.sampled_from([*VIEWS])),
    )


def check(program, stops):
    """Each part of the run has another number of ranks, and ends after so many batches."""
    saved, found = None, []
    for world_size, num_batches in stops:
        ranks = simulate(
            lambda state, start=saved, most=num_batches: program.part(state, start, most),
            world_size=world_size,
        )
        for batches, here in ranks:
            assert batches == ranks[0][0]
            assert str(here["loader"]) == str(ranks[0][1]["loader"])
        found += ranks[0][0]
        saved = ranks[0][1]
    assert found == program.alone()
    assert saved["loader"]["epoch"] == NUM_PASSES


WORLDS = st.integers(1, 4)
STOPS = st.lists(st.tuples(WORLDS, st.integers(1, 9)), max_size=3)


@ours.share(0.5)
@given(program=programs(), stops=STOPS, world_size=WORLDS)
@example(Program(7, 2, [1, 0]), [(2, 2), (3, 1)], 4)
@example(Program(7, 2, [1], generator=True), [(2, 5), (1, 3)], 3)
@example(Program(8, 2, [2], drop_last=True, generator=True), [(2, 4), (3, 1)], 2)
@example(Program(6, 6, [2], shuffle=False, view="prefetch"), [(2, 1)], 2)
def test_torchs_order_is_that_of_torchs_loader_in_any_world_and_over_resumes(
    program, stops, world_size
):
    check(program, [*stops, (world_size, None)])


WORKERS = {"num_workers": 2}
PERSISTENT = {"num_workers": 1, "persistent_workers": True}


# A run that resumes starts persistent workers anew, and torch draws a seed for new ones.
@pytest.mark.slow
@pytest.mark.parametrize("generator", [False, True])
@pytest.mark.parametrize(
    ("options", "stops"), [(WORKERS, []), (WORKERS, [(2, 2)]), (PERSISTENT, [])]
)
def test_workers_draw_as_torchs_do(options, stops, generator):
    program = Program(9, 3, [1, 2], generator=generator, options=tuple(options.items()))
    check(program, [*stops, (2, None)])


def test_evaluation_draws_as_a_pass_and_leaves_the_draw_of_the_loop():
    def run(state, *, evaluates):
        torch.manual_seed(0)
        loader = af.shard_loader(Program(9, 2, [0]).loader(), state, order="torch")
        next(iter(loader))
        if evaluates:
            before = loader.state_dict()
            assert len(list(loader._source.numbered(None, 0))) == 5
            assert loader.state_dict() == before
        return next(iter(loader)).tolist()

    here = af.DistState()
    assert run(here, evaluates=False) != run(here, evaluates=True)


@ours.share(0.5)
@given(
    num_samples=st.integers(1, 30),
    batch_size=st.integers(1, 4),
    world_size=WORLDS,
    step=st.integers(0, 20),
)
def test_the_distributed_order_is_that_of_its_sampler(num_samples, batch_size, world_size, step):
    """DistributedSampler fills up the last batch, so only whole batches are compared."""
    data, size = torch.arange(num_samples), batch_size * world_size
    samplers = [DistributedSampler(data, world_size, rank) for rank in range(world_size)]
    expected = []
    for number in range(NUM_PASSES):
        for each in samplers:
            each.set_epoch(number)
        ranks = [DataLoader(data, batch_size, sampler=each) for each in samplers]
        joined = [sorted(torch.cat(parts).tolist()) for parts in zip(*ranks, strict=True)]
        expected += [batch if len(batch) == size else None for batch in joined]
        if num_samples % size:
            expected[-1] = None
    step = min(step, len(expected))

    def run(state):
        loader = af.shard_loader(DataLoader(data, size, shuffle=True), state, order="distributed")
        epochs = loader.epochs(NUM_PASSES, since=af.DistState(step=step))
        batches = [af.gather(batch, state).tolist() for epoch in epochs for batch in epoch]
        places = (divmod(number, len(loader)) for number in range(step, len(expected)))
        assert batches == [loader.global_indices(*place).tolist() for place in places]
        return batches

    for batches in simulate(run, world_size=world_size):
        assert len(batches) == len(expected) - step
        for batch, whole in zip(batches, expected[step:], strict=True):
            assert whole is None or sorted(batch) == whole
        for number in range(NUM_PASSES if step == 0 else 0):
            each = len(expected) // NUM_PASSES
            every = itertools.chain(*batches[number * each :][:each])
            assert sorted(every) == list(range(num_samples))


def test_on_one_rank_the_distributed_order_is_its_samplers_to_the_sample():
    data = torch.arange(13)
    sampler = DistributedSampler(data, 1, 0)
    sharded = af.shard_loader(
        DataLoader(data, 4, shuffle=True), af.DistState(seed=9), order="distributed"
    )
    for number in range(NUM_PASSES):
        sampler.set_epoch(number)
        theirs = DataLoader(data, 4, sampler=sampler)
        assert [batch.tolist() for batch in sharded] == [batch.tolist() for batch in theirs]


IN_PROCESSES = """
import json, torch
import accel_fn as af
from tests.laws.law08_torchs_order import Program

state = af.init(device="cpu", timeout_s=60)
# The other ranks have drawn something else.
torch.manual_seed(100 + state.rank)
program = Program(11, 3, [1, 2])
found, saved = program.part(state, None, 6)
rest, _ = program.part(state, saved, None)
say(json.dumps(found + rest))
"""


def test_real_processes_follow_the_draws_of_rank_0():
    said = launch(IN_PROCESSES, num_processes=3).splitlines()
    expected = Program(11, 3, [1, 2]).alone()
    assert [json.loads(line) for line in said] == [expected] * 3
