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

for name in set(accel_fn.__all__) - {"wrap_fsdp"}:
    getattr(accel_fn, name)
heavy = {"torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "pydantic"}
print(*heavy & sys.modules.keys())

from accel_fn import *
from accel_fn.testing import assert_equivalent, simulate

assert launch is accel_fn.launch
assert dict(inspect.getmembers(accel_fn))["launch"] is launch
assert "  launch(fn" in pydoc.render_doc(accel_fn, renderer=pydoc.plaintext)
"""
LIBRARIES = {
    *("torch", "numpy", "click", "cloudpickle", "yaml", "rich"),
    *("safetensors", "tqdm", "xxhash", "torchao", "hypothesis", "deepspeed"),
}
IMPORTED = f"""
import sys
import accel_fn, accel_fn.testing
print(*sorted({LIBRARIES} & sys.modules.keys()))
"""


@pytest.mark.slow
def test_every_name_loads_without_an_extra_and_all_but_one_without_fsdp(tmp_path):
    done = run_python(tmp_path, "-c", WITHOUT_EXTRAS)
    assert (done.stdout, done.stderr) == ("\n", "")


def test_the_package_imports_no_library_until_a_name_is_used(tmp_path):
    done = run_python(tmp_path, "-c", IMPORTED)
    assert (done.stdout, done.stderr) == ("\n", "")
