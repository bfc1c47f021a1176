"""Worlds whose ranks do not all come: reports with lines of code, an end in time, no garbage.

Each case is a world of two real processes; several run at once.
"""

import re
import textwrap

import pytest

from accel_fn.testing.internals import HANG_EXIT_CODE
from tests.support.forked_ranks import line_of, run_worlds

TIMEOUT_S = 3
TRAINING = """
import threading, time, torch
import accel_fn as af

os.environ["ACCEL_FN_TIMEOUT_S"] = "60"
joined = af.init(device="cpu")  # on a busy machine, ranks come to each other late
state = af.init(device="cpu", timeout_s=3)
model = torch.nn.Linear(3, 1)
plan = af.Plan(lambda model, batch: model(batch).mean(), model, torch.optim.SGD(model.parameters(), lr=0.1))
state, step = af.build(af.wrap_ddp()(plan), state)
batch = torch.ones(4, 3) + state.rank
af.barrier(state)
"""
CASES = {
    "gather_on_one": """
        mark()
        if state.rank == 0:
            af.gather({"rows": torch.ones(5, 3), "ids": torch.arange(5)}, state)  # alone
        time.sleep(600)  # elsewhere
    """,
    "four_steps_against_three_that_leaves": """
        mark()
        for _ in range(4 - state.rank):
            state, _ = step(state, batch)  # steps
    """,
    "four_steps_against_three_and_an_evaluation": """
        mark()
        for _ in range(4 - state.rank):
            state, _ = step(state, batch)  # steps
        if state.rank:
            print(float(step.forward(state, batch)))  # evaluates
    """,
    "a_rank_that_comes_to_three_steps_of_four": """
        mark()
        for number in range(4):
            if number == 3 and state.rank:
                time.sleep(600)  # elsewhere
            state, _ = step(state, batch)  # steps
    """,
    "an_exception_on_one": """
        mark()
        if state.rank:
            raise ValueError("of rank 1 alone")  # raises
        af.barrier(state)  # waits
    """,
    "an_abort_in_native_code": """
        mark()
        if state.rank:
            os.abort()  # aborts
        af.barrier(state)  # waits
    """,
    "a_wait_that_no_backend_ends": """
        mark()
        if state.rank == 0:
            with state.watchdog.enter("gather", [batch]):  # enters
                time.sleep(600)  # waits
        time.sleep(600)  # elsewhere
    """,
    "long_computations_alone": """
        mark()
        time.sleep(4)
        af.barrier(state)
        if state.rank:
            time.sleep(4)  # when rank 0 has left long ago
    """,
}
SCRIPTS = {name: TRAINING + textwrap.dedent(script) for name, script in CASES.items()}
LAUNCHED = "a_launch_with_a_timeout"
SCRIPTS[LAUNCHED] = """
import os, time, torch
import accel_fn as af

os.environ["ACCEL_FN_TIMEOUT_S"] = "7"
state = af.init(device="cpu")
mark()
if state.rank == 0:
    af.barrier(state)  # waits
time.sleep(600)  # elsewhere
"""


@pytest.fixture(scope="module")
def worlds(tmp_path_factory, request):
    """Run the worlds of the tests that were chosen."""
    folder = tmp_path_factory.mktemp("worlds")
    chosen = {
        each.callspec.params["ended"] for each in request.session.items if each.path == request.path
    }
    return folder, run_worlds({name: SCRIPTS[name] for name in chosen}, folder)


@pytest.fixture
def ended(worlds, request):
    """Return the ranks of the world that a test is named for, and the line of a text in its
    script."""
    folder, ends = worlds
    name = request.param

    def place(text):
        return f"{folder / name}.py:{line_of(SCRIPTS[name], text)} in <module>"

    return ends[name], place


def of(*names):
    """Give a test the ends of its worlds; all but one are slow."""
    cases = [
        pytest.param(name, marks=[] if name == "gather_on_one" else pytest.mark.slow)
        for name in names
    ]
    return pytest.mark.parametrize("ended", cases, indirect=True)


def in_stack(place):
    path, _, rest = place.partition(":")
    return f'File "{path}", line {rest.split()[0]}, in <module>\n'


def assert_reports(ranks, *texts, timeout_s=TIMEOUT_S):
    """Assert that every rank reports once, in time, and that each report holds all of these
    texts."""
    for rank, end in enumerate(ranks):
        assert end.exit_code == HANG_EXIT_CODE, end.stderr
        assert end.stderr.count("accel_fn: rank") == 1, end.stderr
        assert f"accel_fn: rank {rank} of 2 (" in end.stderr
        assert [text for text in texts if text not in end.stderr] == [], end.stderr
        assert end.seconds < timeout_s + 5


