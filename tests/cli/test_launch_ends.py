"""accel-fn launch: however it ends, its ranks end with it and get one signal."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.cli.commands import surroundings
from tests.cli.launchers import gone, is_running, until
from tests.cli.terminal import Terminal

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ctrl_c")]

# A rank with two children: another program, and a fork of the rank.
_FAMILY = """
    import os, signal, subprocess, sys, time

    def tell(number, frame):
        os.write(1, f"told {number}\\n".encode())
        time.sleep(0.2)
        sys.exit(1)

    stops = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    for stop in stops:
        signal.signal(stop, signal.SIG_IGN)
    program = subprocess.Popen(["sleep", "600"])
    fork = os.fork()
    if fork == 0:
        time.sleep(600)
        os._exit(0)  # where nobody has ended it
    if "--tells" in sys.argv:
        for stop in stops:
            signal.signal(stop, tell)
    os.write(1, f"pids {os.getpid()} {program.pid} {fork}\\n".encode())
    while True:
        time.sleep(0.1)
"""


def family(launcher):
    return " ".join(launcher.printed(r"pids ([\d ]+)\n", 2)).split()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_nothing_outlives_a_launcher_that_is_killed(launchers, tmp_path, number):
    launcher = launchers.start(tmp_path, "-n", 2, "script.py", script=_FAMILY, TMPDIR=str(tmp_path))
    pids = family(launcher)
    assert all(is_running(int(pid)) for pid in pids)
    assert launcher.kill(number).wait().exit_code == -number
    gone(pids)
    until(lambda: not list(tmp_path.glob("accel_fn_*")) or None, lambda: "an empty folder")


def test_ranks_end_with_their_launcher_even_without_its_reaper(launchers, tmp_path):
    launcher = launchers.start(tmp_path, "-n", 2, "script.py", script=_FAMILY, TMPDIR=str(tmp_path))
    ranks = family(launcher)[::3]
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    guards = [pid for pid in children if b"reaper" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    for pid in (*guards, launcher.pid):
        os.kill(int(pid), signal.SIGKILL)
    assert launcher.wait().exit_code == -signal.SIGKILL
    assert len(guards) == 1
    gone(ranks)


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGINT, "Ctrl-C"),
        (signal.SIGHUP, "SIGHUP"),
        (signal.SIGQUIT, "SIGQUIT"),
    ],
)
def test_a_signal_reaches_every_rank_once(launchers, tmp_path, number, name):
    launcher = launchers.start(tmp_path, "-n", 2, "script.py", "--tells", script=_FAMILY)
    pids = family(launcher)
    ended = launcher.kill(number).wait()
    assert ended.exit_code == 128 + number
    assert ended.stderr == f"accel-fn launch: stopped by {name}\n"
    assert ended.stdout.count(f"told {number.value}") == ended.stdout.count("told") == 2
    gone(pids)


def test_a_second_signal_does_not_wait_for_ranks(launchers, tmp_path):
    launcher = launchers.start(tmp_path, "-n", 2, "script.py", script=_FAMILY)
    pids = family(launcher)
    launcher.kill(signal.SIGTERM)
    time.sleep(0.5)
    assert all(is_running(int(pid)) for pid in pids[::3])  # ranks that ignore the first signal
    # after one signal, ranks have 30 s to leave
    assert launcher.kill(signal.SIGTERM).wait(timeout_s=25).exit_code == 143
    gone(pids)


def test_what_a_killed_rank_started_is_gone_before_the_next_attempt(launchers, tmp_path):
    script = """
        import os, signal, subprocess, time
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            program = subprocess.Popen(["sleep", "100"])
            open("pid", "w").write(str(program.pid))
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            with open(f"/proc/{open('pid').read()}/stat") as file:
                assert file.read().rpartition(")")[2].split()[0] in "ZX"
        except FileNotFoundError:
            pass
    """
    ended = launchers.run(tmp_path, "--max-restarts", 1, "script.py", script=script)
    assert ended.exit_code == 0, ended


_UP = "import os, time\nos.write(1, b'up\\n')\nassert os.isatty(1)\ntime.sleep(600)\n"


def on_a_terminal(folder):
    (folder / "script.py").write_text(_UP)
    command = [sys.executable, "-m", "accel_fn", "launch", "-n", "2", "script.py"]
    return Terminal(command, folder, surroundings(folder))


def test_ctrl_c_on_a_terminal_is_one_line(tmp_path):
    """The command runs on its own terminal, where Ctrl-C is a key."""
    with on_a_terminal(tmp_path) as screen:
        screen.read_until("up\n").read_until("up\n").type("\x03")
        assert screen.end() == 130
        assert screen.text == "up\nup\n^Caccel-fn launch: stopped by Ctrl-C\n"
