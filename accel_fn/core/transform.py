"""Transforms: pure functions from plan to plan; their reprs and their composition."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce, wraps
from typing import Any, ParamSpec, Protocol

from accel_fn.core.plan import Batch, Plan, SlotFunction, describe, describe_call
from accel_fn.errors import ArgumentTypeError, message

P = ParamSpec("P")


class Transform(Protocol):
    """A pure function from a plan to a plan over the same batches."""

    def __call__(self, plan: Plan[Batch], /) -> Plan[Batch]: ...


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class NamedTransform:
    """A transform that prints as the call that made it: `clip(1.0)`."""

    apply: Transform
    text: str

    def __call__(self, plan: Plan[Batch], /) -> Plan[Batch]:
        return self.apply(plan)

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, eq=False)
class Fill:
    """A transform that adds functions to slots, after a check of the plan."""

    slots: Mapping[str, Sequence[Any]]
    first: Collection[str]
    """The slots in which the new functions go before the existing ones."""
    check: Callable[[Plan], None] | None

    def __call__(self, plan: Plan[Batch], /) -> Plan[Batch]:
        if self.check is not None:
            self.check(plan)
        filled: dict[str, Any] = {}
        for name, functions in self.slots.items():
            there = getattr(plan, name)
            first = name in self.first
            filled[name] = (*functions, *there) if first else (*there, *functions)
        return replace(plan, **filled)


def fill(
    *, first: Collection[str] = (), check: Callable[[Plan], None] | None = None, **slots: Any
) -> Fill:
    """Return a transform that adds a function, or a tuple of them, to each of these slots.

    It appends the functions; in the slots named in `first`, it prepends them. `check` may refuse
    the plan.
    """
    every = {name: fn if isinstance(fn, tuple) else (fn,) for name, fn in slots.items()}
    return Fill(every, first, check)


def transform(factory: Callable[P, Transform]) -> Callable[P, Transform]:
    """Decorate a factory: its transform, and the slot functions in it, print as the call."""

    @wraps(factory)
    def call(*args: P.args, **keywords: P.kwargs) -> Transform:
        made = factory(*args, **keywords)
        return named(made, describe_call(factory, args, keywords))

    return call


def named(made: Transform, text: str) -> Transform:
    """Return a new transform that prints as this text; its slot functions print as this text too."""
    functions = made.slots.values() if isinstance(made, Fill) else ()
    for each in (fn for every in functions for fn in every):
        if isinstance(each, SlotFunction):
            # Set the attribute in place: this call has just made the slot function, so no other
            # plan uses it.
            each.call = text
    return NamedTransform(made, text)


@transform
def compose(*transforms: Transform) -> Transform:
    """Compose transforms, applied left to right. Associative; `compose()` is the identity.

    Args:
        *transforms: each a pure function `Plan -> Plan`.

    Returns:
        A transform.

    Raises:
        TypeError: one of them cannot be called, or returns no plan.

    Law: associative, with an identity; no argument changes.
    Tests: `tests/laws/law05_composition.py`.

    Cost: none; nothing runs before `build`.

    >>> import accel_fn as af
    >>> recipe = af.compose(af.accumulate(4), af.clip(1.0))
    >>> recipe
    compose(accumulate(4), clip(1.0))
    >>> recipe(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=count_samples, split=[accumulate(4)], gradients=[clip(1.0)])
    """
    for each in transforms:
        if not callable(each):
            raise ArgumentTypeError(
                message("compose", "transforms", "be functions Plan -> Plan", each)
            )

    def composed(plan: Plan[Batch]) -> Plan[Batch]:
        return reduce(_transformed, transforms, plan)

    return composed


def _transformed(plan: Plan[Batch], transform: Transform) -> Plan[Batch]:
    found = transform(plan)
    if not isinstance(found, Plan):
        rule, got = f"return a Plan, {describe(transform)} does not", type(found).__name__
        raise ArgumentTypeError(message("compose", "transforms", rule, got))
    return found
