"""The program that is a rank: its processors, its launcher, its lines and its end."""

import os
import socket
import subprocess
import sys

import pytest

from accel_fn.launcher import worker
from tests.cli.commands import run_python, surroundings

PRINTS = """
print("out of", 1)
print("err of", 1, file=sys.stderr)
print("progress", end="", flush=True)
print(" is shown", end="")
"""
SCRIPT = f"import sys\n{PRINTS}"
CALLER = f"""
import sys, accel_fn as af
def fn():
    {PRINTS.replace(chr(10), chr(10) + "    ")}
if __name__ == "__main__":
    af.launch(fn, num_processes=1)
"""


def rank(folder, code, script="", number=0, **options):
    """Run a rank of a script in a process; the code may use the name `worker`."""
    (folder / "script.py").write_text(script)
    variables = {"RANK": str(number), "LOCAL_RANK": str(number)}
    variables["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")
    code = f"import os, time; import {worker.__name__} as worker\n{code}"
    return run_python(folder, "-c", code, timeout_s=100, **variables, **options)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="binds on Linux alone")
def test_a_rank_is_bound_to_its_own_processors(tmp_path):
    last = max(os.sched_getaffinity(0))
    code = f"worker.main(str(os.getppid()), '0,1;{last}', '', 'script', 'script.py')"
    done = rank(tmp_path, code, "import os; print(os.sched_getaffinity(0))", number=1)
    assert done.stdout == f"{{{last}}}\n", done.stderr


@pytest.mark.parametrize("kind", ["script", "function"])
def test_a_rank_whose_launcher_is_gone_already_does_nothing_and_prints_nothing(tmp_path, kind):
    code = "worker.main(str(1 + os.getpid()), '', '', 'script', 'script.py')"
    if kind == "function":
        module = worker.__name__.replace("worker", "child")
        code = f"from {module} import main; main(str(1 + os.getpid()), '', 'gone', '')"
    done = rank(tmp_path, code, "print('started')")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_without_prctl_a_rank_polls_its_launcher(tmp_path):
    """Systems other than Linux have no prctl; this test runs on any."""
    code = (
        "if os.fork() == 0:\n"
        "    launcher = os.getppid()\n"
        "    os.write(1, b'up ')\n"
        "    worker._die_after(launcher)\n"
        "time.sleep(0.5)\n"
    )
    done = rank(tmp_path, code)  # the pipe is open while the rank lives
    assert (done.returncode, done.stdout) == (0, "up ")


def test_a_failed_rank_that_hangs_prints_its_error_and_is_killed(tmp_path):
    """The waits are shortened, since they would take half a minute."""
    script = (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n1 / 0\n"
    )
    code = (
        "worker._REPORT_AFTER_S = worker._END_AFTER_S = 0.1;"
        "worker.main(str(os.getppid()), '', '', 'script', 'script.py')"
    )
    done = rank(tmp_path, code, script, number=3)
    assert done.returncode == 1
    first, *_, last = done.stderr.strip().splitlines()
    assert first == "rank 3 has failed and is slow to end"
    assert last == "ZeroDivisionError: division by zero"


@pytest.mark.skipif(
    sys.platform != "linux", reason="reads each write apart, from a socket of Linux"
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("script", "command"),
    [
        (SCRIPT, [worker.__file__, str(os.getpid()), "", "", "script"]),
        pytest.param(CALLER, [], marks=pytest.mark.slow),
    ],
    ids=["script", "function"],
)
def test_a_line_is_written_in_one_piece(tmp_path, script, command, unbuffered):
    (tmp_path / "script.py").write_text(script)
    variables = {"RANK": "0", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with ours, theirs:
        rank = subprocess.Popen(
            [sys.executable, *command, "script.py"],
            cwd=tmp_path,
            env=surroundings(tmp_path, PYTHONUNBUFFERED=unbuffered, **variables),
            stdout=theirs,
            stderr=theirs,
        )
        theirs.close()
        found = list(iter(lambda: ours.recv(1000), b""))
    assert rank.wait() == 0
    assert found == [b"out of 1\n", b"err of 1\n", b"progress", b" is shown"]
