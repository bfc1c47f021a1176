"""Puts the folder of the examples on the path, so that tests import them as they import each
other."""

import sys

from tests.examples.running import EXAMPLES

sys.path.insert(0, str(EXAMPLES))
