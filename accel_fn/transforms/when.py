"""when: apply a transform on a condition, such as an option of a script."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from accel_fn.core.transform import Transform, fill, transform
from accel_fn.errors import ArgumentTypeError, message


@transform
def when(condition: object, then: Transform | Callable[[], Transform]) -> Transform:
    """Apply a transform if a condition is true.

    Law: the transform if the condition is true, else the identity.
    Tests: `tests/transforms/test_when.py`.

    Args:
        condition: anything that `if` takes, the same on every rank, as the whole plan is.
        then: the transform, or a function without parameters that makes it, which is called if
            the condition is true: for arguments that are valid only then.

    Returns:
        A transform.

    Raises:
        TypeError: `condition` is a function, or `then` cannot be called.

    Cost: none; nothing runs before `build`.

    >>> import accel_fn as af
    >>> max_norm = 0.0
    >>> clips = af.when(max_norm, lambda: af.clip(max_norm))  # clip(0.0) is an error
    >>> af.compose(af.accumulate(4), clips)(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=count_samples, split=[accumulate(4)])
    """
    if callable(condition):
        rule, repair = "be a value", "the condition comes first, then the transform"
        got = type(condition).__name__
        raise ArgumentTypeError(message("when", "condition", rule, got, repair))
    if not callable(then):
        raise ArgumentTypeError(message("when", "then", "be a function Plan -> Plan", then))
    if not condition:
        return fill()
    if not inspect.signature(then).parameters:
        made: object = then()  # type: ignore[call-arg]
        if not callable(made):
            rule = "return a function Plan -> Plan"
            raise ArgumentTypeError(message("when", "then", rule, made))
        return made
    return then  # type: ignore[return-value]
