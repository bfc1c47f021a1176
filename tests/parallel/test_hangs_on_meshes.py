"""Reports of four processes on a mesh, of which two wait along an axis."""

import pytest

from accel_fn.testing.internals import HANG_EXIT_CODE
from tests.support.forked_ranks import line_of, run_worlds

START = """
import time, torch
import accel_fn as af

os.environ["ACCEL_FN_TIMEOUT_S"] = "60"
joined = af.init(device="cpu")  # on a busy machine, ranks come to each other late
state = af.init(device="cpu", timeout_s=3, mesh={"dp": 2, "tp": 2})
af.gather(torch.ones(2), state, axis="tp")
mark()
"""
HANGS = """
if state.rank == 3:
    time.sleep(600)  # elsewhere
af.gather(torch.ones(5), state, axis="tp")  # waits
af.barrier(state)  # in the world
"""
LEAVES = """
if state.rank == 3:
    os._exit(3)
af.gather(torch.ones(5), state, axis="tp")  # waits
say("done")
"""


def world(script, tmp_path):
    (ranks,) = run_worlds({"script": START + script}, tmp_path, num_processes=4).values()

    def place(text):
        return f"{tmp_path / 'script'}.py:{line_of(START + script, text)} in <module>"

    return ranks, place


@pytest.mark.slow
def test_ranks_that_hang_along_an_axis_are_named_with_their_places(tmp_path):
    ranks, place = world(HANGS, tmp_path)
    last = "last collective 2 along tp, gather of "
    lines = [
        f"  ranks 0-1 (dp 0): in collective 2, barrier, at {place('# in the world')}\n",
        f"  rank 2 (dp 1, tp 0): in collective 3 along tp, gather of float32 [5], at {place('# waits')}\n",
        f"  rank 3 (dp 1, tp 1): at {place('# elsewhere')}; {last}",
    ]
    for rank, end in enumerate(ranks):
        assert end.exit_code == HANG_EXIT_CODE, end.stderr
        assert f"accel_fn: rank {rank} (dp {rank // 2}, tp {rank % 2}) of 4 (" in end.stderr
        assert [line for line in lines if line not in end.stderr] == [], end.stderr


@pytest.mark.slow
def test_a_rank_that_is_gone_concerns_the_ranks_of_its_group_alone(tmp_path):
    ranks, place = world(LEAVES, tmp_path)
    assert [end.stdout.count("done") for end in ranks] == [1, 1, 0, 0]
    assert [end.exit_code for end in ranks] == [0, 0, 1, 3]
    rule = "gather: every rank along tp must stay until all have finished, got one that is gone\n"
    waits = f"  rank 2 (dp 1, tp 0): in collective 3 along tp, gather of float32 [5], at {place('# waits')}\n"
    missing = "  rank 3 (dp 1, tp 1): no entry; killed, or not here yet\n"
    error = ranks[2].stderr.replace("[rank2]: ", "")  # of torch
    assert rule + waits + missing in error
    assert "dp 0" not in error
