"""Launchers for the tests of the command line."""

import pytest

from tests.cli.launchers import Launchers


@pytest.fixture(scope="session")
def launchers():
    found = Launchers()
    yield found
    found.close()
