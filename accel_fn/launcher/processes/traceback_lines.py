"""The lines of the user's code in a rank's traceback or stack dump."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from accel_fn.parallel.hang_report import is_in_python

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
    """The user's innermost line in a traceback; empty if there is none."""
    # Python prints the tracebacks of an error's causes before its own.
    own = stack.rpartition("Traceback (most recent call last):")[2]
    return next((str(each) for each in _frames(own, reverse=True) if _is_users(each)), "")


def place_of_wait(dump: str) -> str:
    """The user's innermost line in a dump of faulthandler, if it waits there in accel_fn or torch."""
    # Processes that the rank forked may have written to the file before.
    own = dump.rpartition("Stack (most recent call first):")[2]
    frames = [each for each in _frames(own) if not is_in_python(each.file)]
    if not frames or _is_users(frames[0]):
        return ""
    return next((str(each) for each in frames if _is_users(each)), "")


def fold(stack: str) -> str:
    """Fold frames of accel_fn and torch to a line, except the innermost frame of each traceback."""
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
    """The folders of accel_fn and of torch, found without an import."""
    torch = importlib.util.find_spec("torch")
    folders = [Path(__file__).parents[2]]
    if torch is not None and torch.origin is not None:
        folders.append(Path(torch.origin).parent)
    return tuple(f"{folder}{os.sep}" for folder in folders)
