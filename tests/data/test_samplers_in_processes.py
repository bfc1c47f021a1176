"""Users' samplers over real processes whose global random numbers differ."""

import json
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from tests.support.processes import launch

pytestmark = pytest.mark.slow

SIZE, BATCH_SIZE, NUM_EPOCHS = 32, 6, 3


class Drawn:
    """A sampler that draws its order from the global generators."""

    def __iter__(self):
        shift = random.randrange(SIZE) + np.random.randint(SIZE)
        return iter([(index + shift) % SIZE for index in torch.randperm(SIZE).tolist()])


def passes(state, num_workers, since=None):
    """Return the samples that this rank gets, epoch by epoch."""
    data = TensorDataset(torch.arange(SIZE))
    given = DataLoader(data, sampler=Drawn(), batch_size=BATCH_SIZE, num_workers=num_workers)
    epochs = af.shard_loader(given, state).epochs(NUM_EPOCHS, since=since)
    return [[batch[0].tolist() for batch in epoch] for epoch in epochs]


SCRIPT = """
import json, random
import numpy, torch
import accel_fn as af
from tests.data.test_samplers_in_processes import passes

state = af.init(device="cpu", timeout_s=60, seed=5)
random.seed(state.rank)
numpy.random.seed(state.rank)
torch.manual_seed(state.rank)
whole = passes(state, num_workers={num_workers})
rest = passes(state, num_workers={num_workers}, since=af.DistState(step=7))
before = torch.rand(1).item()
torch.manual_seed(state.rank)
say(json.dumps([state.rank, whole, rest, before == torch.rand(1).item()]))
"""


@pytest.mark.parametrize(("num_processes", "num_workers"), [(2, 2), (3, 0)])
def test_the_order_is_that_of_one_process(num_processes, num_workers):
    """No sample is lost or doubled, and no rank's own random numbers are used."""
    alone = passes(af.DistState(seed=5), 0)
    assert [sorted(each for batch in epoch for each in batch) for epoch in alone] == [
        list(range(SIZE))
    ] * NUM_EPOCHS
    said = launch(SCRIPT.format(num_workers=num_workers), num_processes=num_processes)
    ranks = sorted(json.loads(line) for line in said.splitlines())
    assert [rank for rank, *_ in ranks] == list(range(num_processes))
    assert joined([whole for _, whole, _, _ in ranks]) == alone
    assert joined([rest for _, _, rest, _ in ranks]) == after(alone, 7)
    assert all(untouched for *_, untouched in ranks)


def joined(ranks):
    """Join global batches, epoch by epoch."""
    return [
        [[each for part in parts for each in part] for parts in zip(*epochs, strict=True)]
        for epochs in zip(*ranks, strict=True)
    ]


def after(epochs, step):
    """Leave out the first `step` batches, and the epochs before them."""
    rest = []
    for epoch in epochs:
        if step < len(epoch):
            rest.append(epoch[step:])
        step = max(0, step - len(epoch))
    return rest
