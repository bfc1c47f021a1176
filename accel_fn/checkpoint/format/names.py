"""Names of checkpoints in their folder: what is half written or half removed has another."""

from __future__ import annotations

import errno
import re
from contextlib import suppress
from pathlib import Path

from accel_fn.checkpoint.format.hashing import sync

COMMON = "common.pt"
"""The file of what is alike on all ranks and no tensor."""
OF_ALL = {"scaler", "steps"}
"""What it holds."""

_STEP = re.compile(r"step_(\d{8,})")
_NEW, _OLD = ".new_", ".old_"
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)
_TRIES = 8


def name_of(step: int) -> str:
    """`step_00001200`."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in the name of a checkpoint; None for anything else."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match and path.name == name_of(int(match[1])) else None


def is_name(text: str) -> bool:
    """Can a folder beside others have it?"""
    return text not in ("", "..") and "\0" not in text and Path(text).name == text


def file_of(kind: str, rank: int, ending: str) -> str:
    """The name of a file that a rank writes: `tensors_00003.bin`."""
    return f"{kind}_{rank:05d}.{ending}"


def steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, in order; none where there is no folder.

    One that a kill has left aside is found as well: it gets its name back here.
    """
    _give_back(folder)
    try:
        found = [step_of(path) for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(step for step in found if step is not None)


def draft_of(folder: Path, step: int) -> Path:
    """Where a checkpoint is written before it has its name."""
    return folder / f"{_NEW}{name_of(step)}"


def publish(draft: Path, final: Path) -> None:
    """Give a draft its name, in one step where the name is free.

    Where it is not, the checkpoint that holds it steps aside first; after a kill between
    the two, `steps_in` and `recover` give that one its name back. A reader that does so between
    the two makes it step aside once more.
    """
    for left in reversed(range(_TRIES)):
        try:
            draft.rename(final)
            break
        except OSError as error:
            if error.errno not in _TAKEN or not left:
                raise
        final.rename(_aside(final))
    sync(final.parent)


def recover(folder: Path) -> list[Path]:
    """Give back its name to a checkpoint that a kill has left aside; what else is to be removed."""
    _give_back(folder)
    return [path for start in (_NEW, _OLD) for path in folder.glob(f"{start}*")]


def hide(path: Path) -> Path:
    """Take a checkpoint's name away, so that nobody reads what is being removed."""
    hidden = path.with_name(_NEW + "removed_" + path.name)
    path.rename(hidden)
    return hidden


def _aside(final: Path) -> Path:
    return final.with_name(_OLD + final.name)


def _give_back(folder: Path) -> None:
    """No name is ever taken from another: a folder that is not empty is not renamed over."""
    for aside in folder.glob(f"{_OLD}*"):
        final = aside.with_name(aside.name.removeprefix(_OLD))
        if not final.exists():
            with suppress(OSError):
                aside.rename(final)
