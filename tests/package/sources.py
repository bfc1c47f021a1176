"""The sources of the package, except the page that is for tests; each is parsed once."""

import ast
from functools import cache
from pathlib import Path

import accel_fn as af

PACKAGE = Path(af.__file__).parent
SOURCES = sorted({*PACKAGE.rglob("*.py")} - {PACKAGE / "testing/internals.py"})


@cache
def parsed(path):
    return ast.parse(path.read_text())


@cache
def every_node(path):
    return [*ast.walk(parsed(path))]


def nodes(path, *kinds):
    """All nodes of these kinds in a file."""
    return [node for node in every_node(path) if isinstance(node, kinds)]
