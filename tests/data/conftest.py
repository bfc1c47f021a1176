"""A fixture for the tests of prefetch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.prefetch import readers


@pytest.fixture
def no_reader_is_left() -> Iterator[None]:
    """Fail if a thread of prefetch is alive before or after a test."""
    assert readers() == []
    yield
    assert readers() == []
