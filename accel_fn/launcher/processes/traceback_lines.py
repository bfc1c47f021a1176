"""The line of the user's code that a rank was at, from its traceback or its stack dump."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from accel_fn.comm.watchdog.hang_report import is_in_python

_FRAME = re.compile(r'^  File "(.+)", line (\d+),? in (.+)$', re.MULTILINE)


class _Frame(NamedTuple):
    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def place_in_traceback(stack: str) -> str:
    """The user's innermost line in a traceback; empty if there is none."""
    own = stack.rpartition("Traceback (most recent call last):")[2]  # without those of its causes
    return next((str(each) for each in _frames(own, reverse=True) if _is_users(each)), "")


def place_of_wait(dump: str) -> str:
    """The user's innermost line in a dump of faulthandler, if it waits there in accel_fn or torch."""
    own = dump.rpartition("Stack (most recent call first):")[2]  # without those of its forks
    frames = [each for each in _frames(own) if not is_in_python(each.file)]
    if not frames or _is_users(frames[0]):
        return ""
    return next((str(each) for each in frames if _is_users(each)), "")


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
