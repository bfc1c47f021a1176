"""examples/notebook.ipynb, executed by a kernel of its own."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.examples.running import EXAMPLES


@pytest.mark.slow
def test_two_processes_of_the_notebook_return_the_losses_of_one(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    NotebookClient(notebook, timeout=500, resources={"metadata": {"path": tmp_path}}).execute()
    values = [
        ast.literal_eval(output.data["text/plain"])
        for cell in notebook.cells
        for output in cell.get("outputs", [])
    ]
    on_two, on_one = values
    assert on_one[-1] < 0.5 * on_one[0]
    # Rounding of float32 may move the last of the four decimals.
    assert on_two == [pytest.approx(on_one, rel=0, abs=1.01e-4)] * 2
