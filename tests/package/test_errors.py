"""accel_fn.errors: the classes, and that accel_fn raises no others on purpose."""

import ast
import builtins
import inspect
from pathlib import Path

import pytest

import accel_fn as af

PACKAGE = Path(af.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
CLASSES = {
    name: value
    for name, value in vars(af.errors).items()
    if inspect.isclass(value) and issubclass(value, Exception)
}

# Errors of others that a file raises, and why.
FOREIGN = {
    "launcher/processes/agent.py SignalException": "as torch's agent expects of a handler",
    "data/sampled_batches.py StopIteration": "the end of an iterator",
    "__init__.py AttributeError": "what Python expects for a name that a module does not have",
    "testing/__init__.py AttributeError": "likewise",
    "checkpoint/format/manifest.py ValueError": "caught in read_manifest: a CheckpointError",
    "cli/*.py click": "the command line's own errors, which click prints",
    "comm/stores.py dist.DistStoreError": "as torch's stores raise it; caught in comm/meeting.py",
    "comm/gather.py pickle.PicklingError": "caught by gather: a BatchError",
    "data/prefetch.py StopIteration": "the end of an iterator",
    "step/checks/draws.py CannotReplayError": "caught by the comparison, of which it is the reason",
    "step/checks/collated.py CannotReplayError": "likewise",
    "step/checks/look.py CannotReplayError": "likewise",
    "step/checks/deals.py CannotReplayError": "likewise",
    "step/checks/trial.py CannotReplayError": "likewise",
    "step/checks/writes.py CannotReplayError": "likewise",
    "data/workers.py RuntimeError": "an error of the user's data set, as torch raises it again",
    "data/workers.py EOFError": "as a pipe raises it whose writer is gone",
    "transforms/compile/optimizer_in_graph.py TypeError": "caught there: a PlanError",
    "transforms/preemption.py SystemExit": "the end of the process",
}


def raised_names(path):
    """List the names after `raise` in a file, without variables that hold a caught error."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and node.exc is not None:
            call = node.exc
            name = ast.unparse(call.func if isinstance(call, ast.Call) else call)
            is_variable = not isinstance(call, ast.Call) and name.islower()
            is_conditional = isinstance(call, ast.IfExp)
            if not (is_variable or is_conditional):
                yield name


def functions_that_make_errors():
    """List the functions whose annotation promises one of our errors."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.FunctionDef)
                and ast.unparse(node.returns or node.args) in CLASSES
            ):
                yield node.name


def test_every_error_that_is_raised_on_purpose_is_ours():
    ours = {*CLASSES, *functions_that_make_errors()}
    found = set()
    for path in SOURCES:
        file = str(path.relative_to(PACKAGE))
        for name in raised_names(path):
            if name.removeprefix("self.") in ours or name.startswith("_"):  # private: of its module
                continue
            found.add("cli/*.py click" if name.startswith("click.") else f"{file} {name}")
    again = {"comm/messages.py failure.kind", "checkpoint/weights/export.py type(error)"}
    again |= {
        "comm/main_rank.py failures.pop",
        "errors.py error",
        "testing/simulation.py ending.error",
    }
    assert found - again == FOREIGN.keys()


def test_all_lists_every_class():
    assert sorted(CLASSES) == af.errors.__all__


@pytest.mark.parametrize("kind", CLASSES.values(), ids=CLASSES)
def test_an_error_is_documented_public_and_of_a_builtin_class(kind):
    assert kind.__module__ == "accel_fn.errors"
    assert kind.__doc__
    assert issubclass(kind, af.AccelError)
    theirs = [each for each in kind.__mro__[1:] if each.__module__ == builtins.__name__]
    assert theirs[0] is not Exception or kind is af.AccelError


def test_no_class_of_errors_stands_anywhere_else():
    found = {
        f"{path.relative_to(PACKAGE)} {node.name}"
        for path in SOURCES
        if path != PACKAGE / "errors.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        if any(ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases)
    }
    # one is never raised, but the cause of another error; one never leaves the comparison
    assert found == {
        "launcher/function/ranks.py RankTraceback",
        "step/checks/draws.py CannotReplayError",
    }
