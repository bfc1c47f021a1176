"""accel-fn launch in operation: launchers killed in any order, many runs, many ranks, a
terminal."""

import re
import signal
import sys
import time
from contextlib import suppress

import pytest

from tests.cli.commands import surroundings
from tests.cli.launchers import gone
from tests.cli.terminal import Terminal
from tests.cli.test_machines import _WAITING, start_two

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ctrl_c")]

_KILL, _TERM, _INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize(
    ("order", "numbers", "gap_s"),
    [((0, 1), (_KILL, _KILL), 0), ((1, 0), (_KILL, _TERM), 0.5), ((0, 1), (_INT, _KILL), 0.5)],
)
def test_two_launchers_that_end_in_any_order_leave_nothing(
    launchers, tmp_path, order, numbers, gap_s
):
    machines = start_two(launchers, tmp_path, "script.py", script=_WAITING)
    pids = [pid for each in machines for _, pid in each.printed(r"up (\d) (\d+)")]
    for machine, number in zip(order, numbers, strict=True):
        with suppress(ProcessLookupError):  # the second ended by itself, since the first was gone
            machines[machine].kill(number)
        time.sleep(gap_s)
    for each in machines:
        each.wait()
    gone(pids)


def test_eight_ranks_are_a_world_and_end_together(launchers, tmp_path):
    script = """
        import os, signal
        import accel_fn as af
        state = af.init(device="cpu")
        os.write(1, f"pid {os.getpid()} sum {af.reduce_sum(state.rank, state)}\\n".encode())
        if state.rank == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        af.barrier(state)
    """
    ended = launchers.run(tmp_path, "-n", 8, "--cpu", "script.py", script=script)
    assert ended.exit_code == 137, ended.stderr
    assert ended.stdout.count(" sum 28\n") == 8
    assert ended.last_lines[-1] == "SIGKILL: often out of memory"
    gone([line.split()[1] for line in ended.stdout.splitlines()])


def test_two_runs_in_one_folder_keep_their_logs_apart(launchers, tmp_path):
    script = """
        import os, sys, time
        own, other = sys.argv[1:]
        open(own, "w").close()
        while not os.path.exists(other): time.sleep(0.02)
        print("of", own)
    """
    runs = [
        launchers.start(tmp_path, "--log-dir", "logs", "script.py", *names, script=script)
        for names in (("one", "two"), ("two", "one"))
    ]
    assert [each.wait().exit_code for each in runs] == [0, 0]
    logs = [path.read_text() for path in tmp_path.glob("logs/*/attempt_0/0/stdout.log")]
    assert sorted(logs) == ["of one\n", "of two\n"]


def shell(folder):
    """A shell that a user types into."""
    command = ["bash", "--norc", "--noprofile", "-i"]
    return Terminal(command, folder, surroundings(folder, PS1="$ "))


@pytest.mark.parametrize(("key", "after"), [("fg", "0"), ("kill -KILL %1", "")])
def test_ctrl_z_stops_the_launcher_alone_and_the_run_resumes_with_it(tmp_path, key, after):
    """In a shell with job control, ranks continue while the launcher is stopped, and end with
    it."""
    (tmp_path / "script.py").write_text(
        "import os, time\nos.write(1, f'up {os.getpid()}\\n'.encode())\n"
        "while not os.path.exists('end'): time.sleep(0.02)\nos.write(1, b'over\\n')\n"
    )
    command = f"{sys.executable} -m accel_fn.cli launch -n 2 script.py"
    with shell(tmp_path) as screen:
        screen.type(f"{command}\n")
        for _ in range(2):
            screen.read_until("up ").read_until("\n")
        pids = re.findall(r"up (\d+)\n", screen.text)
        assert len(pids) == 2
        screen.type("\x1a").read_until("Stopped")
        if after:
            (tmp_path / "end").touch()
            screen.read_until("over\n").read_until("over\n")  # although the launcher is stopped
        screen.type(f"{key}; echo code $?\n")
        if after:
            screen.read_until(f"code {after}\n")
        gone(pids)
