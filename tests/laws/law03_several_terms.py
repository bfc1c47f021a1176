"""A loss of several terms is the sum of their means over the global batch, each over its own items."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accel_fn as af
from tests.laws.law03_worlds import dealt_batches
from tests.support import strategies as ours
from tests.support.several_terms import NUM_PLACES, WEIGHTS, Detector, a_batch, by_hand, terms


@st.composite
def batches(draw):
    """Draw batches whose terms have any number of items, also none."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 6))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        inputs = torch.randn(size, NUM_PLACES, 2, generator=generator).double()
        marks = st.lists(st.booleans(), min_size=size * NUM_PLACES, max_size=size * NUM_PLACES)
        masks = [torch.tensor(draw(marks)).view(size, NUM_PLACES) for _ in WEIGHTS]
        found.append((inputs, *masks))
    return found


ONE_SIDED = [a_batch([0, 2, 1], [3, 0, 0])]
"""The samples of the first one are of one term alone, those of the others of the other."""


@pytest.mark.parametrize(
    "wrap",
    [
        af.wrap_ddp(),
        af.wrap_ddp(find_unused_parameters=True),
        af.wrap_fsdp(blocks=nn.Linear),
        pytest.param(
            af.wrap_fsdp(blocks=nn.Linear, reshard_after_forward=False), marks=pytest.mark.slow
        ),
    ],
    ids=["wrap_ddp", "find_unused", "wrap_fsdp", "kept_whole"],
)
@ours.share(0.3)
@given(dealt=dealt_batches(batches(), 3), num_microbatches=st.integers(1, 3))
@example(dealt=(ONE_SIDED, [[1, 2]]), num_microbatches=1)
@example(dealt=(ONE_SIDED, [[0, 1, 2]]), num_microbatches=2)
@example(dealt=([a_batch([0, 0], [1, 0])], [[2, 0]]), num_microbatches=2)
def test_ranks_and_microbatches_are_one_process_and_one_batch(wrap, dealt, num_microbatches):
    found, sizes = dealt
    recipe = af.compose(af.accumulate(num_microbatches), wrap)
    options = {"loss_fn": terms, "weight_fn": WEIGHTS}
    ranks = ours.trained(Detector(), ours.dealt(found, sizes), recipe, **options)
    ours.assert_trained(ranks, ours.trained_by_hand(Detector(), found, loss_fn=by_hand))
