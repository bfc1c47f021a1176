"""Runs the cells of a notebook in a kernel of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tests.cli.commands import surroundings


def run_cells(folder: Path, *cells: str, allow_errors: bool = False) -> list[Sequence]:
    """Run cells one after the other; return the outputs of each."""
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        allow_errors=allow_errors,
        resources={"metadata": {"path": folder}},
    )
    variables = surroundings(folder)
    # Where it is set, ipykernel does not show what processes of a cell print.
    del variables["PYTEST_CURRENT_TEST"]
    client.execute(env=variables)
    return [cell.outputs for cell in notebook.cells]
