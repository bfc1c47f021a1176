"""Cases of a product of parameters: a few run by default, all of them with the slow tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def pinned(pins: Iterable[Sequence[Any]], *values: Iterable[Any]) -> list[Any]:
    """Return every case of the product of values; those that are not pinned are slow."""
    pins = [tuple(each) for each in pins]
    cases = list(product(*values))
    assert all(each in cases for each in pins)
    return [each if each in pins else pytest.param(*each, marks=pytest.mark.slow) for each in cases]
