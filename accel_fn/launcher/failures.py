"""Find the failure of a rank that caused the others, and report it with the user's lines of code."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from accel_fn.launcher import worker
from accel_fn.parallel.hang_report import is_in_python

_SHOWN, _WIDTH = 8, 120

_HINTS = {
    "SIGKILL": "often out of memory",
    "SIGSEGV": "a crash in native code",
    "SIGABRT": "native code gave up",
    "SIGBUS": "often a full /dev/shm",
    "SIGILL": "built for another processor",
    "SIGTERM": "stopped from outside",
}
_CRASHES = {"SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE"}
_LOST_PEER = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection (was likely )?closed|connection refused"
    r"|remote process exited|communicator was aborted|got 0 bytes|did not see rank|socket timeout"
    r"|timed out waiting|could not reach MASTER_ADDR|got one that is gone|PeerError",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of one rank by an exception, an exit code, or a signal.

    For a signal, `exit_code` is below zero.
    """

    rank: int
    host: str
    pid: int
    exit_code: int
    time: float
    stack: str = ""
    exception: str = ""
    stopped: bool = False
    """Whether the launcher stopped the rank while it was running, since another rank or machine failed."""
    place: str = ""
    """The user's line at which the rank raised its error, or waited when it was stopped; "" if unknown."""

    @property
    def process(self) -> str:
        """Describe the rank by its number, host and pid."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    @property
    def signal_name(self) -> str | None:
        """Return the signal that killed the rank, or None."""
        if self.exit_code >= 0:
            return None
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:
            return f"signal {-self.exit_code}"

    @property
    def exit_status(self) -> int:
        """Return the exit code as in a shell: 128 + signal for a killed rank.

        For a rank that raised an error and was then killed because it was slow to exit, the code is
        1.
        """
        if self.exit_code >= 0:
            return self.exit_code
        return 1 if self.exception else 128 - self.exit_code

    @property
    def last_line(self) -> str:
        """Describe the exception, exit code or signal of the rank, as the end of a traceback does."""
        if self.exit_status == os.EX_TEMPFAIL:
            return f"exit code {self.exit_status}: left to be started again"
        if self.exception:
            return self.exception.rstrip()
        name = self.signal_name
        if name is None:
            return f"exit code {self.exit_code}"
        hint = _HINTS.get(name)
        return f"{name}: {hint}" if hint else name

    @property
    def summary(self) -> str:
        """Describe the rank, its failure and the user's line in one line; a long error is cut."""
        lines = self.last_line.splitlines()
        if self.stopped and not self.exception:
            lines = ["stopped"]
        # Take the first line that is not indented. A SyntaxError starts with indented lines, and an
        # error about ranks may end with a list of them.
        line = f"{self.process}: {next((each for each in lines if not each[:1].isspace()), '')}"
        line = line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..."
        return f"{line}, at {self.place}" if self.place else line


def read_failure(
    folder: Path,
    *,
    rank: int,
    host: str,
    pid: int,
    exit_code: int,
    stopped_at: float,
    stopped: bool,
) -> Failure:
    """Describe the end of a rank, from its exit code and the files that it wrote into its folder."""
    stack, exception, time, own_code = _read_record(folder, stopped_at)
    place = place_in_traceback(stack) if exception else ""
    # A stopped rank wrote its stack at SIGTERM. The stack shows where the rank waited for the
    # failed one.
    if stopped and not exception:
        place = place_of_wait(_read_stack(folder))
    # A stopped rank that recorded an error before the stop counts as failed: it was only slow to
    # exit.
    return Failure(
        rank=rank,
        host=host,
        pid=pid,
        exit_code=exit_code if own_code is None else own_code,
        time=time,
        stack=stack,
        exception=exception,
        stopped=stopped and not (exception and time < stopped_at),
        place=place,
    )


def _read_record(folder: Path, otherwise: float) -> tuple[str, str, float, int | None]:
    """Read a rank's stack, exception, time and exit code from its record.

    Without a record, return the stack that the rank wrote if it crashed, and `otherwise` as the
    time.

    The record has an exit code if the rank called `sys.exit`. This code counts even if the rank was
    killed while it exited.
    """
    try:
        record = json.loads((folder / "error.json").read_text())
        if "exception" in record:
            return record["stack"], record["exception"], record["time"], record.get("exit_code")
        # A file without this key was written by torch's own decorator `record`.
        extra = record["message"]["extraInfo"]
        stack, _, exception = extra["py_callstack"].rstrip().rpartition("\n")
        return stack, exception, float(extra["timestamp"]), None
    except (OSError, ValueError, KeyError, TypeError):
        return read_crash(folder), "", otherwise, None


def read_crash(folder: Path) -> str:
    """Read the stack that Python wrote when native code crashed, without the lines of our worker."""
    lines = _read_stack(folder).splitlines(keepends=True)
    # Without this line, the rank did not crash: it wrote the stack when it got a SIGTERM.
    if not any(line.startswith("Fatal Python error") for line in lines):
        return ""
    return "".join(line for line in lines if f'"{worker.__file__}"' not in line)


def _read_stack(folder: Path) -> str:
    try:
        return (folder / worker.STACK).read_text(errors="replace")
    except FileNotFoundError:
        return ""


