"""The errors: each is ours and the builtin's, and names function, parameter, rule, value and repair."""

import math
import numbers
import os
from collections.abc import Sequence


class AccelError(Exception):
    """Base of every error that accel_fn raises on purpose."""


class ArgumentError(AccelError, ValueError):
    """An argument breaks its rule."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument is of a type that its rule excludes."""


class SettingsError(ArgumentError):
    """A setting of a launch is unknown, of no use, or in conflict with another."""


class PlanError(AccelError, ValueError):
    """A plan holds things that cannot make one step together."""


class BatchError(AccelError, ValueError):
    """A batch cannot be counted, split or joined."""


class LossError(AccelError, ValueError):
    """A loss function gave something that cannot be trained on."""


class StateError(AccelError, ValueError):
    """A state does not belong to the step or the collective it was given to."""


class ReplicaError(AccelError, RuntimeError):
    """Ranks that must hold the same values do not."""


class ElsewhereError(ReplicaError):
    """Another rank failed, or was given what is wrong; nothing is wrong with this one."""


class SkippedError(AccelError, ArithmeticError):
    """A run leaves out one update after another."""


class RoomError(AccelError, MemoryError):
    """Memory does not hold what it must."""


class WorkerError(AccelError, RuntimeError):
    """A process that reads data for a loader has died."""


class CheckpointError(AccelError, RuntimeError):
    """A checkpoint is missing, damaged, or of another run."""


class ExtraError(AccelError, ModuleNotFoundError):
    """A library that is an extra is not installed."""


class WorldError(AccelError, RuntimeError):
    """A world of processes could not be described, joined or kept together."""


class RankError(AccelError, RuntimeError):
    """A rank ended in a way that no exception of its own tells."""


class WorldTimeoutError(WorldError, TimeoutError):
    """A world did not come together in time."""


def message(function: str, parameter: str, rule: str, value: object, repair: str = "") -> str:
    """`<function>: <parameter> must <rule>, got <value>[; <repair>]`."""
    ending = f"; {repair}" if repair else ""
    return f"{function}: {parameter} must {rule}, got {value!r}{ending}"


def check_positive(function: str, parameter: str, value: float, repair: str = "") -> float:
    """A finite real number > 0, no boolean; given back as a float."""
    rule = "be a finite number > 0"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(message(function, parameter, rule, value, repair))
    if not (math.isfinite(value) and value > 0):
        raise ArgumentError(message(function, parameter, rule, value, repair))
    return float(value)


def check_count(
    function: str, parameter: str, value: int, *, minimum: int = 1, repair: str = ""
) -> int:
    """An integer >= `minimum`, no boolean."""
    rule = f"be an integer >= {minimum}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ArgumentTypeError(message(function, parameter, rule, value, repair))
    if value < minimum:
        raise ArgumentError(message(function, parameter, rule, value, repair))
    return int(value)


def check_folder(function: str, folder: object) -> str:
    """The path of a folder, which need not be there; given back as text."""
    path = os.fspath(folder) if isinstance(folder, os.PathLike) else folder
    if not isinstance(path, str):
        raise ArgumentTypeError(message(function, "folder", "be the path of a folder", folder))
    return path


def check_flag(function: str, parameter: str, value: object) -> None:
    """True or False, not what counts as either."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(message(function, parameter, "be True or False", value))


def check_alike(
    told: Sequence[object], rule: str, repair: str = "", error: type[AccelError] = ReplicaError
) -> None:
    """What each rank told, in rank order, is one value: else `<rule>, got <one> and <another>`."""
    for rank, value in enumerate(told):
        if value != told[0]:
            ending = f"; {repair}" if repair else ""
            raise error(f"{rule}, got {value} on rank {rank} and {told[0]} on rank 0{ending}")
