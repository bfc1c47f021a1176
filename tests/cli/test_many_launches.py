"""200 launches in a row leave no process, file, shared memory, open port or thread behind."""

import os
import tempfile
import threading
import uuid
from contextlib import suppress
from itertools import cycle
from pathlib import Path

import pytest

import accel_fn as af
from tests.cli import one_rank
from tests.cli.launchers import until

NUM_LAUNCHES = 200
ENDS = {
    "returns": None,
    "leaves a child": None,
    "joins a world": None,
    "raises": "boom",
    "is killed": "SIGKILL",
}
"""How ranks end, and the word of the error."""
COMMANDS = 5  # one round of so many is of `accel-fn launch`, which takes longer
MARK = "ACCEL_TESTS_MANY_LAUNCHES"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The temporary folder of all launches, whose processes are marked by a variable."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv(MARK, uuid.uuid4().hex)
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def launch_function(end):
    try:
        assert af.launch(one_rank.work, end) == [0, 1]
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def launch_command(end, launchers, folder):
    done = launchers.run(folder, "-n", 2, "--cpu", one_rank.__file__, end)
    return done.stderr if done.exit_code else ""


def marked():
    """The other processes that have the mark."""
    found, mark = set(), f"{MARK}={os.environ[MARK]}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (path / "environ").read_bytes().split(b"\0"):
                found.add(int(path.name))
    return found - {os.getpid()}


def handles():
    """How many files, sockets and threads this process has open, and its children."""
    children = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    return len(os.listdir("/proc/self/fd")), threading.active_count(), "".join(children).split()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_200_launches_leave_nothing_behind(place, tmp_path, launchers):
    shared = {*os.listdir("/dev/shm")}
    for number, end in zip(range(NUM_LAUNCHES), cycle(ENDS), strict=False):
        by_command = number // len(ENDS) % COMMANDS == 1
        error = launch_command(end, launchers, tmp_path) if by_command else launch_function(end)
        assert ENDS[end] in error if ENDS[end] else not error, (end, error)
        if number + 1 == len(ENDS) * 2:  # the first have imported and opened what stays
            before = handles()
    assert handles() == before
    assert list(place.iterdir()) == []
    assert marked() == set()
    # Other programs of this machine may have shared memory for a while.
    until(
        lambda: True if {*os.listdir("/dev/shm")} <= shared else None,
        lambda: f"the end of {sorted({*os.listdir('/dev/shm')} - shared)}",
    )
