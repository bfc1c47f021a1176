"""Measures the table of docs/benchmarks.md: the same faults under three launchers.

Run `python -m tests.tools.launch_faults`. Each cell is measured by starting the command; a launch
that has not ended after a minute is ended.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from tests.cli.commands import surroundings
from tests.cli.launchers import is_running
from tests.support.processes import free_port

_LIMIT_S = 60
_PREFIX = """
import os, signal, subprocess, sys, time
rank, attempt = os.environ["RANK"], os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
os.write(1, f"up {os.getpid()}\\n".encode())
"""
_LAUNCHERS = {
    "accel-fn launch": ["-m", "accel_fn", "launch", "--cpu", "-n", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
    "accelerate launch": [
        *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
        *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
    ],
}


class Launch:
    """One launch of a script of two ranks."""

    def __init__(self, launcher, folder, script, *options):
        (folder / "script.py").write_text(_PREFIX + textwrap.dedent(script))
        self.out, self.err = folder / "out", folder / "err"
        self.process = subprocess.Popen(
            [sys.executable, *_LAUNCHERS[launcher], *options, "script.py"],
            cwd=folder,
            env=surroundings(folder),
            stdout=self.out.open("w"),
            stderr=self.err.open("w"),
            start_new_session=True,
        )

    def wait(self):
        """Wait for the exit code; return None if the launch had to be ended."""
        try:
            return self.process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            return None

    def printed(self, pattern, count):
        """Wait until ranks have printed this so often; return what they printed."""
        deadline = time.monotonic() + _LIMIT_S
        while len(found := re.findall(pattern, self.out.read_text())) < count:
            assert time.monotonic() < deadline, self.err.read_text()
            time.sleep(0.05)
        return found

    def ended(self):
        """Return the exit code and the last line."""
        code, lines = self.wait(), self.err.read_text().strip().splitlines()
        return (
            "waits on" if code is None else f"exit code {code}; {len(lines)} lines, `{lines[-1]}`"
        )


def _left(pids):
    left = [int(pid) for pid in pids if is_running(int(pid))]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return f"{len(left)} left" if left else "none left"


def an_exception(launcher, folder):
    """Rank 1 raises an error: return what is on stderr."""
    return Launch(
        launcher, folder, "if rank == '1': raise ValueError('boom')\ntime.sleep(600)"
    ).ended()


def a_kill(launcher, folder):
    """Rank 1 is killed by SIGKILL: return what is on stderr."""
    script = "if rank == '1': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)"
    return Launch(launcher, folder, script).ended()


def an_exit_code(launcher, folder):
    """Rank 1 exits with 7: return the exit code of the launch."""
    script = "if rank == '1': sys.exit(7)\ntime.sleep(600)"
    return f"{Launch(launcher, folder, script).wait()}"


def a_stubborn_rank(launcher, folder):
    """Rank 1 fails and rank 0 ignores SIGTERM: return the seconds until all have ended."""
    script = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while not os.path.exists("0"): open(rank, "w").close()
        if rank == "1": sys.exit(7)
        time.sleep(600)
    """
    launch = Launch(launcher, folder, script)
    launch.printed("up", 2)
    start = time.monotonic()
    return "waits on" if launch.wait() is None else f"{time.monotonic() - start:.0f} s"


def a_child(launcher, folder):
    """Rank 1 fails and has a child in a process group of its own: return whether the child is
    left."""
    script = """
        if rank == "1":
            child = subprocess.Popen(["sleep", "600"], process_group=0)
            os.write(1, f"child {child.pid}\\n".encode())
            sys.exit(7)
        time.sleep(600)
    """
    launch = Launch(launcher, folder, script)
    launch.wait()
    return _left(launch.printed(r"child (\d+)", 1))


def a_killed_launcher(launcher, folder):
    """The launcher is killed by SIGKILL: return which ranks are left five seconds later."""
    launch = Launch(launcher, folder, "time.sleep(600)")
    pids = launch.printed(r"up (\d+)", 2)
    launch.process.kill()
    launch.process.wait()
    time.sleep(5)
    return _left(pids)


def ctrl_c(launcher, folder):
    """The user presses Ctrl-C: return the lines on stderr."""
    launch = Launch(launcher, folder, "time.sleep(600)")
    launch.printed("up", 2)
    os.killpg(launch.process.pid, signal.SIGINT)
    code = launch.wait()
    return f"exit code {code}; {len(launch.err.read_text().strip().splitlines())} lines"


def two_at_once(launcher, folder):
    """A second launch starts while the first one runs: return its exit code."""
    (folder / "second").mkdir()
    first = Launch(launcher, folder, "time.sleep(600)")
    first.printed("up", 2)
    code = Launch(launcher, folder / "second", "").wait()
    first.process.terminate()
    first.wait()
    return f"{code}"


def a_machine_that_fails_late(launcher, folder):
    """On two machines with one restart, one has finished when the other fails: return both exit
    codes."""
    script = "time.sleep(8 * (rank < '2'))\nif rank == '0' and attempt == '0': sys.exit(7)"
    port, launches = free_port(), []
    for machine in ("0", "1"):
        options = {
            "accel-fn launch": [
                *(
                    "-n",
                    "4",
                    "--max-restarts",
                    "1",
                    "--num-machines",
                    "2",
                    "--machine-rank",
                    machine,
                ),
                *("--main-process-ip", "127.0.0.1", "--main-process-port", f"{port}"),
            ],
            "torchrun": [
                *("--nnodes", "2", "--node-rank", machine, "--max-restarts", "1"),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"),
            ],
            "accelerate launch": [
                *("--num_machines", "2", "--num_processes", "4", "--machine_rank", machine),
                *("--main_process_ip", "127.0.0.1", "--main_process_port", f"{port}"),
                *("--max_restarts", "1"),
            ],
        }
        (folder / machine).mkdir()
        launches.append(Launch(launcher, folder / machine, script, *options[launcher]))
    codes = [each.wait() for each in launches]
    again = sum(each.out.read_text().count("up ") for each in launches) - 4
    shown = ", ".join("waits on" if code is None else f"{code}" for code in codes)
    return f"{shown}; {again} of 4 ranks started again"


FAULTS = (
    *(an_exception, a_kill, an_exit_code, a_stubborn_rank, a_child, a_killed_launcher),
    *(ctrl_c, two_at_once, a_machine_that_fails_late),
)

if __name__ == "__main__":
    print(f"| fault | {' | '.join(_LAUNCHERS)} |\n|{'---|' * (len(_LAUNCHERS) + 1)}")
    for fault in FAULTS:
        cells = []
        for launcher in _LAUNCHERS:
            with tempfile.TemporaryDirectory() as folder:
                cells.append(fault(launcher, Path(folder)))
        print(f"| {fault.__doc__} | {' | '.join(cells)} |", flush=True)
