"""launch_options: training options that a launch sets, for scripts that do not set them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from accel_fn.errors import ArgumentError, check_count, check_positive, message

T = TypeVar("T")
Precision = Literal["no", "fp16", "bf16", "fp8"]
Wrapper = Literal["ddp", "fsdp", "deepspeed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The options of a launch; an option that it does not set is None.

    Attributes:
        mixed_precision: the default of `with_amp()`.
        num_microbatches: the default of `accumulate()`.
        wrap: the wrapper that `wrap_as_launched()` takes.
        timeout_s: the default of `init()`: how long it and any collective wait.
        mesh: the default of `init()`: the axes that the ranks form, and their sizes.
    """

    mixed_precision: Precision | None = None
    num_microbatches: int | None = None
    wrap: Wrapper | None = None
    timeout_s: float | None = None
    mesh: Mapping[str, int] | None = None


def launch_options() -> LaunchOptions:
    """Return the options of training that the launch of this process set.

    Reads ACCEL_FN_MIXED_PRECISION, ACCEL_FN_NUM_MICROBATCHES, ACCEL_FN_WRAP,
    ACCEL_FN_TIMEOUT_S and ACCEL_FN_MESH, which `accel-fn launch` sets from its options of these
    names. A variable that is absent or empty sets no option.

    Returns:
        The options, checked.

    Raises:
        ValueError: a variable holds no value of its option.

    Cost: five look-ups in the environment.

    >>> import accel_fn as af
    >>> af.launcher.launch_options()
    LaunchOptions(mixed_precision=None, num_microbatches=None, wrap=None, timeout_s=None, mesh=None)
    """
    return LaunchOptions(
        mixed_precision=_one_of(get_args(Precision), "ACCEL_FN_MIXED_PRECISION"),
        num_microbatches=_count("ACCEL_FN_NUM_MICROBATCHES"),
        wrap=_one_of(get_args(Wrapper), "ACCEL_FN_WRAP"),
        timeout_s=_seconds("ACCEL_FN_TIMEOUT_S"),
        mesh=launched_mesh(),
    )


def launched_mesh() -> dict[str, int] | None:
    """Return the mesh that the launch sets: axes and sizes, such as dp=-1,tp=2."""
    name = "ACCEL_FN_MESH"
    text = os.environ.get(name)
    if not text:
        return None
    return parse_mesh("launch_options", name, text)


def parse_mesh(function: str, name: str, text: str) -> dict[str, int]:
    """Parse axes and sizes, such as `dp=-1,tp=2`."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    try:
        mesh = {axis.strip(): int(size) for axis, _, size in pairs}
    except ValueError:
        mesh = {}
    if len(mesh) != len(pairs):
        rule = "be axes and their sizes, each once, such as dp=-1,tp=2"
        raise ArgumentError(message(function, name, rule, text))
    return mesh


def _one_of(choices: tuple[str, ...], name: str) -> Any:
    text = os.environ.get(name) or None
    if text not in (None, *choices):
        *others, last = [f'"{choice}"' for choice in choices]
        rule = f"be {', '.join(others)} or {last}"
        raise ArgumentError(message("launch_options", name, rule, text))
    return text


def _count(name: str) -> int | None:
    return _number(name, "be an integer >= 1", lambda text: check_count("", name, int(text)))


def _seconds(name: str) -> float | None:
    rule = "be a finite number > 0, in seconds"
    return _number(name, rule, lambda text: check_positive("", name, float(text)))


def _number(name: str, rule: str, read: Callable[[str], T]) -> T | None:
    text = os.environ.get(name)
    try:
        return read(text) if text else None
    except ValueError:
        raise ArgumentError(message("launch_options", name, rule, text)) from None


_DEFAULTS = {"mixed_precision": "no autocast", "num_microbatches": "1 micro-batch", "wrap": "ddp"}


def source_of(option: str) -> str:
    """Describe, for `explain`, the launch's value of an option that the script does not set."""
    given = getattr(launch_options(), option)
    if given is not None:
        return f"{given} from the launch"
    return f"{_DEFAULTS[option]} since the launch sets no --{option.replace('_', '-')}"
