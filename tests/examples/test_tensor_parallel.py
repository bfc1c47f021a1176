"""examples/tensor_parallel.py, as its docstring says: a mesh of four processes prints the losses of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.test_programs import FIGURE, compare, output_of

MESH = ("--mesh", "dp=-1,tp=2")


@pytest.mark.slow
def test_a_mesh_of_four_processes_prints_the_losses_of_one(tmp_path: Path) -> None:
    alone = output_of("tensor_parallel", "--epochs", "2", folder=tmp_path)
    first, last = map(float, FIGURE.findall(alone))
    assert last < 0.95 * first
    for wrap in ((), ("--fsdp",)):
        arguments = ("--epochs", "2", *wrap)
        on_mesh = output_of("tensor_parallel", *arguments, folder=tmp_path, size=4, options=MESH)
        compare(alone, on_mesh)
