"""Is there what torch's compiler needs on a CPU? A machine with only Python and pip may not have it."""

import os
import shutil

import pytest

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler"
)
