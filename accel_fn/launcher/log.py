"""What a launcher says itself, on stderr: a launch goes on where nobody reads that any more."""

from __future__ import annotations

import os
import sys


def say(words: str) -> None:
    """A line of the launcher's own."""
    tell(f"accel-fn launch: {words}\n")


def tell(text: str) -> None:
    """Text as it is."""
    try:
        print(text, end="", file=sys.stderr, flush=True)
    except OSError:  # a closed terminal or pipe, on which python would stumble again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
