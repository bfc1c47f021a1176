"""The line that is shown for a rank: the user's innermost, where it failed or where it waits."""

import json
import threading
import traceback

import pytest
import torch

import accel_fn as af
from accel_fn.launcher.processes.traceback_lines import place_in_traceback, place_of_wait


def traceback_of(fn):
    try:
        fn()
    except Exception:
        return traceback.format_exc()
    raise AssertionError("no error")


def line_of(fn):
    return f"{__file__}:{fn.__code__.co_firstlineno + 1} in {fn.__name__}"


def in_python():
    json.loads("}")


def in_torch():
    torch.nn.Linear(2, 2)(torch.ones(3))


def in_library():
    af.clip(-1.0)


def with_cause():
    try:
        in_python()
    except ValueError as error:
        raise KeyError from error


@pytest.mark.parametrize("fn", [in_python, in_torch, in_library])
def test_the_place_of_an_error_is_the_innermost_line_of_the_users(fn):
    assert place_in_traceback(traceback_of(fn)) == line_of(fn)


def test_the_place_of_an_error_is_not_that_of_its_cause():
    place = f"{__file__}:{with_cause.__code__.co_firstlineno + 4} in with_cause"
    assert place_in_traceback(traceback_of(with_cause)) == place


_USERS = ["/home/me/train.py", "/home/me/start.py"]
_LIBRARY, _PYTHON = [af.__file__, torch.__file__], [threading.__file__, "<frozen runpy>"]


@pytest.mark.parametrize(
    ("files", "place"),
    [
        ([*_LIBRARY, *_USERS], "/home/me/train.py:2 in fn"),
        ([*_PYTHON, *_LIBRARY, _USERS[0], *_LIBRARY, _USERS[1]], "/home/me/train.py:4 in fn"),
        ([*_PYTHON, *_USERS, *_LIBRARY], ""),  # it waits in the user's own code
        ([*_PYTHON, *_LIBRARY], ""),
    ],
)
def test_the_place_of_a_wait_is_the_innermost_line_of_the_users_if_it_waits_in_a_library(
    files, place
):
    lines = [f'  File "{file}", line {number} in fn' for number, file in enumerate(files)]
    earlier = [f'  File "{file}", line 9 in fn' for file in (*_LIBRARY, *_USERS)]
    head = "Stack (most recent call first):"
    assert place_of_wait("\n".join([head, *earlier, head, *lines, ""])) == place


@pytest.mark.parametrize("text", ["", "KeyError: 1\n", 'File "a.py", line 1, in fn'])
def test_text_without_a_users_line_has_no_place(text):
    assert place_in_traceback(text) == place_of_wait(text) == ""
