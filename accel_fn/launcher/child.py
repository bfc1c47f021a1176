"""The first code of a rank of `launch`: it reads a call from a file, runs it, and writes the result.

It does not import torch, so a rank whose function does not need torch starts sooner.
"""

from __future__ import annotations

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
from typing import Any, ClassVar

import cloudpickle

from accel_fn.errors import ArgumentTypeError, RankError, message
from accel_fn.launcher import notebook, worker

CALL, VALUE, RAISED = "call", "value", "raised"


@dataclass(frozen=True, slots=True)
class Call:
    """The call that every rank makes, with the command line and the notebook cells of the caller."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    command_line: Sequence[str]
    sources: Mapping[str, Any]
    """Entries of `linecache` for code that is in no file, such as a notebook's cells.

    Tracebacks get the lines of this code from them.
    """


@dataclass(frozen=True, slots=True)
class Raised:
    """The exception of a rank. `error` is pickled, since the caller may not be able to load its type."""

    error: bytes
    last_line: str
    traceback: str
    time: float


def main(caller: str, cpus: str, place: str, displays: str) -> None:
    """Run the call in one rank, and write its result or its error into the rank's folder.

    `caller` is the process id of the launcher, and `place` the folder of the launch. `cpus` lists
    the processors to run on; if it is empty, the system chooses them. `displays` is the pipe to the
    notebook; it is empty outside of notebooks.
    """
    worker.open_streams()
    worker.die_with(int(caller))
    worker.print_whole_lines()
    if cpus:
        worker.bind(cpus)
    folder = Path(place)
    own, pid = folder / os.environ["RANK"], os.getpid()
    worker.record_stacks(own / worker.STACK)
    try:
        finish = notebook.send_displays(int(displays)) if displays else None
        value = _run((folder / CALL).read_bytes())
        if finish is not None:
            finish()
    except BaseException as error:
        # A process that `fn` has forked also gets here, but must not write a result: it is not the
        # rank.
        if os.getpid() != pid:
            raise
        _write(own / RAISED, pickle.dumps(_raised(error)))
        sys.exit(1)
    if os.getpid() == pid:
        _write(own / VALUE, value)


def _run(data: bytes) -> bytes:
    """Run the call; return its pickled result."""
    call: Call = pickle.loads(data)
    sys.argv[:] = call.command_line
    linecache.cache.update(call.sources)
    value = call.fn(*call.args, **call.kwargs)
    try:
        return dumps(value)
    except Exception as error:
        rule = f"return what can be pickled ({error})"
        raise ArgumentTypeError(message("launch", "fn", rule, value)) from error


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    """Pickle a code object as cloudpickle does, but keep the name of its file."""
    # From 3.1.3 on, cloudpickle replaces the file's name by `<dynamic-code>`. Tracebacks would then
    # show no line of the file.
    make, parts = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return _make_code, (make, parts, code.co_filename)


def _make_code(make: Callable[..., types.CodeType], parts: Any, file: str) -> types.CodeType:
    """Rebuild a code object with the name of its file, which tracebacks and faulthandler need."""
    return make(*parts).replace(co_filename=file)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    dispatch_table: ClassVar = ChainMap(
        {types.CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
    )


def dumps(value: Any) -> bytes:
    """Pickle a value; it may contain functions and classes that a notebook or a script defines."""
    pickled = io.BytesIO()
    _Pickler(pickled).dump(value)
    return pickled.getvalue()


def _raised(error: BaseException) -> Raised:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    shown = traceback.TracebackException(type(error), error, frames)
    last_line = "".join(shown.format_exception_only()).strip()
    return Raised(_dump_error(error, last_line), last_line, "".join(shown.format()), time.time())


def _dump_error(error: BaseException, last_line: str) -> bytes:
    """Pickle the error, or a RankError in its place.

    A RankError replaces an error that would end the caller, such as SystemExit, and an error that
    cannot be pickled.
    """
    if not isinstance(error, Exception):
        return dumps(RankError(message("launch", "fn", "return or raise an Exception", last_line)))
    text = last_line
    for sent in (error, _ErrorParts(type(error), error.args, vars(error))):
        try:
            data = dumps(sent)
            if type(pickle.loads(data)) is type(error):
                return data
        except Exception as reason:
            text = f"{last_line} (which cannot be pickled: {reason})"
    return dumps(RankError(text))


@dataclass(frozen=True, slots=True)
class _ErrorParts:
    """The parts of an error that pickle cannot rebuild: its `__init__` does not accept `args`."""

    kind: type[Exception]
    args: tuple[Any, ...]
    attributes: Mapping[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_error, (self.kind, self.args, dict(self.attributes))


def _make_error(
    kind: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]
) -> Exception:
    error = kind.__new__(kind, *args)
    vars(error).update(attributes)
    return error


def _write(path: Path, data: bytes) -> None:
    """Write a file so that it is either complete or absent."""
    new = path.with_suffix(".new")
    new.write_bytes(data)
    os.replace(new, path)
