"""Bars of tqdm, for where somebody looks: on the main rank, in a terminal or a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import length_hint
from typing import Any

_DELAY_S = 1.0  # what takes less needs no bar


def open_bar(*, is_main: bool, wanted: bool | None = None, **options: Any) -> Any:
    """Open tqdm's bar on the main rank, or return None; by default where somebody looks."""
    looked_at = sys.stderr.isatty() or "ipykernel" in sys.modules
    if not is_main or not (looked_at if wanted is None else wanted):
        return None
    from tqdm.auto import tqdm

    return tqdm(**options)


@contextmanager
def bytes_bar(text: str, total: int, *, is_main: bool = True) -> Iterator[Callable[[int], object]]:
    """Show how many of so many bytes are done, once it takes a second; yield what counts them."""
    options: dict[str, Any] = {"unit": "B", "unit_scale": True, "delay": _DELAY_S, "leave": False}
    bar = open_bar(is_main=is_main, desc=text, total=total, **options)
    if bar is None:
        yield lambda _: None
    else:
        with bar:
            yield bar.update


def loader_length(loader: Iterable[Any]) -> int | None:
    """Return the length of a loader, if it has one; an error in it must not end the loop."""
    try:
        return length_hint(loader) or None
    except Exception:
        return None
