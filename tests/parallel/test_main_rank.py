"""The main rank runs, prints and logs alone, or first; no rank hangs if it fails."""

import io
import logging
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import accel_fn as af
from accel_fn.errors import PeerError, WorldError
from accel_fn.testing import simulate
from tests.support.processes import launch

ALONE = af.DistState()


def test_what_main_runs_can_be_called_in_a_world_of_one_too():
    with pytest.raises(TypeError, match="on_main: fn must be a function, got 3"):
        af.on_main(3, ALONE)


def test_main_alone_runs_and_all_get_what_it_gives():
    ran = []

    def run(state):
        def job():
            ran.append(state.rank)
            return {"folder": "runs/1"}

        return af.on_main(job, state)

    assert simulate(run, world_size=3) == [{"folder": "runs/1"}] * 3
    assert ran == [0]


def test_main_alone_raises_and_all_get_what_it_raised():
    def run(state):
        with pytest.raises(FileNotFoundError, match="no data"):
            af.on_main(lambda: Path("/no data").read_text(), state)
        return state.rank

    assert simulate(run, world_size=3) == [0, 1, 2]


class UnpicklableError(Exception):
    """An error that pickle cannot restore from its arguments."""

    def __init__(self, first, second):
        super().__init__(first)


@pytest.mark.parametrize("world_size", [2])
def test_what_cannot_be_pickled_is_reported_on_all_ranks(world_size):
    def failing():
        raise UnpicklableError("a", "b")

    def run(state):
        kind = UnpicklableError if state.is_main else RuntimeError
        with pytest.raises(kind, match="a"):
            af.on_main(failing, state)
        with pytest.raises(RuntimeError, match="fn must return or raise what can be pickled"):
            af.on_main(lambda: lambda: 1, state)

    simulate(run, world_size=world_size)


@pytest.mark.parametrize("local", [False, True])
def test_the_main_rank_is_through_before_the_others_begin(local, tmp_path):
    def run(state):
        with af.main_first(state, local=local):
            found = (tmp_path / "cache").exists()
            if not found:
                (tmp_path / "cache").touch()
            return found

    assert simulate(run, world_size=3) == [False, True, True]


def on_two_machines(state):
    return replace(state, local_rank=state.rank % 2, local_world_size=2)


def test_the_first_rank_of_each_machine_goes_first_where_that_is_asked_for():
    done, lock = [], threading.Lock()

    def run(state):
        with af.main_first(on_two_machines(state), local=True), lock:
            done.append(state.rank)

    simulate(run, world_size=4)
    assert set(done[:2]) == {0, 2}
    assert set(done[2:]) == {1, 3}


def failing_on(culprit, error, state, **options):
    """Raise on one of the ranks that go first."""
    with af.main_first(state, **options):
        assert state.local_rank == 0, "a rank that waits must not run the body"
        if state.rank == culprit:
            raise error


@pytest.mark.parametrize("error", [OSError("no disk"), KeyboardInterrupt("now")], ids=repr)
def test_an_error_of_the_rank_that_goes_first_reaches_those_that_wait(error):
    def run(state):
        expected = type(error) if state.is_main else PeerError
        text = re.escape(
            str(error) if state.is_main else f"main_first: failed on rank 0: {error!r}"
        )
        with pytest.raises(expected, match=f"^{text}$"):
            failing_on(0, error, state)
        return af.reduce_sum(1, state)

    assert simulate(run, world_size=3) == [3, 3, 3]


def test_an_error_on_one_machine_is_raised_on_all():
    def run(state):
        with pytest.raises(OSError if state.rank == 2 else PeerError, match="no disk"):
            failing_on(2, OSError("no disk"), on_two_machines(state), local=True)
        return af.reduce_sum(1, state)

    assert simulate(run, world_size=4) == [4] * 4


def test_a_collective_inside_is_an_error_on_all_ranks():
    def run(state):
        with (
            pytest.raises(WorldError, match="every rank must be in the same collective"),
            af.main_first(state),
        ):
            af.barrier(state)
        return state.rank

    assert simulate(run, world_size=2) == [0, 1]


def test_local_is_a_flag():
    with (
        pytest.raises(TypeError, match="main_first: local must be True or False, got 1"),
        af.main_first(ALONE, local=1),
    ):
        pass


def test_a_world_of_one_runs_the_body_once():
    with af.main_first(ALONE):
        ran = True
    assert ran


def test_the_main_rank_prints_alone():
    def run(state):
        text = io.StringIO()
        af.print_on_main("rank", state.rank, state=state, sep="=", end=";", file=text, flush=True)
        return text.getvalue()

    assert simulate(run, world_size=3) == ["rank=0;", "", ""]


def test_a_logger_logs_on_the_main_rank_and_where_all_ranks_are_asked_for():
    def run(state):
        text = io.StringIO()
        logger = logging.Logger("train")
        logger.addHandler(logging.StreamHandler(text))
        for _ in range(2):  # twice is once
            assert af.main_logger(logger, state) is logger
        assert len(logger.filters) == (0 if state.is_main else 1)
        logger.warning("main")
        logger.warning("all", extra={"all_ranks": True})
        return text.getvalue().split()

    assert simulate(run, world_size=3) == [["main", "all"], ["all"], ["all"]]


def test_a_logger_is_one_of_the_standard_library():
    with pytest.raises(TypeError, match=r"main_logger: logger must be a logging\.Logger, got"):
        af.main_logger("train", ALONE)


IN_PROCESSES = """
import io, logging, pathlib
import accel_fn as af

with af.distributed(device="cpu") as state:
    path = pathlib.Path({folder!r}) / "cache"
    with af.main_first(state):
        found = path.exists()
        path.touch()
    try:
        with af.main_first(state):
            raise OSError("no disk")
    except (OSError, af.errors.PeerError) as error:
        kind = type(error).__name__
    text = io.StringIO()
    af.print_on_main("printed", state=state, file=text, end=" ")
    logger = af.main_logger(logging.getLogger("train"), state)
    logger.addHandler(logging.StreamHandler(text))
    logger.warning("logged")
    logger.warning("everywhere", extra={{"all_ranks": True}})
    flag = af.any_rank(state.rank == 1, state)
    say(state.rank, found, kind, flag, *text.getvalue().split())
"""


@pytest.mark.slow
def test_processes_follow_their_main_rank(tmp_path):
    launch(
        IN_PROCESSES.format(folder=str(tmp_path)),
        expect=[
            "0 False OSError True printed logged everywhere",
            "1 True PeerError True everywhere",
        ],
    )
