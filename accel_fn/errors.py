"""Error classes, functions that format error messages, and checks of common arguments.

Each class derives from AccelError and from the builtin error that fits.
"""

from __future__ import annotations

import math
import numbers
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = [
    "AccelError",
    "ArgumentError",
    "ArgumentTypeError",
    "BatchError",
    "CheckpointError",
    "CheckpointWriteError",
    "ExtraError",
    "LogError",
    "LossError",
    "NotEquivalentError",
    "OutOfMemoryError",
    "PeerError",
    "PeerOutOfMemoryError",
    "PlanError",
    "RankError",
    "ReplicaError",
    "SettingsError",
    "SkippedError",
    "StateError",
    "WorkerError",
    "WorldError",
    "WorldTimeoutError",
]


_LONGEST = 300
"""The number of characters after which a message cuts off the repr of a value."""


class AccelError(Exception):
    """Base of every error that accel_fn raises on purpose."""


class ArgumentError(AccelError, ValueError):
    """An argument breaks its rule."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument has a type that its rule excludes."""


class SettingsError(ArgumentError):
    """A setting of a launch is unknown, has no effect, or conflicts with another one."""


class PlanError(AccelError, ValueError):
    """A plan cannot be built: two transforms exclude each other, or the model or optimizer does not fit."""


class BatchError(AccelError, ValueError):
    """A batch cannot be counted, split or joined."""


class LossError(AccelError, ValueError):
    """A loss function returned a value that cannot be trained on."""


class StateError(AccelError, ValueError):
    """A state does not belong to the step or the collective that it was passed to."""


class ReplicaError(AccelError, RuntimeError):
    """Ranks that must hold equal values hold different ones."""


class PeerError(ReplicaError):
    """Another rank failed or was given a wrong argument; this rank made no mistake."""


class NotEquivalentError(AccelError, AssertionError):
    """Two plans that must train the same model trained different ones."""


class SkippedError(AccelError, ArithmeticError):
    """Too many updates in a row were skipped."""


class OutOfMemoryError(AccelError, MemoryError):
    """The device is out of memory even with the smallest micro-batches."""


class PeerOutOfMemoryError(OutOfMemoryError):
    """Memory ran out on another rank before gradients were averaged."""

    def __init__(self, failures: Sequence[str]) -> None:
        super().__init__(failures)
        self.failures = failures
        """Failures of all ranks, in rank order."""


class WorkerError(AccelError, RuntimeError):
    """A worker process of a data loader died, or could not send a batch."""


class CheckpointError(AccelError, RuntimeError):
    """A checkpoint is missing, damaged, or of another run."""


class CheckpointWriteError(CheckpointError, OSError):
    """Files of a checkpoint or of exported weights cannot be written."""


class LogError(AccelError, RuntimeError):
    """The log of a run cannot be written, or another run writes to it."""


class ExtraError(AccelError, ModuleNotFoundError):
    """An optional library (an extra) is not installed."""


class WorldError(AccelError, RuntimeError):
    """Processes could not form a world, or one of them left it too early."""


class WorldTimeoutError(WorldError, TimeoutError):
    """A world was not complete in time."""


class RankError(AccelError, RuntimeError):
    """A rank was killed, exited, or failed in a check of `accel-fn test`."""


def message(function: str, parameter: str, rule: str, value: object, repair: str = "") -> str:
    """Return `<function>: <parameter> must <rule>, got <value>[; <repair>]`."""
    ending = f"; {repair}" if repair else ""
    return f"{function}: {parameter} must {rule}, got {shown(value)}{ending}"


def shown(value: object) -> str:
    """Return `repr(value)`, or only its start if it is long.

    A value from a short YAML file may be huge, since aliases repeat parts of it.
    """
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > _LONGEST:
            return f"{text[:_LONGEST]}..."
    return text


def _pieces(value: object) -> Iterator[str]:
    """Yield `repr(value)` in pieces, one item of a list, a tuple or a dict at a time."""
    if type(value) is dict:
        yield "{"
        for number, (key, each) in enumerate(value.items()):
            yield ", " if number else ""
            yield from _pieces(key)
            yield ": "
            yield from _pieces(each)
        yield "}"
    elif type(value) is list or type(value) is tuple:
        yield "[" if type(value) is list else "("
        for number, each in enumerate(value):
            yield ", " if number else ""
            yield from _pieces(each)
        yield "]" if type(value) is list else ",)" if len(value) == 1 else ")"
    else:
        try:
            yield repr(value)
        except Exception:
            # `repr` fails for an integer of too many digits, and may fail for an object of a user's
            # class.
            yield f"<{type(value).__name__}>"


def check_positive(function: str, parameter: str, value: float, repair: str = "") -> float:
    """Return a finite real number > 0 as a float; refuse all other values, also booleans."""
    rule = "be a finite number > 0"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(message(function, parameter, rule, value, repair))
    if not (math.isfinite(value) and value > 0):
        raise ArgumentError(message(function, parameter, rule, value, repair))
    return float(value)


def check_count(
    function: str, parameter: str, value: int, *, minimum: int = 1, repair: str = ""
) -> int:
    """Return an integer >= `minimum` as an int; refuse all other values, also booleans."""
    rule = f"be an integer >= {minimum}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ArgumentTypeError(message(function, parameter, rule, value, repair))
    if value < minimum:
        raise ArgumentError(message(function, parameter, rule, value, repair))
    return int(value)


def check_folder(function: str, folder: object) -> Path:
    """Return the path of a folder, which need not exist, with `~` expanded."""
    path = os.fspath(folder) if isinstance(folder, os.PathLike) else folder
    if not isinstance(path, str):
        raise ArgumentTypeError(message(function, "folder", "be the path of a folder", folder))
    return Path(os.path.expanduser(path))


def check_flag(function: str, parameter: str, value: object) -> None:
    """Refuse values other than True and False."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(message(function, parameter, "be True or False", value))


def check_only(function: str, only: object) -> None:
    """Refuse values other than None and "trained"."""
    if only not in (None, "trained"):
        raise ArgumentError(message(function, "only", 'be "trained" or None', only))


def check_equal(
    values: Sequence[object], rule: str, repair: str = "", error: type[AccelError] = ReplicaError
) -> None:
    """Raise an error with this rule if the values differ. `values` holds one value of each rank."""
    for rank, value in enumerate(values):
        if value != values[0]:
            ending = f"; {repair}" if repair else ""
            raise error(f"{rule}, got {value} on rank {rank} and {values[0]} on rank 0{ending}")


UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, line ends, and halves of surrogate pairs, which UTF-8 cannot encode."""


def printable(text: str) -> str:
    """Escape characters that change a terminal's state or cannot be printed."""
    return UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)