def has_record(folder: Path) -> bool:
    """Return whether the rank with this folder has recorded the cause of its end."""
    return (folder / "error.json").is_file()


def has_failed(folder: Path) -> bool:
    """Return whether the rank's folder has a record that our worker wrote.

    A record by torch's decorator `record` does not count: the program may catch the error that the
    decorator raises again, and continue.
    """
    try:
        return "exception" in json.loads((folder / "error.json").read_text())
    except (OSError, ValueError):
        return False


def lost_peer(folder: Path) -> bool:
    """Return whether the recorded error is one that ranks raise when another rank ends or fails."""
    return _LOST_PEER.search(_read_record(folder, 0)[1]) is not None


def cause(failures: Sequence[Failure]) -> Failure:
    """Return the failure that most probably caused the others.

    Crashes come first, then exceptions, then exits and other signals, then exceptions from lost
    peers, and last the ranks that the launcher stopped. Within a kind, the earliest failure comes
    first.
    """
    # Sort by kind before time: a killed rank records no time, and its peers fail before the
    # launcher notices its end.
    return min(failures, key=lambda failure: (_kind(failure), failure.time, failure.rank))


def _kind(failure: Failure) -> int:
    if failure.stopped:
        return 4
    if failure.exception:
        return 3 if _LOST_PEER.search(failure.exception) else 1
    return 0 if failure.signal_name in _CRASHES else 2


def report(failures: Sequence[Failure], world_size: int, *, full_traceback: bool) -> str:
    """Return a line for each failed rank except the cause, then the cause's traceback and exception.

    A stopped rank has a line only if its place is known. At most `_SHOWN` ranks have a line.
    """
    first = cause(failures)
    others = [each for each in failures if each is not first and (each.place or not each.stopped)]
    others.sort(key=lambda failure: failure.rank)
    lines = [each.summary for each in others[:_SHOWN]]
    if len(others) > _SHOWN:
        lines.append(f"and {len(others) - _SHOWN} more")
    if lines:
        num_failed = 1 + sum(not each.stopped for each in others)
        head = f"accel-fn launch: {num_failed} of {world_size} ranks failed"
        lines = [head, *lines, ""]
    last = "\n".join([*first.stack.splitlines(), first.process, first.last_line])
    # Fold the error's text as well as the stack: an error from a loader's worker contains the
    # worker's traceback.
    lines.append(last if full_traceback else fold(last))
    return "\n".join(lines) + "\n"


# ---- the user's lines in a traceback or stack dump

_FRAME = re.compile(r'^  File "(.+)", line (\d+),? in (.+)$', re.MULTILINE)
_FRAME_AND_CODE = r'^  File ".+", line \d+, in .+(?:\n    .*|\n  \[Previous line .*)*'
_FRAMES = re.compile(rf"(?:{_FRAME_AND_CODE}(?:\n|\Z))+", re.MULTILINE)


class _Frame(NamedTuple):
    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def place_in_traceback(stack: str) -> str:
    """Return the user's innermost line in a traceback; empty if there is none."""
    # Python prints the tracebacks of an error's causes before the error's own.
    own = stack.rpartition("Traceback (most recent call last):")[2]
    return next((str(each) for each in _frames(own, reverse=True) if _is_users(each)), "")


def place_of_wait(dump: str) -> str:
    """Return the user's innermost line in a stack dump, if that line waits in accel_fn or torch."""
    # Read the last dump: processes that the rank forked may have written earlier ones.
    own = dump.rpartition("Stack (most recent call first):")[2]
    frames = [each for each in _frames(own) if not is_in_python(each.file)]
    if not frames or _is_users(frames[0]):
        return ""
    return next((str(each) for each in frames if _is_users(each)), "")


def fold(stack: str) -> str:
    """Replace successive frames of accel_fn and torch by one line that counts them.

    The innermost frame of each traceback stays.
    """
    return _FRAMES.sub(_fold, stack)


def _fold(frames: re.Match[str]) -> str:
    *outer, innermost = re.findall(_FRAME_AND_CODE, frames[0], re.MULTILINE)
    lines: list[str] = []
    for is_users, group in itertools.groupby(outer, lambda text: _is_users(*_frames(text))):
        run = list(group)
        libraries = [Path(each).name for each in _libraries() if f'"{each}' in "".join(run)]
        if is_users or not libraries or len(run) == 1:
            lines += run
        else:
            count = f"{len(run)} frames of {' and '.join(libraries)}"
            lines.append(f"  [{count}; --full-traceback shows them]")
    return "\n".join([*lines, innermost, ""])


def _frames(stack: str, *, reverse: bool = False) -> Iterator[_Frame]:
    found = [_Frame(*groups) for groups in _FRAME.findall(stack)]
    return reversed(found) if reverse else iter(found)


def _is_users(frame: _Frame) -> bool:
    return not is_in_python(frame.file) and not frame.file.startswith(_libraries())


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Return the folders of accel_fn and of torch, without importing torch."""
    torch = importlib.util.find_spec("torch")
    folders = [Path(__file__).parents[1]]
    if torch is not None and torch.origin is not None:
        folders.append(Path(torch.origin).parent)
    return tuple(f"{folder}{os.sep}" for folder in folders)
