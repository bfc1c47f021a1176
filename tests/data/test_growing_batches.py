"""A batch size that grows during the run: computed by a batch sampler, on any number of ranks."""

from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader

import accel_fn as af
from accel_fn.testing import simulate

SIZE = 100


def size_after(updates):
    return 4 if updates < 6 else 8 if updates < 12 else 16


class Growing:
    """A batch sampler without a length: epochs have different numbers of batches."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.epoch))
        return iter(order.split(self.sizes()))

    def sizes(self):
        updates = 0
        for _ in range(self.epoch + 1):
            sizes = []
            while (left := SIZE - sum(sizes)) > 0:
                sizes.append(min(left, size_after(updates)))
                updates += 1
        return sizes


def of_epochs(num_epochs):
    """Return the batches of the loop by hand, as lists of numbers."""
    sampler, found = Growing(), []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        found += [batch.tolist() for batch in DataLoader(range(SIZE), batch_sampler=sampler)]
    return found


@pytest.mark.parametrize("since", [0, 5, 13, 14, 19])
@pytest.mark.parametrize(
    "world_size", [2, *[pytest.param(each, marks=pytest.mark.slow) for each in (1, 3)]]
)
def test_batches_grow_alike_on_all_ranks_and_in_a_resumed_run(world_size, since):
    def run(state):
        loader = af.shard_loader(DataLoader(range(SIZE), batch_sampler=Growing()), state)
        epochs = loader.epochs(3, since=replace(state, step=since))
        return [af.gather(batch, state).tolist() for epoch in epochs for batch in epoch]

    whole = of_epochs(3)
    assert [len(batch) for batch in whole[:16]] == [*[4] * 6, *[8] * 6, *[16] * 1, 12, 16, 16]
    assert simulate(run, world_size=world_size)[0] == whole[since:]
