"""Puts the folder of the examples on the path, so that tests import them as they import each other."""

from __future__ import annotations

import sys

import pytest

from tests.examples.running import EXAMPLES, Run

sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow) for name in ("on_one", "on_two")],
    ids=["one process", "two processes"],
)
def any_run(request: pytest.FixtureRequest) -> Run:
    """The run of a module's example on one process, then that on two."""
    run: Run = request.getfixturevalue(request.param)
    return run
