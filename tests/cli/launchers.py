"""Starts launchers and other commands as a user does, watches them run and ends them in many
ways."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.cli.commands import ROOT, surroundings


@dataclass(frozen=True)
class Ended:
    """The exit of a launcher: code, output and time."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def last_lines(self) -> list[str]:
        return self.stderr.rstrip().splitlines()


class Launchers:
    """Starts launchers; none of them is left at the end of a test."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.forking"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def request(self, **request):
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(
        self, folder: Path, *arguments: object, script: str | None = None, **variables: str
    ) -> Launcher:
        """Start `accel-fn launch ARGUMENTS` in a folder, in which `script` is script.py."""
        folder.mkdir(exist_ok=True)
        if script is not None:
            (folder / "script.py").write_text(textwrap.dedent(script))
        return self._fork(folder, "launch", *arguments, **variables)

    def _fork(self, folder: Path, *arguments: object, **variables: str) -> Launcher:
        for name in ("stdout", "stderr"):
            (folder / name).write_text("")
        pid = self.request(
            arguments=[*map(str, arguments)],
            folder=str(folder),
            variables=surroundings(folder, **variables),
        )
        return Launcher(self, pid, folder)

    def command(self, folder: Path, *arguments: object, **variables: str) -> Ended:
        """Run `accel-fn ARGUMENTS` in a folder, and wait for it."""
        return self._fork(folder, *arguments, **variables).wait()

    def run(
        self, folder: Path, *arguments: object, script: str | None = None, **variables: str
    ) -> Ended:
        """Start a launcher and wait for it."""
        return self.start(folder, *arguments, script=script, **variables).wait()

    def close(self) -> None:
        self._process.terminate()  # processes forked meanwhile may hold the other end of its stdin
        self._process.communicate(timeout=60)


@dataclass(frozen=True)
class Launcher:
    """A launcher that may still run."""

    launchers: Launchers
    pid: int
    folder: Path

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def printed(self, pattern: str, count: int = 1) -> list[str]:
        """Wait until ranks have printed this so often; return the group that the pattern found."""
        return until(
            lambda: found if len(found := re.findall(pattern, self.stdout)) >= count else None,
            lambda: f"{pattern!r} in\n{self.stdout}\n{self.stderr}",
        )

    def kill(self, number: int) -> Launcher:
        os.kill(self.pid, number)
        return self

    def wait(self, timeout_s: float = 500) -> Ended:
        start = time.monotonic()
        try:
            code = until(
                lambda: self.launchers.request(ended=self.pid),
                lambda: f"an end\n{self.stdout}\n{self.stderr}",
                timeout_s,
            )
        except AssertionError:
            os.kill(self.pid, signal.SIGKILL)
            raise
        return Ended(code, self.stdout, self.stderr, time.monotonic() - start)


def until(look: Callable[[], object], what: Callable[[], str], timeout_s: float = 300):
    """Call `look` until it returns something true; return that."""
    deadline = time.monotonic() + timeout_s
    while (found := look()) is None:
        assert time.monotonic() < deadline, f"no sign within {timeout_s:g} s of {what()}"
        time.sleep(0.02)
    return found


def is_running(pid: int) -> bool:
    """Does this process exist, and is it no zombie?"""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def is_listening(host: str, port: int) -> bool:
    """Does a server take connections there?"""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def gone(pids) -> None:
    """Wait until all of these processes have ended."""
    until(
        lambda: None if any(map(is_running, map(int, pids))) else True,
        lambda: f"the end of {[pid for pid in pids if is_running(int(pid))]}",
        timeout_s=60,
    )
