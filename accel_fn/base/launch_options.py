"""launch_options: what a launch says of training, for a script that leaves it to the launch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, get_args

from accel_fn.errors import ArgumentError, check_count, check_positive, message

Precision = Literal["no", "fp16", "bf16"]
Wrapper = Literal["ddp", "fsdp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """What the launch says; None where it says nothing.

    Attributes:
        mixed_precision: what `with_amp()` without an argument does.
        num_microbatches: what `accumulate()` without an argument does.
        wrap: what `wrap()` does.
        timeout_s: how long `init()` and any collective wait, unless `init` is given another.
    """

    mixed_precision: Precision | None = None
    num_microbatches: int | None = None
    wrap: Wrapper | None = None
    timeout_s: float | None = None


def launch_options() -> LaunchOptions:
    """What the launch of this process says of training.

    Reads ACCEL_FN_MIXED_PRECISION, ACCEL_FN_NUM_MICROBATCHES, ACCEL_FN_WRAP and
    ACCEL_FN_TIMEOUT_S, which `accel-fn launch` sets from its options of these
    names. One that is absent or empty says nothing.

    Returns:
        The options, checked.

    Raises:
        ValueError: a variable holds what its option cannot be.

    Cost: four look-ups in the environment.

    >>> import accel_fn as af
    >>> af.launch_options()
    LaunchOptions(mixed_precision=None, num_microbatches=None, wrap=None, timeout_s=None)
    """
    return LaunchOptions(
        mixed_precision=_one_of(get_args(Precision), "ACCEL_FN_MIXED_PRECISION"),
        num_microbatches=_count("ACCEL_FN_NUM_MICROBATCHES"),
        wrap=_one_of(get_args(Wrapper), "ACCEL_FN_WRAP"),
        timeout_s=_seconds("ACCEL_FN_TIMEOUT_S"),
    )


def _one_of(words: tuple[str, ...], name: str) -> Any:
    said = os.environ.get(name) or None
    if said not in (None, *words):
        *others, last = [f'"{word}"' for word in words]
        rule = f"be {', '.join(others)} or {last}"
        raise ArgumentError(message("launch_options", name, rule, said))
    return said


def _count(name: str) -> int | None:
    said = os.environ.get(name)
    if not said:
        return None
    try:
        return check_count("launch_options", name, int(said))
    except ValueError:
        raise ArgumentError(message("launch_options", name, "be an integer >= 1", said)) from None


def _seconds(name: str) -> float | None:
    said = os.environ.get(name)
    if not said:
        return None
    try:
        return check_positive("launch_options", name, float(said))
    except ValueError:
        rule = "be a finite number > 0, in seconds"
        raise ArgumentError(message("launch_options", name, rule, said)) from None


class FromLaunch(partial[Any]):
    """A function in a slot of a plan whose arguments the launch has said: `explain` says so."""

    source: ClassVar[str] = "from the launch"


class Unsaid(FromLaunch):
    """The same where the launch has said nothing: arguments that leave the step as it is."""

    source: ClassVar[str] = "the launch says nothing"
