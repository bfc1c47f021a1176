"""A run that gets a signal saves and exits; when it is started again, it ends like one without a
signal."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.examples.running import EXAMPLES

pytestmark = pytest.mark.slow

SCRIPT = f"""
import os, runpy, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import accel_fn as af
import resume
build = resume.build_model

def told():  # as training begins
    os.write(1, f"up {{os.environ['RANK']}} {{os.getpid()}}\\n".encode())
    return build()

resume.build_model = told
step = af.Step.__call__

def slow(self, state, batch):
    import time
    time.sleep(0.02)
    if state.step == 3:
        os.write(1, f"third {{state.rank}}\\n".encode())
    return step(self, state, batch)

af.Step.__call__ = slow
resume.main(resume.parse_arguments())
"""
ARGUMENTS = ["script.py", "--epochs", 3, "--save-every", 1000, "--out", "run"]


def start(launchers, folder, *options):
    """Start a launcher of two ranks; return it and the ranks once the fourth update has begun."""
    started = launchers.start(folder, "-n", 2, "--cpu", *options, *ARGUMENTS, script=SCRIPT)
    pids = dict(started.printed(r"up (\d) (\d+)", 2))
    started.printed(r"third (\d)", 2)
    return started, [int(pids[rank]) for rank in "01"]


def weights(text):
    (found,) = re.findall(r"^36 updates, weights ([0-9a-f]{64})$", text, re.MULTILINE)
    return found


def saved(folder):
    return sorted(path.name for path in (folder / "run").glob("step_*"))


@pytest.fixture(scope="module")
def whole(launchers, tmp_path_factory):
    """Return the end of a run that got no signal."""
    folder = tmp_path_factory.mktemp("whole")
    ended = launchers.run(folder, "-n", 2, "--cpu", *ARGUMENTS, script=SCRIPT)
    assert ended.exit_code == 0, ended
    assert saved(folder) == ["step_00000036"]
    return weights(ended.stdout)


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGUSR1), (1, signal.SIGTERM)])
def test_a_signal_to_one_rank_stops_all_and_the_launcher_restarts_them(
    launchers, tmp_path, whole, rank, number
):
    started, pids = start(launchers, tmp_path, "--max-restarts", 1)
    os.kill(pids[rank], number)
    ended = started.wait()
    assert ended.exit_code == 0, ended
    assert re.findall(r"restart 1 of 1: .*exit code 75: left to be started again", ended.stderr)
    assert weights(ended.stdout) == whole
    first, last = saved(tmp_path)
    assert (last, first < last) == ("step_00000036", True)


@pytest.mark.parametrize("to_launcher", [False, True])
def test_without_a_restart_the_launcher_ends_with_the_code_of_its_ranks(
    launchers, tmp_path, whole, to_launcher
):
    started, pids = start(launchers, tmp_path)
    if to_launcher:
        started.kill(signal.SIGUSR1)  # forwarded to all ranks, as Slurm sends it before the end
    else:
        os.kill(pids[1], signal.SIGTERM)
    ended = started.wait()
    assert ended.exit_code == 75, ended
    assert ended.last_lines[-1] == "exit code 75: left to be started again"
    (left,) = saved(tmp_path)
    assert left != "step_00000036"
    again = launchers.run(tmp_path, "-n", 2, "--cpu", *ARGUMENTS)
    assert weights(again.stdout.split(ended.stdout)[-1]) == whole
