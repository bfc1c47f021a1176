"""The failure that caused the others, and the report of all failures."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_fn.launcher.failures import Failure, cause, read_failure, report

RAISED = {"exit_code": 1, "exception": "ValueError: boom\n"}
LOST = {"exit_code": 1, "exception": "RuntimeError: Connection closed by peer [10.0.0.1]:1\n"}
TOLD = {
    "exit_code": 1,
    "exception": "accel_fn.errors.PeerError: save: failed on rank 9: ValueError('boom')\n",
}
KILLED, ABORTED, STOPPED = {"exit_code": -9}, {"exit_code": -6}, {"exit_code": -15, "stopped": True}
GAVE_UP = {"exit_code": 7}


def failure(rank=0, time=1.0, **how):
    return Failure(rank=rank, host="node", pid=100 + rank, time=time, **how)


@pytest.mark.parametrize(
    ("first", "others"),
    [
        (KILLED, [LOST, ABORTED, STOPPED]),
        (RAISED, [LOST, TOLD, ABORTED, GAVE_UP, STOPPED]),
        (GAVE_UP, [LOST, STOPPED]),
        (ABORTED, [LOST, STOPPED]),
        (LOST, [STOPPED]),
    ],
    ids=["killed", "raised", "exit code", "aborted", "lost a peer"],
)
def test_a_rank_that_lost_a_peer_is_not_the_cause_even_if_it_ended_first(first, others):
    failures = [failure(rank, time=rank, **how) for rank, how in enumerate(others)]
    expected = failure(9, time=9, **first)
    assert cause([*failures, expected]) is cause([expected, *failures]) is expected


@given(st.permutations(range(5)), st.sampled_from([RAISED, LOST, KILLED, GAVE_UP]))
def test_of_one_kind_it_is_the_earliest(times, how):
    failures = [failure(rank, time, **how) for rank, time in enumerate(times)]
    assert cause(failures).time == 0


@pytest.mark.parametrize(
    ("how", "status", "last_line"),
    [
        (RAISED, 1, "ValueError: boom"),
        ({"exit_code": 3, "exception": "exit code 3\n"}, 3, "exit code 3"),
        (GAVE_UP, 7, "exit code 7"),
        (KILLED, 137, "SIGKILL: often out of memory"),
        (ABORTED, 134, "SIGABRT: native code gave up"),
        ({"exit_code": -12}, 140, "SIGUSR2"),
        ({"exit_code": -99}, 227, "signal 99"),
        ({**RAISED, "exit_code": -9}, 1, "ValueError: boom"),  # it did not end, so it was killed
        ({"exit_code": 75}, 75, "exit code 75: left to be started again"),
    ],
)
def test_the_exit_status_and_the_last_line(how, status, last_line):
    found = failure(**how)
    assert (found.exit_status, found.last_line) == (status, last_line)


def test_a_report_has_a_line_for_each_and_ends_with_the_cause():
    first = failure(2, stack='Traceback:\n  File "a.py", line 1\n', **RAISED)
    failures = [failure(1, time=2.0, **LOST), failure(3, **STOPPED), first, failure(0, 3.0, **LOST)]
    assert report(failures, 4, full_traceback=False).splitlines() == [
        "accel-fn launch: 3 of 4 ranks failed",
        "rank 0 (node, pid 100): RuntimeError: Connection closed by peer [10.0.0.1]:1",
        "rank 1 (node, pid 101): RuntimeError: Connection closed by peer [10.0.0.1]:1",
        "",
        "Traceback:",
        '  File "a.py", line 1',
        "rank 2 (node, pid 102)",
        "ValueError: boom",
    ]


@pytest.mark.parametrize("full_traceback", [False, True])
def test_frames_of_libraries_are_folded_in_the_text_of_an_error_too(full_traceback):
    """An error from a worker of a loader has the worker's traceback in its text."""
    library = f'  File "{torch.__file__}", line 7, in fetch\n    data = fetch()\n'
    users = '  File "/home/me/train.py", line 3, in __getitem__\n    raise KeyError(1)\n'
    folded = "  [3 frames of torch; --full-traceback shows them]\n"
    head, end = "KeyError: Caught KeyError in a worker.\nTraceback:\n", "KeyError: 1\n"
    error = failure(exit_code=1, exception=f"{head}{library * 3}{users}{end}")
    shown = library * 3 if full_traceback else folded
    text = report([error], 1, full_traceback=full_traceback)
    assert text == f"rank 0 (node, pid 100)\n{head}{shown}{users}{end}"


