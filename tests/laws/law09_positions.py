"""Law 9 for loops by range: stopped after any batch, in any world, a run loses and repeats nothing."""

from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import accel_fn as af
from accel_fn.testing import simulate
from tests.support.streams import Counting, Sized

NUM_EPOCHS = 3
KINDS = {
    "shuffled": lambda size: {"dataset": range(size), "shuffle": True},
    "sampler": lambda size: {"dataset": range(size), "sampler": [*reversed(range(size))]},
    "stream": lambda size: {"dataset": Counting(size, shuffle=True)},
    "stream of known length": lambda size: {"dataset": Sized(size, shuffle=True)},
}


@dataclass
class Run:
    """A program that goes through a loader."""

    kind: str
    num_samples: int
    batch_size: int
    k: int
    prefetches: bool

    def loader(self, state):
        options = {**KINDS[self.kind](self.num_samples), "batch_size": self.batch_size}
        return af.shard_loader(DataLoader(**options), state)

    def view(self, loader, state):
        loader = af.group_batches(loader, self.k) if self.k > 1 else loader
        return af.prefetch(loader, state) if self.prefetches else loader

    def rows(self, batch, state):
        return [af.gather(each, state).tolist() for each in (batch if self.k > 1 else [batch])]

    def whole(self, state):
        epochs = self.view(self.loader(state), state).epochs(NUM_EPOCHS)
        return [self.rows(batch, state) for epoch in epochs for batch in epoch]

    def part(self, state, saved, num_batches):
        loader, found = self.loader(state), []
        if saved is not None:
            loader.load_state_dict(saved)
        for _ in range(loader.epoch, NUM_EPOCHS):
            for batch in self.view(loader, state):
                found.append(self.rows(batch, state))
                if len(found) == num_batches:
                    return found, loader.state_dict()
        return found, loader.state_dict()


@given(
    kind=st.sampled_from([*KINDS]),
    num_samples=st.integers(1, 20),
    batch_size=st.integers(1, 8),
    k=st.integers(1, 3),
    prefetches=st.booleans(),
    stops=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=4),
)
@example("shuffled", 20, 3, 1, True, [(2, 3), (3, 2)])
@example("stream", 9, 4, 1, False, [(2, 3), (1, 1)])  # stopped behind the last batch of a pass
def test_a_loop_by_range_that_stops_and_resumes_loses_and_repeats_nothing(
    kind, num_samples, batch_size, k, prefetches, stops
):
    """Each part of the run has another number of ranks, and ends after so many batches."""

    run = Run(kind, num_samples, batch_size, k, prefetches)
    saved, found = None, []
    for world_size, num_batches in [*stops, (2, None)]:
        ranks = simulate(
            lambda state, start=saved, most=num_batches: run.part(state, start, most),
            world_size=world_size,
        )
        assert all(each == ranks[0] for each in ranks)
        found += ranks[0][0]
        saved = ranks[0][1]
    assert found == simulate(run.whole, world_size=1)[0]
    assert saved["epoch"] == NUM_EPOCHS
