"""A plan: plain data that says what a step is made of, and how plans are transformed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from functools import partial, reduce
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from accel_fn.base.batch import num_samples
from accel_fn.base.state import DistState
from accel_fn.base.weights import WeightFn
from accel_fn.errors import ArgumentTypeError, message
from accel_fn.step.grads import Grads

LossFn = Callable[[Any, Any], Tensor]
BatchFn = Callable[[DistState, Any], Any]
ModuleFn = Callable[[DistState, Any], nn.Module]
ContextFn = Callable[[DistState], AbstractContextManager[Any]]
SplitFn = Callable[[Any], Sequence[Any]]
VerdictFn = Callable[[DistState, Grads], Tensor]
WholeFn = Callable[..., Any]
CompileFn = Callable[[DistState, WholeFn], WholeFn]
GradientFn = Callable[[DistState, Grads], Grads]
StartFn = Callable[[DistState], DistState]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Report:
    """What one step says. Tensors stay on the device: reading them is what waits for it.

    Attributes:
        loss: [], float32, detached: the mean over the items of the global batch.
        weight: number of items of the global batch, over all ranks.
        grad_norm: [], float32: the global norm when it was first read, of the
            averaged and unscaled gradients; None where nothing in the plan reads it.
        applied: [], bool: was the optimizer run? False where the update was skipped.
        extras: what transforms add, by name.
    """

    loss: Tensor
    weight: float
    grad_norm: Tensor | None = None
    applied: Tensor | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)


GradFn = Callable[[DistState, Any], tuple[DistState, Grads, Report]]
AfterFn = Callable[[DistState, Report], DistState]
StopFn = Callable[[], bool]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Plan:
    """Everything that a step is made of: four things of the user's, and slots that transforms fill.

    A slot is a tuple of functions, filled by `dataclasses.replace`; the
    built-in transforms do no more than that. The user's objects are held,
    never changed. A function that keeps something from step to step stands there
    as a `Kept`, so that every step has its own.

    Attributes:
        loss_fn: `(model, batch) -> Tensor`, [], the *mean* loss over the batch's items.
        model: any `nn.Module`; it keeps its type, its hooks and its `state_dict` keys.
        optimizer: any `torch.optim.Optimizer` over parameters of `model`.
        weight_fn: `batch -> number`: how many items that mean is over: a finite number >= 0, of
            Python's or NumPy's kinds, or a tensor [].
        place_batch: `(state, batch) -> batch`, in the order listed.
        move_model: `(state, model) -> model`; at most one.
        compile_loss: `(state, module) -> module`, a module that maps a batch to its loss; at most one.
        compile_step: `(state, function) -> function`, of all of a step that is arithmetic, from
            placed micro-batches to the update; at most one, and in a world of one.
        own_parameters: `(state, module) -> module`, as `compile_loss`, and averages gradients, or
            parameters, over the ranks; at most one.
        contexts: `state -> context manager`, around forward and loss.
        split: `batch -> micro-batches`; at most one.
        grad_fns: `GradFn -> GradFn`, the first listed innermost, with
            `GradFn = (state, batch) -> (state, Grads, Report)`.
        verdicts: `(state, grads) -> [], bool`, on the gradients as they arrive: should this
            update be made? It is, where all of them say so.
        gradients: `(state, grads) -> grads`, in the order listed.
        starts: `state -> state`, once, in `build`.
        after: `(state, report) -> state`, after each update, in the order listed.
        stops: `() -> bool`, asked as a step begins: should the run end after it? Where one of
            any rank says so, `report.extras["stop"]` is True on all.

    Raises:
        TypeError: one of the four is not what it must be.

    >>> import accel_fn as af
    >>> af.Plan(loss_fn, model, optimizer)
    Plan(loss_fn, Linear, SGD, weight_fn=num_samples)
    """

    loss_fn: LossFn
    model: nn.Module
    optimizer: Optimizer
    weight_fn: WeightFn = num_samples
    place_batch: tuple[BatchFn, ...] = field(default=(), kw_only=True)
    move_model: tuple[ModuleFn, ...] = field(default=(), kw_only=True)
    compile_loss: tuple[ModuleFn, ...] = field(default=(), kw_only=True)
    compile_step: tuple[CompileFn, ...] = field(default=(), kw_only=True)
    own_parameters: tuple[ModuleFn, ...] = field(default=(), kw_only=True)
    contexts: tuple[ContextFn, ...] = field(default=(), kw_only=True)
    split: tuple[SplitFn, ...] = field(default=(), kw_only=True)
    grad_fns: tuple[Callable[[GradFn], GradFn], ...] = field(default=(), kw_only=True)
    verdicts: tuple[VerdictFn, ...] = field(default=(), kw_only=True)
    gradients: tuple[GradientFn, ...] = field(default=(), kw_only=True)
    starts: tuple[StartFn, ...] = field(default=(), kw_only=True)
    after: tuple[AfterFn, ...] = field(default=(), kw_only=True)
    stops: tuple[StopFn, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        rules = {
            "loss_fn": (callable(self.loss_fn), "be a function (model, batch) -> loss"),
            "model": (isinstance(self.model, nn.Module), "be an nn.Module"),
            "optimizer": (
                isinstance(self.optimizer, Optimizer),
                "be a torch.optim.Optimizer",
            ),
            "weight_fn": (callable(self.weight_fn), "be a function batch -> number"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ArgumentTypeError(message("Plan", name, rule, getattr(self, name)))

    def trained(self) -> list[nn.Parameter]:
        """The optimizer's parameters that require a gradient, in the order of its groups."""
        groups = self.optimizer.param_groups
        return [p for group in groups for p in group["params"] if p.requires_grad]

    def updates_always(self, state: DistState) -> bool:
        """Is every update made, whatever the gradients are?"""
        return state.scaler is None and not self.verdicts

    def __repr__(self) -> str:
        parts = [
            describe(self.loss_fn),
            type(self.model).__name__,
            type(self.optimizer).__name__,
            f"weight_fn={describe(self.weight_fn)}",
        ]
        parts += [
            f"{name}=[{', '.join(map(describe, getattr(self, name)))}]"
            for name in slot_names()
            if getattr(self, name)
        ]
        return f"Plan({', '.join(parts)})"


