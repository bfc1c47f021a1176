"""The lines that are shown for a rank: the user's, where it failed or where it waits."""

import json
import re
import threading
import traceback

import pytest
import torch

import accel_fn as af
from accel_fn.launcher.failures import fold, place_in_traceback, place_of_wait


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


# -- frames that are folded


def in_a_hook():
    model = torch.nn.Sequential(torch.nn.Identity())
    model[0].register_forward_hook(lambda *_: in_python())
    model(torch.ones(3))


def in_a_hook_of_a_cause():
    try:
        in_a_hook()
    except ValueError as error:
        raise KeyError("gone") from error


def frames(text):
    """The function of each frame, and each line for folded frames."""
    return re.findall(
        r"^  (?:File .*, in )?(.+)$", re.sub(r"^    .*\n", "", text, flags=re.M), re.M
    )


def test_frames_of_torch_are_one_line_and_the_innermost_frame_is_kept():
    shown = frames(fold(traceback_of(in_torch)))
    assert shown == [
        *("traceback_of", "in_torch"),
        *("[2 frames of torch; --full-traceback shows them]", "forward"),
    ]


def test_the_users_frames_and_the_standard_librarys_below_them_stay_as_they_are():
    text = traceback_of(in_python)
    assert fold(text) == text
    whole = traceback_of(in_a_hook).splitlines()
    folded = fold(traceback_of(in_a_hook)).splitlines()
    assert [line for line in whole if line in folded] == [
        line for line in folded if "--full-traceback" not in line
    ]
    names = frames("\n".join(folded))
    assert [name for name in names if "frames" not in name] == [
        *("traceback_of", "in_a_hook", "<lambda>", "in_python"),
        *("loads", "decode", "raw_decode"),
    ]


def test_a_cause_is_folded_too_and_what_stands_between_tracebacks_stays():
    folded = fold(traceback_of(in_a_hook_of_a_cause))
    assert folded.count("frames of torch; --full-traceback shows them]\n") == 1
    assert "\n\nThe above exception was the direct cause of the following exception:\n\n" in folded
    assert folded.endswith(
        "in in_a_hook_of_a_cause\n    raise KeyError(\"gone\") from error\nKeyError: 'gone'\n"
    )


_CALLS = "    call()\n    ^^^^^^\n"


@pytest.mark.parametrize(
    ("files", "lines"),
    [
        ("ut", ["u", "t"]),
        ("utt", ["u", "t", "t"]),
        ("uttt", ["u", "[2 frames of torch", "t"]),
        ("uat", ["u", "a", "t"]),
        ("uataptu", ["u", "[5 frames of accel_fn and torch", "u"]),
        ("upppu", ["u", "p", "p", "p", "u"]),
        ("aau", ["[2 frames of accel_fn", "u"]),
        ("tuttutu", ["t", "u", "[2 frames of torch", "u", "t", "u"]),
    ],
)
@pytest.mark.parametrize("code", ["", _CALLS, f"{_CALLS}  [Previous line repeated 3 more times]\n"])
def test_runs_of_two_frames_and_more_are_folded(files, lines, code):
    """User, accel_fn, torch and Python, by their first letters."""
    names = {"u": _USERS[0], "a": af.__file__, "t": torch.__file__, "p": threading.__file__}
    shown = {letter: f'  File "{file}", line 3, in fn\n{code}' for letter, file in names.items()}
    text, expected = (
        "".join(shown.get(each, f"  {each}; --full-traceback shows them]\n") for each in some)
        for some in (files, lines)
    )
    head = "Traceback (most recent call last):\n"
    assert fold(f"{head}{text}") == f"{head}{expected}"
    assert fold(f"{head}{text}KeyError: 1\n") == f"{head}{expected}KeyError: 1\n"


def test_the_stack_of_a_crash_stays_as_it_is():
    lines = [f'  File "{file}", line 3 in fn' for file in (*_LIBRARY, *_LIBRARY, *_USERS)]
    text = "\n".join(["Current thread 0x1 (most recent call first):", *lines, ""])
    assert fold(text) == text
