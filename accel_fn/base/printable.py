"""Text that a terminal prints as it is, in one line."""

from __future__ import annotations

import re

UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, ends of lines, and halves of characters, which UTF-8 does not have."""


def printable(text: str) -> str:
    """Escape what changes a terminal's state or cannot be printed."""
    return UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)
