"""Bars of tqdm, for where somebody looks: on the main rank, in a terminal or a notebook."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from operator import length_hint
from typing import Any

from accel_fn.base.state import DistState


def open_bar(state: DistState, *, wanted: bool | None = None, **options: Any) -> Any:
    """Open tqdm's bar on the main rank, or return None; by default where somebody looks."""
    looked_at = sys.stderr.isatty() or "ipykernel" in sys.modules
    if not state.is_main or not (looked_at if wanted is None else wanted):
        return None
    from tqdm.auto import tqdm

    return tqdm(**options)


def length_of(loader: Iterable[Any]) -> int | None:
    """Return the length of a loader, if it has one; an error in it must not end the loop."""
    try:
        return length_hint(loader) or None
    except Exception:
        return None
