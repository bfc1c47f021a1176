"""Loads the simulated device before any test is collected: torch takes one such device a process."""

from pathlib import Path

import pytest

from tests.sim import build

if build.compiler() is not None:
    from tests.sim import device

    assert device.native


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark these tests as those of an accelerator, beside which the session runs them."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("gpu")
