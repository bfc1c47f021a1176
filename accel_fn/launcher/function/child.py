"""The first code of a rank that runs a function: it takes the call from a file, and leaves its end in one.

Without torch: a function that needs none does not wait for it.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import linecache
import os
import pickle
import sys
import time
import traceback
import types
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_fn.errors import ArgumentTypeError, RankError, message
from accel_fn.launcher.processes import worker

CALL, VALUE, RAISED, CRASH = "call", "value", "raised", "crash"


@dataclass(frozen=True, slots=True)
class Call:
    """What every rank runs, and what of its caller it finds around it."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    command_line: Sequence[str]
    sources: Mapping[str, Any]
    """Code that is in no file, as of a notebook's cells: tracebacks show its lines."""


@dataclass(frozen=True, slots=True)
class Raised:
    """What a rank raised. `error` is a pickle of its own: its type may not load everywhere."""

    error: bytes
    last_line: str
    traceback: str
    time: float


def main(caller: str, cpus: str, place: str) -> None:
    """Be one rank of a caller, on some of the processors, and exit."""
    worker.end_with(int(caller))
    if cpus:
        worker.bind(cpus)
    folder = Path(place)
    own = folder / os.environ["RANK"]
    worker.sign(own)
    # Where native code ends, this says which line called it.
    faulthandler.enable(os.open(own / CRASH, os.O_WRONLY | os.O_CREAT))
    try:
        value = _run((folder / CALL).read_bytes())
    except BaseException as error:
        _write(own / RAISED, pickle.dumps(_raised(error)))
        sys.exit(1)
    _write(own / VALUE, value)


def _run(data: bytes) -> bytes:
    """The pickle of what the function returns."""
    call: Call = pickle.loads(data)
    sys.argv[:] = call.command_line
    linecache.cache.update(call.sources)
    value = call.fn(*call.args, **call.kwargs)
    try:
        return dumps(value)
    except Exception as error:
        rule = f"return what can be pickled ({error})"
        raise ArgumentTypeError(message("launch", "fn", rule, value)) from error


def dumps(value: Any) -> bytes:
    """A pickle that holds what no module defines: functions and classes of a notebook or a script."""
    kind = importlib.import_module("cloudpickle").Pickler
    reducers = ChainMap({types.CodeType: _reduce_code}, kind.dispatch_table)
    pickled = io.BytesIO()
    type("Pickler", (kind,), {"dispatch_table": reducers})(pickled).dump(value)
    return pickled.getvalue()


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    """As cloudpickle does, with the file's name: from 3.1.3 on it puts `<dynamic-code>` in its place."""
    kind = importlib.import_module("cloudpickle").Pickler
    make, parts = kind.dispatch_table[types.CodeType](code)
    return _make_code, (make, parts, code.co_filename)


def _make_code(make: Callable[..., types.CodeType], parts: Any, file: str) -> types.CodeType:
    """Code whose lines tracebacks and faulthandler find."""
    return make(*parts).replace(co_filename=file)


def _raised(error: BaseException) -> Raised:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    told = traceback.TracebackException(type(error), error, frames)
    last_line = "".join(told.format_exception_only()).strip()
    return Raised(_travelling(error, last_line), last_line, "".join(told.format()), time.time())


def _travelling(error: BaseException, last_line: str) -> bytes:
    """The error itself; one of ours where it would end the caller, or is lost on the way."""
    if not isinstance(error, Exception):
        return dumps(RankError(message("launch", "fn", "return or raise an Exception", last_line)))
    lost = last_line
    for sent in (error, _Parts(type(error), error.args, vars(error))):
        try:
            data = dumps(sent)
            if type(pickle.loads(data)) is type(error):
                return data
        except Exception as reason:
            lost = f"{last_line} (which cannot be pickled: {reason})"
    return dumps(RankError(lost))


@dataclass(frozen=True, slots=True)
class _Parts:
    """An error whose `__init__` does not take its own `args`, as pickle would have it."""

    kind: type[Exception]
    args: tuple[Any, ...]
    attributes: Mapping[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (self.kind, self.args, dict(self.attributes))


def _remade(kind: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    error = kind.__new__(kind, *args)
    vars(error).update(attributes)
    return error


def _write(path: Path, data: bytes) -> None:
    """Whole, or not there."""
    new = path.with_suffix(".new")
    new.write_bytes(data)
    os.replace(new, path)
