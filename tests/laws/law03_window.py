"""Law: a step over a window is the step over its batches joined, on any number of ranks."""

import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours


def data(num_samples):
    generator = torch.Generator().manual_seed(num_samples)
    return TensorDataset(
        torch.randn(num_samples, 3, generator=generator).double(),
        torch.randn(num_samples, 1, generator=generator).double(),
    )


@given(
    num_samples=st.integers(1, 30),
    batch_size=st.integers(1, 9),
    k=st.integers(1, 4),
    world_size=st.integers(1, 3),
    prefetched=st.booleans(),
)
@example(num_samples=13, batch_size=4, k=3, world_size=2, prefetched=False)
def test_training_over_windows_is_training_over_joined_batches(
    num_samples, batch_size, k, world_size, prefetched
):
    samples = data(num_samples)

    def run(state):
        recipe = af.compose(af.wrap_ddp(), af.accumulate(k, split=None), af.clip(0.5))
        state, step = ours.built(recipe, state, optimizer=ours.adamw)
        loader = af.shard_loader(DataLoader(samples, batch_size=batch_size, shuffle=True), state)
        loader = af.group_batches(loader, k)
        joined = []
        for epoch in (af.prefetch(loader, state) if prefetched else loader).epochs(2, since=state):
            for number, batch in enumerate(epoch):
                joined.append(loader.global_indices(epoch.index, number))
                state, _ = step(state, batch)
        return step.plan.model.state_dict(), joined, state.step

    results = simulate(run, world_size=world_size)
    joined = [samples[indices] for indices in results[0][1]]
    assert sum(len(batch[0]) for batch in joined) == 2 * num_samples
    _, expected = ours.trained_by_hand(ours.regression_model(), joined, max_norm=0.5)
    for parameters, _, num_steps in results:
        ours.assert_close(parameters, expected)
        assert num_steps == len(joined)


def node_loss(model, batch):
    """Return the mean over the nodes of graphs of any size, which have no common leading
    dimension."""
    losses = [F.mse_loss(model(nodes).mean(0), nodes.sum(1)[:1]) * len(nodes) for nodes in batch]
    return sum(losses) / count_nodes(batch)


def count_nodes(batch):
    return sum(len(nodes) for nodes in batch)


@st.composite
def windows_of_graphs(draw):
    """Draw for each rank and step a list of batches of graphs; at least one rank has a batch."""
    world_size = draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    batch = st.lists(st.integers(1, 4), min_size=1, max_size=3)  # numbers of nodes
    steps = draw(
        st.lists(
            st.tuples(
                *[st.lists(batch, min_size=int(r == 0), max_size=3) for r in range(world_size)]
            ),
            min_size=1,
            max_size=3,
        )
    )
    return [
        [
            [[torch.randn(n, 3, generator=generator).double() for n in sizes] for sizes in window]
            for window in windows
        ]
        for windows in steps
    ]


@ours.share(0.5)
@given(steps=windows_of_graphs())
@example(steps=[[[[torch.ones(2, 3).double()]] * 3, [], [[torch.ones(5, 3).double()]]]])
def test_ranks_may_hold_any_number_of_batches_that_cannot_be_cut(steps):
    joined = [
        [nodes for window in windows for batch in window for nodes in batch] for windows in steps
    ]
    expected = ours.trained_by_hand(ours.regression_model(), joined, loss_fn=node_loss)
    ranks = ours.trained(
        ours.regression_model(),
        [[windows[rank] for windows in steps] for rank in range(len(steps[0]))],
        af.compose(af.place(), af.wrap_ddp(), af.accumulate(3, split=None)),
        loss_fn=node_loss,
        weight_fn=count_nodes,
    )
    ours.assert_trained(ranks, expected)
