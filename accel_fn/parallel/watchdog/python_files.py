"""Files of Python's own, which a report about a user's program leaves out."""

import os
import re

_PYTHON = f"{os.path.dirname(os.__file__)}{os.sep}"
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")


def is_in_python(file: str) -> bool:
    """Is this file of the standard library?"""
    return file.startswith((_PYTHON, "<frozen ")) and not _INSTALLED.search(file)