def test_a_report_of_very_many_is_short():
    failures = [
        failure(rank, time=rank, **{**RAISED, "exception": "x" * 500}) for rank in range(99)
    ]
    lines = report(failures, 99, full_traceback=False).splitlines()
    assert len(lines) == 13
    assert lines[9] == "and 90 more"
    assert max(map(len, lines[:-1])) == 120


@pytest.mark.parametrize(
    ("how", "summary"),
    [
        ({**RAISED, "place": "a.py:3 in fn"}, "ValueError: boom, at a.py:3 in fn"),
        ({**RAISED, "exception": "WorldError: gone\n  rank 1: has left\n"}, "WorldError: gone"),
        ({**RAISED, "exception": '  File "a.py", line 1\nSyntaxError: no\n'}, "SyntaxError: no"),
        ({**RAISED, "exception": "\n"}, ""),
        ({**STOPPED, "place": "a.py:3 in fn"}, "stopped, at a.py:3 in fn"),
    ],
)  # fmt: skip
def test_a_summary_is_the_first_line_of_an_error_and_its_place(how, summary):
    assert failure(**how).summary == f"rank 0 (node, pid 100): {summary}"


def test_a_place_is_never_cut():
    exception, place = f"ValueError: {'x' * 200}\n", f"{'y' * 200}.py:3 in fn"
    assert failure(exit_code=1, exception=exception, place=place).summary.endswith(
        f"x..., at {place}"
    )


def test_a_stopped_rank_is_listed_where_it_waited_and_not_counted_as_failed():
    failures = [
        failure(0, **RAISED),
        failure(1, **STOPPED, place="a.py:3 in fn"),
        failure(2, **STOPPED),
    ]
    assert report(failures, 3, full_traceback=False).splitlines()[:2] == [
        "accel-fn launch: 1 of 3 ranks failed",
        "rank 1 (node, pid 101): stopped, at a.py:3 in fn",
    ]


def read(folder, **change):
    known = {"rank": 1, "host": "node", "pid": 5, "exit_code": 1}
    return read_failure(folder, **{**known, "stopped_at": 10.0, "stopped": False, **change})


def record(folder, **content):
    (folder / "error.json").write_text(json.dumps({"stack": "", "time": 9.0, **content}))


def test_a_rank_without_a_record_ended_when_it_was_polled(tmp_path):
    found = read(tmp_path, exit_code=-9)
    assert (found.time, found.stack, found.exception) == (10.0, "", "")


def test_a_record_that_torch_wrote_is_read(tmp_path):
    """Torch's decorator `record` writes it, in programs that another launcher started."""
    extra = {"py_callstack": "Traceback:\n  here\nKeyError: 'x'\n", "timestamp": "7"}
    record(tmp_path, message={"message": "KeyError: 'x'", "extraInfo": extra})
    found = read(tmp_path)
    expected = (7.0, "Traceback:\n  here", "KeyError: 'x'")
    assert (found.time, found.stack, found.exception) == expected


@pytest.mark.parametrize(
    ("text", "exit_code", "status"),
    [*((f"exit code {code}\n", code, code) for code in (0, 3, 75)), ("exit code 75\n", None, 1)],
    ids=["0", "3", "75", "an exception with such a text"],
)
def test_a_rank_that_was_killed_as_it_exited_has_its_own_exit_code(
    tmp_path, text, exit_code, status
):
    record(tmp_path, exception=text, exit_code=exit_code)
    assert read(tmp_path, exit_code=-15).exit_status == status


@pytest.mark.parametrize(("time", "stopped"), [(9.0, False), (11.0, True)])
def test_a_rank_with_an_earlier_record_was_not_stopped(tmp_path, time, stopped):
    record(tmp_path, exception="ValueError: boom\n", time=time)
    assert read(tmp_path, stopped=True).stopped == stopped
