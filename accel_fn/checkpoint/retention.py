"""Which checkpoints stay when a new one is whole."""

from __future__ import annotations

import shutil
from pathlib import Path

from accel_fn.checkpoint.format.names import hide, recover
from accel_fn.checkpoint.listing import list_checkpoints


def tidy(folder: Path) -> None:
    """Remove what kills have left behind, and give back its name to what stood aside."""
    for path in recover(folder):
        shutil.rmtree(path, ignore_errors=True)


def retain(
    folder: Path, new: int, keep: int, keep_every: int | None, resumed_from: int | None
) -> None:
    """Remove all but the newest `keep` whole checkpoints; `new` is the step of the newest.

    Those whose step is a multiple of `keep_every` stay, and so does the one that
    this run was resumed from. One that is not whole is left to its owner. The others are
    newest by the time of writing: a run that went back has a lower step than what it left
    there. Clocks differ between machines, and are coarse, so that says nothing of the new one.
    """
    whole = [each for each in list_checkpoints(folder) if not each.damage]
    whole.sort(key=lambda each: (each.step == new, each.saved_at, each.step))
    for each in whole[:-keep]:
        if each.step == resumed_from or (keep_every and each.step % keep_every == 0):
            continue
        shutil.rmtree(hide(each.path), ignore_errors=True)
