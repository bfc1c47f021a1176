"""Ctrl-C during a command's imports, when Python may lose the exception, and later."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.cli.commands import ROOT, run_python, surroundings
from tests.cli.launchers import until

pytestmark = pytest.mark.usefixtures("ctrl_c")

_COMMANDS = {
    "launch": ["launch", "-n", "2", "script.py"],
    "test": ["test", "--cpu"],
    "env": ["env"],
    "explain": ["explain", "slow.py:make"],
    "estimate": ["estimate", "slow.py:make"],
    "export": ["export", "checkpoint", "weights"],
    "checkpoints": ["checkpoints", "checkpoint"],
    "report": ["report", "runs"],
    "plot": ["plot", "runs"],
    "watch": ["watch", "runs"],
    "config": ["config", "--default"],
    "launch --dry-run": ["launch", "--dry-run", "script.py"],
}
# Prints when the command begins to import its libraries.
_TELLING = """
    import sys

    def tell(event, arguments):
        if event == "import" and arguments[0] == "click":
            open("begun", "w").close()

    sys.addaudithook(tell)
"""


# Prints when the script runs, and whether it could clean up.
_SLOW = """
    import time

    def make():
        open("inside", "w").close()
        try:
            time.sleep(600)
        finally:
            open("tidied", "w").close()
"""


def interrupt(folder, name, *, delay_s=0.0, program=(sys.executable,), sign="begun"):
    """Press Ctrl-C some time after a command has begun; return its exit code and stderr."""
    temporary = folder / "temporary"
    temporary.mkdir(parents=True)
    (folder / "checkpoint").mkdir()
    (folder / "slow.py").write_text(textwrap.dedent(_SLOW))
    (folder / "script.py").write_text("import time; time.sleep(600)")
    (folder / "sitecustomize.py").write_text(textwrap.dedent(_TELLING))
    paths = f"{folder}{os.pathsep}{ROOT}"
    torchs = str(folder / "torch")  # torch makes this folder and leaves it
    command = subprocess.Popen(
        [*program, "-m", "accel_fn", *_COMMANDS[name]],
        cwd=folder,
        env=surroundings(
            folder, TMPDIR=str(temporary), PYTHONPATH=paths, TORCHINDUCTOR_CACHE_DIR=torchs
        ),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until(lambda: (folder / sign).exists() or None, lambda: f"a begin of {name}")
        time.sleep(delay_s)
        os.killpg(command.pid, signal.SIGINT)
        _, stderr = command.communicate(timeout=100)
    finally:
        command.kill()
    until(lambda: None if processes(temporary) else True, lambda: f"the end of {name}")
    assert list(temporary.iterdir()) == []
    return command.returncode, stderr


def processes(folder):
    """List the processes that use this folder for temporary files."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"TMPDIR={folder}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("name", [name for name in _COMMANDS if "--" not in name])
def test_an_early_ctrl_c_ends_a_command_as_a_later_one_does(tmp_path, name):
    assert interrupt(tmp_path, name) == (130, f"accel-fn {name}: stopped by Ctrl-C\n")


@pytest.mark.slow
def test_ctrl_c_ends_a_launch_whenever_it_comes(tmp_path):
    ends = [
        interrupt(tmp_path / str(number), "launch", delay_s=0.12 * number) for number in range(12)
    ]
    assert ends == [(130, "accel-fn launch: stopped by Ctrl-C\n")] * 12


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.5, 2.0])
def test_ctrl_c_ends_a_test_and_its_ranks_whenever_it_comes(tmp_path, delay_s):
    ended = interrupt(tmp_path, "test", delay_s=delay_s)
    assert ended == (130, "accel-fn test: stopped by Ctrl-C\n")


# Python looks for a folder for temporary files by writing a file.
_LOOKING = """
    import os, signal, sys

    def stop(event, arguments):
        if event == "os.remove" and str(arguments[0]).startswith(os.environ["TMPDIR"]):
            os.kill(os.getpid(), signal.SIGINT)

    sys.addaudithook(stop)
"""


@pytest.mark.parametrize("name", ["launch", "env"])
def test_ctrl_c_while_python_looks_for_a_temporary_folder_leaves_no_file(tmp_path, name):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(_LOOKING))
    (tmp_path / "script.py").write_text("import time; time.sleep(600)")
    paths = f"{tmp_path}{os.pathsep}{ROOT}"
    command = ["-m", "accel_fn", *_COMMANDS[name]]
    ended = run_python(tmp_path, *command, PYTHONPATH=paths, TMPDIR=str(temporary))
    assert ended.returncode == 128 + signal.SIGINT
    assert list(temporary.iterdir()) == []


# Stop the launcher while both ranks still start.
_STOPPING = """
    import os, signal, time

    if "RANK" in os.environ:
        if os.environ["RANK"] == "0":
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(0.3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["script", "program"])
def test_ranks_that_still_start_print_nothing_on_ctrl_c(tmp_path, launchers, kind):
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(_STOPPING))
    (tmp_path / "script.py").write_text("import time; time.sleep(600)")
    target = ["script.py"] if kind == "script" else ["--no-python", "sleep", "60"]
    paths = f"{tmp_path}{os.pathsep}{ROOT}"
    ended = launchers.run(tmp_path, "-n", 2, *target, PYTHONPATH=paths)
    assert (ended.exit_code, ended.stderr) == (130, "accel-fn launch: stopped by Ctrl-C\n")


def test_a_command_that_ignores_ctrl_c_continues(tmp_path):
    """A shell starts background jobs of a script in this way."""
    ignoring = ["sh", "-c", 'trap "" INT; exec "$0" "$@"', sys.executable]
    assert interrupt(tmp_path, "launch --dry-run", program=ignoring) == (0, "")
