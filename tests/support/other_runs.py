"""A second run beside the test: another process, which holds what it has opened."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.forked_ranks import ROOT


@contextmanager
def other_run(folder: Path, script: str) -> Iterator[subprocess.Popen[str]]:
    """Run a script, which finds `folder`, in a process that has printed `up`; end it with the context."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys\nfolder = sys.argv[1]\n{script}", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.communicate()
