"""Starts programs that use Ray, as a user does."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.cli.commands import surroundings


class Driver:
    """A program that starts Ray; Ray ends with it."""

    def __init__(self, folder: Path, *command: object) -> None:
        self.printed = folder / "printed"
        self._temporary = tempfile.TemporaryDirectory(prefix="ray_", ignore_cleanup_errors=True)
        # A socket's path has at most 107 bytes, so Ray's folder is not in `folder`.
        ours = {"RAY_TMPDIR": self._temporary.name, "RAY_USAGE_STATS_ENABLED": "0"}
        with self.printed.open("w") as printed:
            self._process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                cwd=folder,
                env=surroundings(folder, RAY_DEDUP_LOGS="0", **ours),
                stdout=printed,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._temporary.cleanup()

    def wait(self) -> str:
        """Wait for a good end; return what was printed."""
        code = self._process.wait(500)
        text = self.printed.read_text()
        assert code == 0, text
        return text
