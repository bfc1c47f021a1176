"""If data fail on one of several real processes in an evaluation, each ends at once and reports
why."""

import re

import pytest

from tests.support.forked_ranks import run_worlds

SCRIPT = """
import os, signal
from functools import partial
import accel_fn as af
from tests.data import test_failing_data as ours

def main():
    state = af.init(device="cpu", timeout_s=600)

    def act(number):
        if state.rank == {fails} and number >= 20:
            mark()
            {ending}

    make = partial(ours.{talker}, ours.in_data, num_workers={num_workers})
    loader = ours.sharded(make, act, state, ahead={ahead})
    state, step = ours.make_step(state)
    try:
        af.evaluate(step, state, loader)
    except (ValueError, RuntimeError) as error:
        os.write(2, str(error).encode())

main()
"""
RAISES = 'raise ValueError("rotten")'
DIES = "os.kill(os.getpid(), signal.SIGKILL)"
CASES = [("own_sampler", 0, True), ("split_stream", 1, False)]


def worlds(ending, num_workers):
    """Return the scripts by name, with the rank that fails in each."""
    return {
        f"{talker}_{fails}_{ahead}": SCRIPT.format(
            talker=talker, fails=fails, ahead=ahead, ending=ending, num_workers=num_workers
        )
        for talker, fails, ahead in CASES
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "num_workers", "there", "elsewhere"),
    [
        (RAISES, 0, "rotten", r"ValueError\('rotten'\)"),
        (DIES, 1, "killed by SIGKILL", "WorkerError.*killed by SIGKILL"),
    ],
    ids=["raises", "dies"],
)
def test_all_ranks_raise_where_the_data_of_one_fail(
    ending, num_workers, there, elsewhere, tmp_path
):
    for name, ranks in run_worlds(worlds(ending, num_workers), tmp_path).items():
        fails = int(name.split("_")[2])
        assert [rank.exit_code for rank in ranks] == [0, 0], name
        assert there in ranks[fails].stderr
        assert re.search(f"failed on rank {fails}: {elsewhere}", ranks[1 - fails].stderr)
        assert max(rank.seconds for rank in ranks) < 150  # the group's timeout is 600
