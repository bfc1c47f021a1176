"""The examples can be imported here as they import each other: their folder is on the path."""

import sys

from tests.examples.running import EXAMPLES

sys.path.insert(0, str(EXAMPLES))
