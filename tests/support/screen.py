"""A terminal of this process, and what bars draw on it."""

from __future__ import annotations

import io
import sys
from contextlib import contextmanager
from functools import partialmethod

import pytest
from tqdm.auto import tqdm


class Screen(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@contextmanager
def on_screen():
    """A terminal of this process, on which every update of a bar is drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", Screen())
        every = partialmethod(tqdm.__init__, mininterval=0, miniters=1)
        patch.setattr(tqdm, "__init__", every)
        yield sys.stderr
    assert not tqdm._instances, "a bar was left open"


def last_line(screen):
    return screen.getvalue().rstrip().rpartition("\r")[2]
