"""accel_fn.errors: the classes, and that accel_fn raises no others on purpose."""

import builtins
import inspect

import pytest

import accel_fn as af

CLASSES = {
    name: value
    for name, value in vars(af.errors).items()
    if inspect.isclass(value) and issubclass(value, Exception)
}


def test_all_lists_every_class():
    assert sorted(CLASSES) == af.errors.__all__


@pytest.mark.parametrize("kind", CLASSES.values(), ids=CLASSES)
def test_an_error_is_documented_public_and_of_a_builtin_class(kind):
    assert kind.__module__ == "accel_fn.errors"
    assert kind.__doc__
    assert issubclass(kind, af.AccelError)
    theirs = [each for each in kind.__mro__[1:] if each.__module__ == builtins.__name__]
    assert theirs[0] is not Exception or kind is af.AccelError
