"""local_sgd: each rank trains like a loop by hand, and the mean equals the mean by hand."""

import copy

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate, strategies
from accel_fn.testing.internals import average_over_ranks
from tests.laws.law03_worlds import dealt_batches
from tests.support import strategies as ours
from tests.support.local_sgd_by_hand import copied, held, trained_apart_by_hand

few = ours.share(0.5)


def trained_apart(parts, recipe):
    """Train on simulated ranks; return what every rank holds after each batch, and its reports."""

    def run(state):
        model = ours.regression_model(seed=state.rank)  # `build` replaces it by rank 0's
        made = ours.adamw(model.parameters())
        state, step = af.build(recipe(af.Plan(ours.mse, model, made)), state)
        trace, reports = [], []
        for batch in parts[state.rank]:
            state, report = step(state, batch)
            trace.append(copied(held(model, made)))
            reports.append(report)
        return trace, reports

    return simulate(run, world_size=len(parts))


MASKED = {
    "inputs": torch.ones(4, 3, 3).double(),
    "labels": torch.tensor([[0, 1, -100], [2, 3, 0], [-100] * 3, [-100] * 3]),
}
"""The last two samples weigh nothing."""


@few
@given(
    dealt=dealt_batches(strategies.labelled_batches(), 4),
    num_microbatches=st.integers(1, 3),
)
@example(dealt=([MASKED] * 3, [[2, 2], [1, 3], [3, 1]]), num_microbatches=1)
@example(dealt=([MASKED] * 2, [[0, 2, 2]] * 2), num_microbatches=2)
def test_ranks_averaged_after_every_update_are_one_rank_for_any_weights(dealt, num_microbatches):
    """The weights count labels, and a rank may have none."""
    model, options = ours.token_model(), {"loss_fn": ours.token_loss, "optimizer": ours.sgd}
    recipe = af.compose(af.accumulate(num_microbatches), af.local_sgd(1))
    weight_fn = af.count_labels("labels")
    ranks = ours.trained(model, ours.dealt(*dealt), recipe, weight_fn=weight_fn, **options)
    ours.assert_trained(ranks, ours.trained_by_hand(model, dealt[0], **options))


@few
@given(
    dealt=dealt_batches(strategies.batches(num_batches=4), 4),
    every=st.integers(1, 3) | st.just(10),
    num_microbatches=st.integers(1, 3),
    max_norm=st.sampled_from([None, 0.5]),
)
def test_ranks_apart_and_their_means_are_those_by_hand(dealt, every, num_microbatches, max_norm):
    """Parameters and AdamW's state agree after every batch, clipped by the norm of each rank."""
    batches, sizes = dealt
    parts = ours.dealt(batches, sizes)
    clip = af.compose() if max_norm is None else af.clip(max_norm)
    recipe = af.compose(clip, af.local_sgd(every), af.accumulate(num_microbatches))
    expected = trained_apart_by_hand(parts, every, max_norm=max_norm)
    found = trained_apart(parts, recipe)
    for (trace, reports), by_hand in zip(found, expected, strict=True):
        for number, (actual, hand) in enumerate(zip(trace, by_hand, strict=True)):
            ours.assert_close(actual, hand)
            if (number + 1) % every == 0:  # after an average, all ranks hold the same bits
                ours.assert_identical(actual, found[0][0][number])
            told, first = reports[number], found[0][1][number]
            assert (float(told.loss), told.weight) == (float(first.loss), len(batches[number][0]))
    for number, cut in enumerate(sizes):
        own = [reports[number].extras.get("own_weight") for _, reports in found]
        assert own == (list(cut) if len(parts) > 1 else [None])


REAL = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@few
@given(
    values=st.lists(st.floats(width=16, allow_nan=False), min_size=1, max_size=5),
    dtype=st.sampled_from([*REAL, torch.complex64]),
    weights=st.lists(st.floats(0.0, 9.0, width=16), min_size=2, max_size=4),
)
@example(values=[0.1], dtype=torch.float64, weights=[1.0, 1.0, 1.0])
@example(values=[float("inf")], dtype=torch.float32, weights=[1.0, 0.0, 2.0])
def test_the_mean_of_equal_numbers_is_that_number_to_the_bit(values, dtype, weights):
    expected = (torch.tensor(values, dtype=torch.float64) / 3).to(dtype)

    def run(state):
        tensor = expected.clone()
        average_over_ranks({"it": tensor}, weights[state.rank], state)
        return tensor

    for actual in simulate(run, world_size=len(weights)):
        assert torch.equal(actual, expected)


@few
@given(
    seed=strategies.seeds(),
    dtype=st.sampled_from([*REAL, torch.complex64]),
    weights=st.lists(st.integers(0, 9), min_size=2, max_size=4),
)
def test_the_mean_counts_a_rank_by_its_weight(seed, dtype, weights):
    """The mean agrees to the rounding of the dtype, also for transposed tensors and in pieces."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(), (3, 2), (4,)]
    drawn = [[torch.rand(each, generator=generator).to(dtype) for each in shapes] for _ in weights]
    counted = weights if sum(weights) else [1] * len(weights)

    def run(state):
        scalar, matrix, row = copy.deepcopy(drawn[state.rank])
        matrix = matrix.t().contiguous().t()
        average_over_ranks({"a": scalar, "b": matrix, "c": row}, weights[state.rank], state)
        return scalar, matrix, row

    wide = torch.complex128 if dtype.is_complex else torch.float64
    # Values are below one: halves are rounded once, by a quarter of eps, wider dtypes in every
    # operation.
    factor = 0.26 if dtype in (torch.float16, torch.bfloat16) else 8
    tolerance = {"rtol": 0.0, "atol": factor * torch.finfo(dtype).eps}
    for found in simulate(run, world_size=len(weights)):
        for actual, tensors in zip(found, zip(*drawn, strict=True), strict=True):
            mean = sum(w * t.to(wide) for w, t in zip(counted, tensors, strict=True))
            torch.testing.assert_close(actual.to(wide), mean / sum(counted), **tolerance)


def test_a_rank_without_items_does_not_count_whatever_it_holds():
    def run(state):
        tensor = torch.full((2,), [float("nan"), 3.0, 5.0][state.rank])
        average_over_ranks({"it": tensor}, [0.0, 1.0, 1.0][state.rank], state)
        return tensor.tolist()

    assert simulate(run, world_size=3) == [[4.0, 4.0]] * 3


@pytest.mark.slow
def test_means_in_buckets_are_means_at_once():
    """Two of these tensors are too large to travel together."""
    sizes = 2**23 + 1, 2**23, 3

    def run(state):
        tensors = {
            str(size): torch.full((size,), float(state.rank), dtype=torch.bfloat16)
            for size in sizes
        }
        average_over_ranks(tensors, 1.0, state)
        return [each.unique().tolist() for each in tensors.values()]

    assert simulate(run, world_size=2) == [[[0.5]] * 3] * 2
