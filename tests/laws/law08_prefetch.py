"""Law: prefetching changes neither batches nor positions, wherever a run stops and resumes."""

from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import accel_fn as af
from accel_fn.testing import simulate

NUM_EPOCHS = 2


@given(
    num_samples=st.integers(1, 30),
    batch_size=st.integers(1, 8),
    world_size=st.integers(1, 3),
    depth=st.integers(1, 5),
    stops=st.lists(st.integers(1, 12), max_size=4),
)
@example(num_samples=20, batch_size=3, world_size=2, depth=4, stops=[3, 3])
def test_a_run_that_stops_and_continues_loses_and_repeats_nothing(
    num_samples, batch_size, world_size, depth, stops
):
    """The run stops after some batches each time, and resumes from its state."""

    def run(state):
        def loader():
            data = DataLoader(range(num_samples), batch_size=batch_size, shuffle=True)
            return af.shard_loader(data, state)

        found = []
        for num_batches in [*stops, None]:
            ahead = af.prefetch(loader(), state, depth)
            for epoch, batch in batches(ahead.epochs(NUM_EPOCHS, since=state), num_batches):
                found.append((epoch, batch.tolist()))
                state = state.advanced(None, 0, 0)
        whole = [(each.index, b.tolist()) for each in loader().epochs(NUM_EPOCHS) for b in each]
        return found, whole

    for found, whole in simulate(run, world_size=world_size):
        assert found == whole


def batches(epochs, at_most):
    count = 0
    for epoch in epochs:
        for batch in epoch:
            yield epoch.index, batch
            count += 1
            if count == at_most:
                return
