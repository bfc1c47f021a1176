"""Lines that ranks print are written in one piece, so that those of several ranks do not mix."""

import os
import socket
import subprocess
import sys

import pytest

from accel_fn.launcher.processes import worker
from tests.cli.commands import surroundings

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
AS_RANK = [worker.__file__, str(os.getpid()), "", "", "script"]
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="reads each write apart, from a socket of Linux"
)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("script", "command"),
    [(SCRIPT, AS_RANK), pytest.param(CALLER, [], marks=pytest.mark.slow)],
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
