"""The command line, `accel-fn`: each command parses, calls one public function, and prints."""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    """Run the command line. Its libraries are the extra `cli`."""
    try:
        app = importlib.import_module("accel_fn.cli._app").app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("accel_fn"):
            raise
        sys.exit(
            f"accel-fn: the command line needs {error.name}, which is not installed; "
            'pip install "accel-fn[cli]"'
        )
    app(prog_name="accel-fn")
