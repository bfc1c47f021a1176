"""Without extras, only torch, numpy and typing_extensions can be imported."""

import pytest

from tests.cli.commands import run_python

BASE = """
import sys

class NoExtras:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in (
            "click", "cloudpickle", "hypothesis", "pydantic", "rich", "safetensors", "xxhash", "yaml"
        ):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoExtras())
"""
NAMES = """
import inspect, pydoc
import accel_fn
from accel_fn import *

assert launch is accel_fn.launch
assert dict(inspect.getmembers(accel_fn))["launch"] is launch
assert "  launch(fn" in pydoc.render_doc(accel_fn, renderer=pydoc.plaintext)
"""
CALL = """
import accel_fn as af

try:
    af.launch(print)
except ModuleNotFoundError as error:
    assert isinstance(error, af.AccelError)
    print(error)
"""
COMMAND = "sys.argv = ['accel-fn', 'launch', 'x.py']; from accel_fn.cli import main; main()"


@pytest.mark.parametrize(
    ("program", "output", "errors"),
    [
        (NAMES, "", ""),
        (CALL, 'launch: cloudpickle must be installed; in a clone of accel_fn: pip install ".[cli]"\n', ""),
        (COMMAND, "", "accel-fn: the command line needs click, which is not installed; "
         'in a clone of accel_fn: pip install ".[cli]"\n'),
    ],
    ids=["names", "call", "command"],
)  # fmt: skip
def test_a_base_installation_has_every_name_and_names_the_extra(tmp_path, program, output, errors):
    done = run_python(tmp_path, "-c", BASE + program)
    assert (done.stdout, done.stderr) == (output, errors)
