"""Real processes: scripts run under torchrun, as a user would start them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
_SAY = """
import os

def say(*words):  # one write, so that lines of several processes do not mix
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def launch(
    script: str, *, num_processes: int = 2, expect: Sequence[str] = (), timeout_s: float = 90
) -> str:
    """Run a script on several processes; what they `say` must be just these lines, in any order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(_SAY + textwrap.dedent(script))
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(num_processes),
        ]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), str(path)]
        done = subprocess.run(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    if expect:
        assert sorted(done.stdout.split("\n")[:-1]) == sorted(expect), done.stdout + done.stderr
    return done.stdout
