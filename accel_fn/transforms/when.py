"""when: a transform on a condition, such as an option of a script."""

from __future__ import annotations

from accel_fn.errors import ArgumentTypeError, message
from accel_fn.step.transform import Transform, fill, transform


@transform
def when(condition: bool, then: Transform) -> Transform:
    """Apply a transform if a condition is true.

    Law: the transform if the condition is true, else the identity.

    Args:
        condition: the same on every rank, as the whole plan is.
        then: the transform. It is made in either case, so its arguments are checked.

    Returns:
        A transform.

    Raises:
        TypeError: `condition` is no bool, or `then` cannot be called.

    Cost: none; nothing runs before `build`.

    >>> import accel_fn as af
    >>> clips = False
    >>> af.compose(af.accumulate(4), af.when(clips, af.clip(1.0)))(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=num_samples, split=[accumulate(4)])
    """
    if not isinstance(condition, bool):
        rule, repair = "be a bool", "the condition comes first, then the transform"
        raise ArgumentTypeError(message("when", "condition", rule, condition, repair))
    if not callable(then):
        raise ArgumentTypeError(message("when", "then", "be a function Plan -> Plan", then))
    return then if condition else fill()
