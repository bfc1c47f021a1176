"""Retention: which checkpoints stay when a new one is whole."""

from __future__ import annotations

import shutil
from pathlib import Path

from accel_fn.checkpoint.format.names import hide, recover
from accel_fn.checkpoint.listing import list_checkpoints


def tidy(folder: Path) -> None:
    """Remove what killed runs have left, and rename back what was set aside."""
    for path in recover(folder):
        shutil.rmtree(path, ignore_errors=True)


def retain(
    folder: Path, new: int, keep: int, keep_every: int | None, resumed_from: int | None
) -> None:
    """Remove all but the newest `keep` whole checkpoints; `new` is the step of the newest.

    Multiples of `keep_every` stay, and so do the one that this run was resumed from, and
    damaged ones. The others are sorted by the time of writing: a run that went back has a lower
    step than what it left there. Clocks differ between machines, so `new` is the newest in any case.
    """
    whole = [each for each in list_checkpoints(folder) if not each.damage]
    whole.sort(key=lambda each: (each.step == new, each.saved_at, each.step))
    for each in whole[:-keep]:
        if each.step != resumed_from and not (keep_every and each.step % keep_every == 0):
            shutil.rmtree(hide(each.path), ignore_errors=True)