def assert_shows(end, *texts):
    """Assert that a rank whose peer has left ends in time, with all of these texts on stderr."""
    assert end.exit_code in (1, HANG_EXIT_CODE), end.stderr
    assert [text for text in texts if text not in end.stderr] == [], end.stderr
    assert end.seconds < TIMEOUT_S + 5


@of("gather_on_one")
def test_a_collective_on_one_rank_is_reported_by_all_with_its_shapes_and_lines(ended):
    ranks, place = ended
    waits = f"in collective 6, gather of float32 [5, 3], int64 [5], at {place('# alone')}"
    works = f"at {place('# elsewhere')}; last collective 5, barrier, at {place('af.barrier')}"
    assert_reports(ranks, f"  rank 0: {waits}\n", f"  rank 1: {works}\n")
    assert "gather has waited for longer than timeout_s=3\n" in ranks[0].stderr
    assert "another rank has waited for too long\n" in ranks[1].stderr
    assert in_stack(place("# alone")) in ranks[0].stderr
    assert in_stack(place("# elsewhere")) in ranks[1].stderr
    assert ranks[1].stderr.endswith("time.sleep(600)  # elsewhere\n")


@of("four_steps_against_three_and_an_evaluation")
def test_numbers_of_another_collective_are_never_taken_for_gradients(ended):
    ranks, _ = ended
    rule = "step: every rank must be in the same collective, got"
    for end in ranks:
        assert end.exit_code == 1, end.stderr
        # Rank 0 waits in a backward of DDP, and reads the rule in the report of rank 1.
        assert f"{rule} losses 4 on rank 0 and weights forward 4 on rank 1" in end.stderr
    assert len(ranks[1].stdout.splitlines()) == 1  # only the mark


@of("four_steps_against_three_that_leaves")
def test_a_rank_that_has_left_is_named_with_its_last_step(ended):
    (waits, left), place = ended
    assert (left.exit_code, left.stderr) == (0, "")
    at = place("# steps")
    number = int(re.search(r"rank 0: .* last collective (\d+), step", waits.stderr)[1])
    assert_shows(
        waits,
        f"  rank 0: at {at}; in step 4, backward; last collective {number}, step of float64 [5], at {at}\n",
        f"  rank 1: has left; last step 3, at {at}; "
        f"last collective {number - 1}, step of float64 [5], at {at}\n",
    )


@of("a_rank_that_comes_to_three_steps_of_four")
def test_a_wait_in_a_backward_of_ddp_is_reported_by_all(ended):
    """Gloo ends one of the two collectives that wait by a time-out, and the other one with it."""
    ranks, place = ended
    steps = place("# steps")
    assert_reports(
        ranks,
        f"  rank 0: at {steps}; in step 4, backward; ",
        f"  rank 1: at {place('# elsewhere')}; ",
    )


@of("an_exception_on_one")
def test_if_a_rank_raises_the_others_report_its_error_and_their_own_line(ended):
    (waits, raised), place = ended
    assert raised.exit_code == 1
    assert in_stack(place("# raises")) in raised.stderr
    assert "ValueError: of rank 1 alone\n" in raised.stderr
    assert_shows(
        waits,
        f"  rank 0: in collective 6, barrier, at {place('# waits')}\n",
        "  rank 1: has left by ValueError: of rank 1 alone; last collective 5, barrier, at ",
    )


@of("an_abort_in_native_code")
def test_a_crash_in_native_code_shows_the_line_that_called_it(ended):
    (waits, crashed), place = ended
    assert crashed.exit_code == -6
    path, _, rest = place("# aborts").partition(":")
    assert f'File "{path}", line {rest.split()[0]} in <module>' in crashed.stderr
    assert_shows(
        waits,
        f"  rank 0: in collective 6, barrier, at {place('# waits')}\n",
        "  rank 1: no entry; killed, or not here yet\n",
    )


@of("a_wait_that_no_backend_ends")
def test_a_wait_that_no_backend_ends_is_ended_all_the_same(ended):
    ranks, place = ended
    waits = f"in collective 6, gather of float32 [4, 3], at {place('# enters')}"
    assert_reports(ranks, f"  rank 0: {waits}\n", f"  rank 1: at {place('# elsewhere')}; last ")
    assert in_stack(place("# waits")) in ranks[0].stderr


@of(LAUNCHED)
def test_the_timeout_of_the_launch_is_that_of_init_where_it_is_given_none(ended):
    ranks, place = ended
    waits = f"  rank 0: in collective 1, barrier, at {place('# waits')}\n"
    assert_reports(ranks, waits, f"  rank 1: at {place('# elsewhere')}; no ", timeout_s=7)
    assert "barrier has waited for longer than timeout_s=7\n" in ranks[0].stderr


@of("long_computations_alone")
def test_long_computations_are_nobodys_concern_while_nobody_waits(ended):
    for end in ended[0]:
        assert (end.exit_code, end.stderr) == (0, "")
