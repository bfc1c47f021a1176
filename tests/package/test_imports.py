"""A new process imports no more than what it uses, and needs no extra to load a name."""

import pytest

from tests.cli.commands import run_python

WITHOUT_EXTRAS = """
import inspect, pydoc, sys

class NoExtras:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("deepspeed", "hypothesis", "torchao"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoExtras())
import accel_fn
from accel_fn import *

assert launch is accel_fn.launch
assert dict(inspect.getmembers(accel_fn))["launch"] is launch
assert "  launch(fn" in pydoc.render_doc(accel_fn, renderer=pydoc.plaintext)
"""
IMPORTED = """
import sys
{program}
print(*sorted({libraries} & sys.modules.keys()))
"""
LIBRARIES = {
    *("torch", "numpy", "click", "cloudpickle", "pydantic", "yaml", "rich"),
    *("safetensors", "tqdm", "xxhash", "torchao", "hypothesis", "deepspeed"),
}
FSDP = {"torch.distributed.fsdp", "torch.distributed.tensor"}
EVERY_NAME_BUT_FSDP = """
import accel_fn
for name in set(accel_fn.__all__) - {"wrap_fsdp"}:
    getattr(accel_fn, name)
"""


def test_every_name_loads_without_an_extra(tmp_path):
    done = run_python(tmp_path, "-c", WITHOUT_EXTRAS)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    ("program", "libraries"),
    [("import accel_fn", LIBRARIES), (EVERY_NAME_BUT_FSDP, FSDP)],
    ids=["the package", "its names"],
)
def test_libraries_that_a_program_does_not_use_are_not_imported(tmp_path, program, libraries):
    done = run_python(tmp_path, "-c", IMPORTED.format(program=program, libraries=libraries))
    assert (done.stdout, done.stderr) == ("\n", "")
