"""accumulate("auto"): if any rank runs out of memory, all repeat the batch, and nothing else
changes."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import strategies
from tests.laws.law07_scaling import scaled
from tests.support import strategies as ours
from tests.support.out_of_memory import checked

pytestmark = [
    pytest.mark.filterwarnings("ignore:step. model should write the same in its forward"),
    pytest.mark.filterwarnings("ignore:step. loss_fn should return the mean"),
]

BATCHES = [
    (torch.tensor([[1.5410, -0.2934, -2.1788]]).double(), torch.tensor([[0.5684]]).double()),
    (
        torch.tensor(
            [[-1.0845, -1.3986, 0.4033], [0.8380, -0.7193, -0.4033], [-0.5966, 0.1820, -0.8567]]
        ).double(),
        torch.tensor([[1.1006], [-1.0712], [0.1227]]).double(),
    ),
]
"""Batches of different weights, for which a division by 1, then by 3, rounds otherwise."""


@ours.share(0.32)
@given(
    batches=strategies.batches(num_batches=3),
    world_size=st.sampled_from([1, 2, 4]),
    culprit=st.integers(0, 3),
    limit=st.integers(1, 4),
    where=st.sampled_from(["before", "after", "backward"]),
    recipe=st.sampled_from([af.compose(), af.clip(0.1), scaled(8.0, growth_interval=2)]),
)
@example(batches=BATCHES, world_size=2, culprit=0, limit=1, where="before", recipe=af.compose())
def test_it_is_the_run_that_had_as_many_micro_batches_from_the_start_to_the_bit(
    batches, world_size, culprit, limit, where, recipe
):
    parts = ours.dealt_evenly(batches, world_size)
    counts, _ = checked(parts, culprit % world_size, limit, where, recipe)
    assert counts == sorted(counts)
    mine = [len(part[0]) for part in parts[culprit % world_size]]
    largest = max(-(-size // count) for size, count in zip(mine, counts, strict=True))
    assert largest <= limit
