"""Names of checkpoints in their folder: an unfinished or half removed one has another name."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accel_fn.checkpoint.files import sync
from accel_fn.errors import CheckpointError, message

COMMON = "common.pt"
"""The file of the non-tensor state, which is equal on all ranks."""
COMMON_KEYS = {"scaler", "steps"}

_STEP = re.compile(r"step_(\d{8,})")
_NEW, _OLD = ".new_", ".old_"
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)
_TRIES = 8


def name_of(step: int) -> str:
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's name; None for any other name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match and path.name == name_of(int(match[1])) else None


def is_name(text: str) -> bool:
    return text not in ("", "..") and "\0" not in text and Path(text).name == text


def file_of(kind: str, rank: int, ending: str) -> str:
    return f"{kind}_{rank:05d}.{ending}"


def steps_in(folder: Path) -> list[int]:
    """List the steps of the checkpoints in a folder, in order; the list is empty if there is no folder.

    If a run was killed after it had renamed a checkpoint to replace it, first give the checkpoint its
    name back.
    """
    _rename_back(folder)
    try:
        found = [step_of(path) for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(step for step in found if step is not None)


def absolute(folder: Path) -> Path:
    try:
        return folder.absolute()
    except FileNotFoundError:
        rule = "be an absolute path, since the working folder was removed"
        raise CheckpointError(message("save", "folder", rule, str(folder))) from None


@contextmanager
def reading(folder: Path, function: str) -> Iterator[None]:
    """Refuse a folder whose names or checkpoints this user may not read."""
    try:
        yield
    except OSError as error:
        rule = f"be one that can be read ({error.strerror})"
        raise CheckpointError(message(function, "folder", rule, str(folder))) from error


def unfinished_folder(folder: Path, step: int) -> Path:
    return folder / f"{_NEW}{name_of(step)}"


def rename(path: Path, target: Path) -> None:
    """Rename a file or a folder.

    If NFS loses a reply, it repeats the request, and reports an error although the rename
    succeeded. So ignore an error if the file or folder already has its new name.
    """
    before = path.stat()
    try:
        path.rename(target)
    except OSError:
        if path.exists() or not target.exists() or not os.path.samestat(target.stat(), before):
            raise


def rename_finished(unfinished: Path, final: Path) -> None:
    """Rename an unfinished checkpoint to its final name, in one step if that name is free.

    Otherwise the existing checkpoint with that name is renamed first. If the run is killed between
    the two steps, `steps_in` and `recover` rename the existing checkpoint back. If a reader renames
    it back between the two steps, it is renamed aside again.
    """
    for left in reversed(range(_TRIES)):
        try:
            rename(unfinished, final)
            break
        except OSError as error:
            if error.errno not in _TAKEN or not left:
                raise
        rename(final, final.with_name(_OLD + final.name))
    sync(final.parent)


def recover(folder: Path) -> list[Path]:
    """Give checkpoints their names back that a killed run had renamed; return the folders to remove."""
    _rename_back(folder)
    return [path for start in (_NEW, _OLD) for path in folder.glob(f"{start}*")]


def hide(path: Path) -> Path:
    """Rename a checkpoint, so that no reader opens it while it is removed."""
    hidden = path.with_name(_NEW + "removed_" + path.name)
    rename(path, hidden)
    return hidden


def _rename_back(folder: Path) -> None:
    """Give checkpoints that were renamed aside their names back, unless the name is in use.

    If another process takes the name meanwhile, `rename` fails: it never replaces a folder that has
    files.
    """
    for aside in folder.glob(f"{_OLD}*"):
        final = aside.with_name(aside.name.removeprefix(_OLD))
        if not final.exists():
            with suppress(OSError):
                aside.rename(final)
