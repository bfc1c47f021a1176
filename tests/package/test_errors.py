"""accel_fn.errors: the classes, and that accel_fn raises no others on purpose."""

import ast
import builtins
import inspect

import pytest

import accel_fn as af
from tests.package.sources import PACKAGE, SOURCES, nodes

CLASSES = {
    name: value
    for name, value in vars(af.errors).items()
    if inspect.isclass(value) and issubclass(value, Exception)
}

# Errors of others that the package raises, and why.
FOREIGN = {
    "SignalException": "as torch's agent expects of a handler",
    "StopIteration": "the end of an iterator",
    "AttributeError": "what Python expects for a name that a module does not have",
    "ValueError": "caught where a manifest is read: a CheckpointError",
    "click": "the command line's own errors, which click prints",
    "dist.DistStoreError": "as torch's stores raise it; caught where ranks meet",
    "pickle.PicklingError": "caught by gather: a BatchError",
    "CannotReplayError": "caught by the comparison of a loss, of which it is the reason",
    "RuntimeError": "an error of the user's data set, as torch raises it again",
    "EOFError": "as a pipe raises it whose writer is gone",
    "TypeError": "caught where an optimizer is compiled: a PlanError",
    "SystemExit": "the end of the process",
}


def raised_names(path):
    """List the names after `raise` in a file, without variables that hold a caught error."""
    for node in nodes(path, ast.Raise):
        call = node.exc
        if call is not None:
            name = ast.unparse(call.func if isinstance(call, ast.Call) else call)
            is_variable = not isinstance(call, ast.Call) and name.islower()
            is_conditional = isinstance(call, ast.IfExp)
            if not (is_variable or is_conditional):
                yield name


def functions_that_make_errors():
    """List the functions whose annotation promises one of our errors."""
    for path in SOURCES:
        for node in nodes(path, ast.FunctionDef):
            if ast.unparse(node.returns or node.args) in CLASSES:
                yield node.name


def test_every_error_that_is_raised_on_purpose_is_ours():
    ours = {*CLASSES, *functions_that_make_errors()}
    found = {
        "click" if name.startswith("click.") else name
        for path in SOURCES
        for name in raised_names(path)
        # private: of its module
        if name.removeprefix("self.") not in ours and not name.startswith("_")
    }
    again = {"failure.kind", "type(error)", "failures.pop", "error", "ending.error"}
    assert found - again <= FOREIGN.keys()


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
        node.name
        for path in SOURCES
        if path != PACKAGE / "errors.py"
        for node in nodes(path, ast.ClassDef)
        if not node.name.startswith("_")
        if any(ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases)
    }
    # one is never raised, but the cause of another error; one never leaves the comparison
    assert found == {"RankTraceback", "CannotReplayError"}
