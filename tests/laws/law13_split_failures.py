"""Law 13: where a model is split, a stop or a failure on any one rank is known on all of them."""

import json

import pytest

import accel_fn as af
from accel_fn.testing import simulate
from tests.laws.law13_meshes import SQUARE, four_batches
from tests.support import on_one_rank
from tests.support import strategies as ours
from tests.support.processes import from_lists, launch
from tests.support.runs_on_meshes import STYLES, perceptron

WRAPS = {"wrap_ddp": af.wrap_ddp(), "wrap_fsdp": af.wrap_fsdp()}
BATCH = four_batches()[0]


def learned(state, wrap, ranks):
    recipe = af.compose(WRAPS[wrap], af.wrap_tp(STYLES))
    return on_one_rank.learned(
        state, recipe, BATCH, ranks, model=perceptron(), optimizer=ours.adamw
    )


def assert_known(results, ranks):
    """Compare what ranks learn, and their parameters with as many updates in one process."""
    _, expected = ours.trained_by_hand(perceptron(), [BATCH] * 2 * len(ranks))
    for rank, (found, parameters) in enumerate(results):
        assert found == on_one_rank.expected(rank, ranks)
        ours.assert_close(parameters, expected)


@pytest.mark.parametrize("wrap", ["wrap_ddp", pytest.param("wrap_fsdp", marks=pytest.mark.slow)])
def test_a_stop_and_a_failure_before_the_first_forward_on_any_rank_are_known_on_all(wrap):
    ranks = range(4)
    assert_known(simulate(lambda state: learned(state, wrap, ranks), mesh=SQUARE), ranks)


SCRIPT = """
import json
import accel_fn as af
from tests.laws.law13_split_failures import SQUARE, WRAPS, learned

for wrap in WRAPS:
    with af.distributed(device="cpu", timeout_s=60, mesh=SQUARE) as state:
        found, ends = learned(state, wrap, range(4))
        ends = {name: each.tolist() for name, each in ends.items()}
        say(json.dumps([state.rank, wrap, found, ends]))
"""


@pytest.mark.slow
def test_a_stop_and_a_failure_on_any_one_of_four_processes_are_known_on_all():
    said = [json.loads(line) for line in launch(SCRIPT, num_processes=4).splitlines()]
    for wrap in WRAPS:
        of_wrap = sorted(each for each in said if each[1] == wrap)
        results = [(found, from_lists(ends)) for _, _, found, ends in of_wrap]
        assert len(results) == 4
        assert_known(results, range(4))
