"""Tests that have code compiled: slow ones, and none where no C++ compiler is."""

import os
import shutil
from collections.abc import Callable

import pytest

there = shutil.which(os.environ.get("CXX", "g++")) is not None
MARKS = [pytest.mark.slow, pytest.mark.skipif(not there, reason="needs a C++ compiler")]


def compiles(test: Callable[..., None]) -> Callable[..., None]:
    """A decorator of such a test."""
    for mark in MARKS:
        test = mark(test)
    return test
