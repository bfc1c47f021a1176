"""Ctrl-C while a command imports what it needs, where Python may lose the exception that it makes of it."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.cli.commands import ROOT, surroundings
from tests.cli.launchers import until

_COMMANDS = {
    "launch": ["launch", "-n", "2", "script.py"],
    "test": ["test", "--cpu"],
    "env": ["env"],
    "launch --dry-run": ["launch", "--dry-run", "script.py"],
}
# Says when the command has begun to import its libraries.
_TELLING = """
    import sys

    def tell(event, arguments):
        if event == "import" and arguments[0] == "click":
            open("begun", "w").close()

    sys.addaudithook(tell)
"""


def interrupt(folder, name, *, delay_s=0.0, program=(sys.executable,)):
    """Exit code and stderr of a command that gets Ctrl-C so long after it has begun."""
    temporary = folder / "temporary"
    temporary.mkdir(parents=True)
    (folder / "script.py").write_text("import time; time.sleep(60)")
    (folder / "sitecustomize.py").write_text(textwrap.dedent(_TELLING))
    paths = f"{folder}{os.pathsep}{ROOT}"
    command = subprocess.Popen(
        [*program, "-m", "accel_fn.cli", *_COMMANDS[name]],
        cwd=folder,
        env=surroundings(folder, TMPDIR=str(temporary), PYTHONPATH=paths),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until(lambda: (folder / "begun").exists() or None, lambda: f"a begin of {name}")
        time.sleep(delay_s)
        os.killpg(command.pid, signal.SIGINT)
        _, stderr = command.communicate(timeout=10)
    finally:
        command.kill()
    until(lambda: None if processes(temporary) else True, lambda: f"the end of {name}", 5)
    assert list(temporary.iterdir()) == []
    return command.returncode, stderr


def processes(folder):
    """Those that have this folder for their temporary files."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"TMPDIR={folder}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("name", ["launch", "test", "env"])
def test_an_early_ctrl_c_ends_a_command_as_a_later_one_does(tmp_path, name):
    assert interrupt(tmp_path, name) == (130, f"accel-fn {name}: stopped by Ctrl-C\n")


@pytest.mark.slow
def test_ctrl_c_ends_a_launch_whenever_it_comes(tmp_path):
    ends = [
        interrupt(tmp_path / str(number), "launch", delay_s=0.12 * number) for number in range(12)
    ]
    assert ends == [(130, "accel-fn launch: stopped by Ctrl-C\n")] * 12


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.2, 0.5, 1.0, 2.0])
def test_ctrl_c_ends_a_test_and_its_ranks_whenever_it_comes(tmp_path, delay_s):
    ended = interrupt(tmp_path, "test", delay_s=delay_s)
    assert ended == (130, "accel-fn test: stopped by Ctrl-C\n")


def test_a_command_that_was_told_to_ignore_ctrl_c_does(tmp_path):
    """As a shell starts it in the background of a script."""
    ignoring = ["sh", "-c", 'trap "" INT; exec "$0" "$@"', sys.executable]
    assert interrupt(tmp_path, "launch --dry-run", program=ignoring) == (0, "")
