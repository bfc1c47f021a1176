"""Workers that tests of data leave behind."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def workers_end_with_their_module():
    """Torch waits up to 5 s for each worker of a forgotten iterator: here, not in a simulated rank."""
    yield
    gc.collect()
