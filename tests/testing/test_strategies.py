"""The public strategies draw what their docstrings state."""

import torch
from hypothesis import find, given
from hypothesis import strategies as st

from accel_fn.testing import strategies


@given(world_size=strategies.world_sizes(3), count=strategies.microbatch_counts(5), data=st.data())
def test_counts_begin_at_one_and_parts_add_up(world_size, count, data):
    assert 1 <= world_size <= 3
    assert 1 <= count <= 5
    parts = data.draw(strategies.uneven_parts(7, world_size))
    assert (len(parts), sum(parts)) == (world_size, 7)
    assert min(parts) >= 0


@given(seed=strategies.seeds())
def test_every_generator_takes_a_seed(seed):
    assert torch.Generator().manual_seed(seed).initial_seed() == seed


@given(
    batches=strategies.batches(num_features=2, num_batches=3, max_samples=5, dtype=torch.float32)
)
def test_batches_are_inputs_and_targets_of_some_samples(batches):
    assert 1 <= len(batches) <= 3
    for inputs, targets in batches:
        assert 1 <= len(inputs) <= 5
        assert (inputs.shape[1:], targets.shape) == ((2,), (len(inputs), 1))
        assert (inputs.dtype, targets.dtype) == (torch.float32, torch.float32)
        assert inputs.isfinite().all()


@given(
    batches=strategies.labelled_batches(
        num_features=2, num_classes=3, num_batches=2, max_samples=2, sequence_length=1
    )
)
def test_of_labelled_batches_one_label_at_least_counts(batches):
    assert 1 <= len(batches) <= 2
    for batch in batches:
        num_samples = len(batch["labels"])
        assert 1 <= num_samples <= 2
        assert (batch["inputs"].shape, batch["inputs"].dtype) == (
            (num_samples, 1, 2),
            torch.float64,
        )
        assert (batch["labels"].shape, batch["labels"].dtype) == ((num_samples, 1), torch.int64)
        counted = batch["labels"][batch["labels"] != -100]
        assert len(counted) > 0
        assert set(counted.tolist()) <= {0, 1, 2}


@given(weights=strategies.weights(6, max_weight=2.0, dtype=torch.float32))
def test_of_weights_one_at_least_counts_and_none_is_near_zero(weights):
    assert (weights.shape, weights.dtype) == ((6,), torch.float32)
    assert weights.sum() > 0
    assert ((weights == 0) | ((weights >= 0.25) & (weights <= 2))).all()


def test_a_part_may_weigh_nothing_and_a_rank_may_be_empty():
    assert find(strategies.weights(4), lambda weights: weights[:2].sum() == 0) is not None
    assert find(strategies.uneven_parts(4, 3), lambda parts: 0 in parts) is not None