Transform = Callable[[Plan], Plan]


class Kept(partial[Any]):
    """In a slot: how a function is made that keeps something from step to step.

    `build` calls it as `(state, plan) -> function` once parameters are what they will be, so
    every step has its own; the slots of the plan before this one hold what was made already. If
    the function has `state_dict` and `load_state_dict`, checkpoints hold what it keeps,
    tensors in the shapes that they have in a new step. If it has
    `check_saved`, `save` asks it first: it raises, on every rank alike, where there is nothing that
    could be saved. So does `load`, where it has `check_loaded`.

    >>> import accel_fn as af
    >>> from dataclasses import replace
    >>> def counting(state, plan, *, every):
    ...     seen = []
    ...     def count(state, report):
    ...         seen.append(report.loss)
    ...         if len(seen) % every == 0:
    ...             print(len(seen))
    ...         return state
    ...     return count
    >>> plan = replace(af.Plan(loss_fn, model, optimizer), after=(af.Kept(counting, every=2),))
    >>> state, step = af.build(af.DistState(), plan)
    >>> for _ in range(3):
    ...     state, report = step(state, batch)
    2
    """

    def __init__(self, fn: Callable[..., Any], **settings: Any) -> None:
        """`fn(state, plan, **settings)` makes the function."""


class OfReplicas(Kept):
    """A `Kept` whose function takes the parameters to be equal on all ranks after every update."""


def with_kept(plan: Plan, state: DistState) -> Plan:
    """The plan as one step uses it: with a function of its own for each `Kept`."""
    for name in slot_names():
        slot = list(getattr(plan, name))
        for place, each in enumerate(slot):
            if isinstance(each, Kept):  # which may look at what was made before it
                slot[place] = each(state, plan)
                made: dict[str, Any] = {name: tuple(slot)}
                plan = replace(plan, **made)
    return plan


class Asked(partial[Any]):
    """A function for a slot that `build` asks, before anything is moved, whether the plan can be built."""

    given_by: ClassVar[str] = ""
    """The transform that puts it there, where users know it by that."""

    def check(self, state: DistState, plan: Plan) -> None:
        """Raise, on every rank alike, where it cannot."""


def slot_names() -> list[str]:
    """The slots of a plan, in the order in which it tells them."""
    return [each.name for each in fields(Plan)[4:]]


def compose(*transforms: Transform) -> Transform:
    """One transform that applies several, left to right. Associative; `compose()` is the identity.

    Args:
        *transforms: each a pure function `Plan -> Plan`.

    Returns:
        A transform.

    Raises:
        TypeError: one of them cannot be called, or returns no plan.

    Cost: none; nothing runs before `build`.

    >>> import accel_fn as af
    >>> recipe = af.compose(af.accumulate(4), af.clip(1.0))
    >>> recipe(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=num_samples, split=[split_batch(num_parts=4)], \
gradients=[clip_norm(max_norm=1.0)])
    """
    for transform in transforms:
        if not callable(transform):
            raise ArgumentTypeError(
                message("compose", "transforms", "be functions Plan -> Plan", transform)
            )

    def composed(plan: Plan) -> Plan:
        return reduce(_transformed, transforms, plan)

    return composed


def _transformed(plan: Plan, transform: Transform) -> Plan:
    found = transform(plan)
    if not isinstance(found, Plan):
        rule, got = f"return a Plan, {describe(transform)} does not", type(found).__name__
        raise ArgumentTypeError(message("compose", "transforms", rule, got))
    return found


def describe(fn: Any) -> str:
    """A function as a reader would name it: `name(argument=value)`."""
    if isinstance(fn, partial):
        arguments = [
            *map(_told, fn.args),
            *(f"{name}={_told(value)}" for name, value in fn.keywords.items()),
        ]
        return f"{describe(fn.func)}({', '.join(arguments)})"
    name = getattr(fn, "__qualname__", None)
    return _told_object(fn) if name is None else name.replace("<locals>.", "").split(".")[-1]


def _told(value: Any) -> str:
    return describe(value) if callable(value) else _told_object(value)


def _told_object(value: Any) -> str:
    """As it tells itself; by its type where that would be an address, another one on every rank."""
    silent: Any = object.__repr__
    return type(value).__name__ if type(value).__repr__ is silent else repr(value)
