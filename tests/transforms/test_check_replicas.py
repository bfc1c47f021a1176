"""check_replicas: what a fingerprint distinguishes."""

import pytest
import torch

import accel_fn as af
from accel_fn.parallel.same_on_all_ranks import fingerprints
from accel_fn.testing import simulate
from tests.laws.law14_replicas import BATCH
from tests.support import strategies as ours


def test_rows_in_other_places_are_found():
    def run(state):
        model = ours.regression_model()
        plan = af.Plan(ours.mse, model, torch.optim.SGD(model.parameters(), lr=0.0))
        state, step = af.build(af.compose(af.wrap_ddp(), af.check_replicas(1))(plan), state)
        if state.rank:
            with torch.no_grad():
                model[0].weight.copy_(model[0].weight.flip(0).clone())
        with pytest.raises(RuntimeError, match=r"at step 1, 0\.weight differs on rank 1;"):
            step(state, BATCH)

    simulate(run, world_size=2)


def signs(*places, dtype, size=12):
    ones = torch.ones(size, dtype=dtype)
    ones[list(places)] = -1
    return ones


PIECE = 2**17
"""Numbers of float32 that are summed at once on a CPU, or a multiple."""
MOVED = {
    "float64": (signs(1, dtype=torch.float64), signs(2, dtype=torch.float64)),
    "complex64": (signs(1, dtype=torch.complex64), signs(2, dtype=torch.complex64)),
    "float16": (signs(0, dtype=torch.float16), signs(11, dtype=torch.float16)),
    "int8": (signs(3, dtype=torch.int8), signs(5, dtype=torch.int8)),
    "two for two": (signs(0, 3, dtype=torch.float32), signs(1, 2, dtype=torch.float32)),
    "piece for piece": (
        signs(*range(PIECE), dtype=torch.float32, size=3 * PIECE),
        signs(*range(PIECE, 2 * PIECE), dtype=torch.float32, size=3 * PIECE),
    ),
    "sparse": (torch.tensor([1.0, 0.0]).to_sparse(), torch.tensor([0.0, 1.0]).to_sparse()),
}


@pytest.mark.parametrize("pair", MOVED.values(), ids=MOVED)
def test_numbers_in_other_places_have_another_fingerprint(pair):
    first, second = fingerprints(pair)
    assert first != second
    assert [first, second] == fingerprints([each.clone() for each in pair])


def test_how_often_is_a_number_of_steps():
    with pytest.raises(ValueError, match="check_replicas: every must be an integer >= 1, got 0"):
        af.check_replicas(0)
