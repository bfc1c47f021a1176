"""Code that only the main rank runs, or runs first; printing and logging on the main rank."""

from __future__ import annotations

import logging
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import IO, Any, TypeVar, cast

from accel_fn.core.collectives import agreed, send_failure
from accel_fn.core.differentiable import eager
from accel_fn.core.primitives import num_calls
from accel_fn.core.state import DistState, check_state
from accel_fn.errors import ArgumentTypeError, WorldError, check_flag, message

T = TypeVar("T")


@eager
def on_main(fn: Callable[[], T], state: DistState) -> T:
    """Run `fn` on the main rank alone; return its result, or raise its exception, on all ranks.

    For work that must happen once, such as a download. No rank hangs if it fails.

    Args:
        fn: takes no arguments; its result or exception is pickled for the other ranks.
        state: the state of this rank.

    Returns:
        The result of `fn`, on every rank; tensors on an accelerator move to each rank's device.

    Raises:
        BaseException: the exception of `fn`, on every rank; if it cannot be
            pickled, a `RuntimeError` with its traceback on the other ranks.
        TypeError: `fn` cannot be called.
        RuntimeError: `fn` cannot be called on another rank.

    Cost: two small collectives, and the time of `fn` on all ranks.

    >>> import accel_fn as af
    >>> af.on_main(lambda: 6 * 7, af.DistState())
    42
    """
    check_state("on_main", state)
    failures: list[BaseException] = []

    def called() -> tuple[str, Any]:
        _check_callable(fn)
        if not state.is_main:
            return "", None
        try:
            return _picklable("result", fn())
        except BaseException as error:
            failures.append(error)
            return _picklable("error", error)

    if state.world_size == 1:
        _check_callable(fn)
        return fn()
    kind, value = agreed(called, state, "on_main")[0]
    if failures:
        raise failures.pop()
    if kind == "error":
        raise value
    return cast("T", value)


def _check_callable(fn: object) -> None:
    if not callable(fn):
        raise ArgumentTypeError(message("on_main", "fn", "be a function", fn))


def _picklable(kind: str, value: Any) -> tuple[str, Any]:
    """Return kind and value if the value can be pickled, else an error that shows the value."""
    try:
        pickle.loads(pickle.dumps(value))
        return kind, value
    except Exception as reason:
        shown = "".join(traceback.format_exception(value)) if kind == "error" else repr(value)
        error = WorldError(
            f"on_main: fn must return or raise what can be pickled ({reason}), got {shown}"
        )
        return "error", error


@contextmanager
def main_first(state: DistState, *, local: bool = False) -> Iterator[None]:
    """Run the body of a `with` on the main rank; the other ranks run it afterwards.

    For work that leaves files for all ranks, such as a download into a cache: the main rank
    makes them, the others find them. A collective inside raises an error on all ranks, since they
    do not reach it at the same time.

    Args:
        state: the state of this rank.
        local: True: the first rank of each machine runs the body first, if machines share no
            folder.

    Yields:
        Nothing.

    Raises:
        RuntimeError: the body failed on the main rank (or the first of a machine), raised by the
            ranks that wait for it, which do not run it. The main rank raises its own error. Or a
            collective was called inside.
        TypeError: `local` is not True or False.

    Cost: two small collectives, and the time of the body on the main rank.

    >>> import accel_fn as af
    >>> with af.main_first(af.DistState()):
    ...     words = "download, or read what was downloaded".split()
    """
    check_state("main_first", state)
    check_flag("main_first", "local", local)
    if state.world_size == 1:
        yield
        return
    is_first = state.local_rank == 0 if local else state.is_main
    if is_first:
        before = num_calls()
        try:
            yield
        except BaseException as error:
            # A collective inside the context meets the exchange in which the other ranks wait, so
            # they have raised an error already.
            if num_calls() == before:
                send_failure(error, state, "main_first")
            raise
    agreed(lambda: None, state, "main_first")
    if not is_first:
        yield


def print_on_main(
    *values: object,
    state: DistState,
    sep: str = " ",
    end: str = "\n",
    file: IO[str] | None = None,
    flush: bool = False,
) -> None:
    """Print on the main rank alone, as `print` does; bars of tqdm stay whole below it.

    Args:
        *values: to print.
        state: the state of this rank.
        sep: as for `print`.
        end: as for `print`.
        file: as for `print`.
        flush: as for `print`.

    Cost: none on the other ranks. A tensor on a device is read on the main rank, which waits for it.

    >>> import accel_fn as af
    >>> af.print_on_main("loss", 0.5, state=af.DistState())
    loss 0.5
    >>> af.print_on_main("loss", 0.5, state=af.DistState(rank=1, world_size=2))
    """
    check_state("print_on_main", state)
    if state.is_main:
        with _beside_bars(file):
            print(*values, sep=sep, end=end, file=file, flush=flush)


def _beside_bars(file: IO[str] | None) -> AbstractContextManager[None]:
    """Clear tqdm's bars from the screen while the rank prints; without tqdm, do nothing."""
    tqdm: Any = sys.modules.get("tqdm")
    return nullcontext() if tqdm is None else tqdm.tqdm.external_write_mode(file)


def main_logger(logger: logging.Logger, state: DistState) -> logging.Logger:
    """Let a standard logger log on the main rank alone, by a filter on the other ranks.

    A call with `extra={"all_ranks": True}` logs on every rank. The filter is on this logger alone:
    loggers below it (`"app.data"` below `"app"`) keep logging everywhere.

    Args:
        logger: from `logging.getLogger`.
        state: the state of this rank.

    Returns:
        The same logger. Simulated ranks share loggers; give each its own, `logging.Logger(name)`.

    Raises:
        TypeError: `logger` is not a `logging.Logger`.

    Cost: a call that does not log costs a microsecond.

    >>> import logging, accel_fn as af
    >>> logger = af.main_logger(logging.getLogger("train"), af.DistState())
    >>> logger.info("on the main rank")
    >>> logger.info("of this rank", extra={"all_ranks": True})
    """
    check_state("main_logger", state)
    if not isinstance(logger, logging.Logger):
        rule, got = "be a logging.Logger", type(logger).__name__
        raise ArgumentTypeError(message("main_logger", "logger", rule, got))
    if not state.is_main:
        # A second call adds nothing: `addFilter` ignores a filter that the logger has already.
        logger.addFilter(_is_for_all_ranks)
    return logger


def _is_for_all_ranks(record: logging.LogRecord) -> bool:
    return getattr(record, "all_ranks", False)
