"""Plan: plain data that lists the parts of a step, and the functions in its slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Generic, Literal, Protocol, Self, cast

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import TypeVar

from accel_fn.core.batch import count_samples
from accel_fn.core.grads import Grads
from accel_fn.core.observers import ObserverFn
from accel_fn.core.report import Report
from accel_fn.core.state import DistState
from accel_fn.core.weights import WeightFn
from accel_fn.errors import ArgumentError, ArgumentTypeError, message


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers that prefix its keys: DataParallel, DDP and `torch.compile`."""
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = cast("nn.Module", model.module)
        elif "_orig_mod" in model._modules:
            model = cast("nn.Module", model._modules["_orig_mod"])
        else:
            return model


def check_optimizers(given: object) -> None:
    """Refuse a value that is neither an optimizer nor a mapping of names to optimizers."""
    named = given if isinstance(given, Mapping) else {"optimizer": given}
    rule = "be a torch.optim.Optimizer, or a mapping of names to such"
    if not named:
        raise ArgumentError(message("Plan", "optimizer", rule, given))
    for name, each in named.items():
        if not isinstance(each, Optimizer):
            repair = _optimizer_repair(each)
            # Show only the type: the repr of several optimizers takes many lines.
            got = type(each).__name__ if repair else each
            raise ArgumentTypeError(message("Plan", "optimizer", rule, got, repair))
        if not isinstance(name, str) or not name or {*"/@"} & {*name}:
            rule = 'be named by strings without "/" and "@"'
            raise ArgumentError(message("Plan", "optimizer", rule, name))
        if name in ("model", "transforms", "frozen"):
            rule = (
                'not be named "model", "transforms" or "frozen", as other parts of a checkpoint are'
            )
            raise ArgumentError(message("Plan", "optimizer", rule, name))
    if len({id(each) for each in named.values()}) < len(named):
        rule = "hold each optimizer once"
        raise ArgumentError(message("Plan", "optimizer", rule, sorted(named)))


def _optimizer_repair(given: object) -> str:
    if isinstance(given, list | tuple):
        return 'name them: {"matrices": muon, "rest": adamw}'
    if hasattr(given, "step") and hasattr(given, "param_groups"):
        return "make your wrapper a subclass of torch.optim.Optimizer, or give what it wraps"
    return ""


def describe_optimizer(given: Optimizer | Mapping[str, Optimizer]) -> str:
    """Return the class of an optimizer, or a dict of names and classes for several."""
    if isinstance(given, Optimizer):
        return type(given).__name__
    return f"{{{', '.join(f'{name}: {type(each).__name__}' for name, each in given.items())}}}"


Batch = TypeVar("Batch", contravariant=True, default=Any)
"""The type of a batch: the annotation of `loss_fn`'s second parameter, or Any without one."""
Metric = float | Tensor | tuple[float | Tensor, float | Tensor]
"""A mean over the batch's items, or a sum and its count."""
Pair = tuple[Tensor, float | Tensor]
Loss = Tensor | Mapping[str, Tensor] | Pair | Mapping[str, Pair]
"""A mean; means by the names of `weight_fn`; a pair (sum, count); or such pairs by name."""


class FrozenLossFn(Protocol[Batch]):
    """A loss function that gets the frozen models of the plan as an argument `frozen`."""

    def __call__(
        self, model: Any, batch: Batch, /, *, frozen: Any
    ) -> Loss | tuple[Loss, Mapping[str, Metric]]:
        """Return the loss of a batch, or the loss and metrics."""
        ...


LossFn = Callable[[Any, Batch], Loss | tuple[Loss, Mapping[str, Metric]]] | FrozenLossFn[Batch]
StepFn = Callable[[DistState, Any], tuple[DistState, Report]]
GradFn = Callable[[DistState, Any], tuple[DistState, Grads, Report]]
InitFn = Callable[[DistState], DistState]
ModuleFn = Callable[[DistState, Any], nn.Module]
BatchFn = Callable[[DistState, Any], Any]
StrategyFn = Callable[..., Any]
"""A function `(state, loss module, plan) -> Strategy`."""
CompileFn = Callable[[DistState, Any], StepFn]
ContextFn = Callable[[DistState], AbstractContextManager[Any]]
SplitFn = Callable[[Any], Sequence[Any]]
AcceptFn = Callable[[DistState, Grads], Tensor]
GradientFn = Callable[[DistState, Grads], Grads]
UpdateFn = Callable[[DistState, Report], DistState]
StopFn = Callable[[], bool]
FinishFn = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Plan(Generic[Batch]):
    """Everything that a step is made of: four things of the user's, and slots that transforms fill.

    A slot is a tuple of functions. A transform fills it by `dataclasses.replace`. The plan holds
    the user's objects, and never changes them. A plain function is enough for a slot. A
    `SlotFunction` can also refuse a plan, and a `Stateful` has separate state in every step.

    Attributes:
        loss_fn: `(model, batch) -> loss` or `(loss, metrics)`. The loss is the *mean* over the
            batch's items, [], floating-point. The metrics are a dict with the same names for every
            batch. Each is a real number or tensor [], a mean over the same items, or a pair `(sum,
            count)`. The report has them over the global batch. Instead of the mean, the loss may be
            a pair `(sum, count)`, or a dict of such pairs: then it is the sum over the global batch
            divided by the count over the global batch, and you leave out `weight_fn`. A function
            with a parameter named `frozen` gets the frozen models.
        model: any `nn.Module`; it keeps its type, its hooks and its `state_dict` keys.
        optimizer: any `torch.optim.Optimizer` over parameters of `model`, or several by name, over
            different ones: `{"matrices": muon, "rest": adamw}`. They make one update: one verdict,
            one loss scale and one norm for all.
        weight_fn: `batch -> number`: the number of items that the mean is over: a finite number >=
            0, of Python's or NumPy's types, or a tensor []. Or a mapping of such functions:
            `loss_fn` then returns a dict of terms of the same names instead of the loss. Each term
            is the mean over its own items, and the loss is the sum of their means over the global
            batch. Metrics are then pairs `(sum, count)`.
        reduction: "mean", or "sum" for a loss that is a sum over the batch's items. With "sum",
            losses and gradients of ranks and micro-batches are added, and `weight_fn`, which cannot
            be a mapping, only counts.
        frozen: by name, models that the loss uses and the step does not train, such as a text encoder,
            a teacher or a reference: `{"vae": vae, "text": encoder}`. `build` places them, puts them into
            evaluation mode and calls `requires_grad_(False)`; every rank gets rank 0's values. `place` can
            cast them. A checkpoint holds a hash of each tensor, and no values.
        finish: by name, functions of the means of a step, `means -> number`, where `means` maps
            "loss", terms and metrics to tensors []: `{"perplexity": lambda means:
            means["loss"].exp()}`. Their values are metrics too, and `evaluate` calls them with the
            means of its loss.
        init_state: `state -> state`, once, in `build`.
        place_model: `(state, model) -> model`; at most one.
        place_frozen: `(state, model) -> model` for each frozen model, in place; at most one.
        place_batch: `(state, batch) -> batch`, in the order listed.
        shard_model: `(state, model) -> model`, before the strategy; at most one. The optimizers get
            the new parameters, matched by name.
        compile_loss: `(state, module) -> module`, a module that maps a batch to its loss; at most one.
        compile_step: `(state, stages) -> function (state, batch) -> (state, report)`, which runs
            all of a step but `after_update`; at most one.
        strategy: `(state, loss module, plan) -> Strategy`: how the ranks share one step;
            at most one.
        forward_contexts: `state -> context manager`, around forward and loss.
        split: `batch -> micro-batches`; at most one.
        wrap_grad_fn: `GradFn -> GradFn`, the first listed innermost, with
            `GradFn = (state, batch) -> (state, Grads, Report)`.
        accept: `(state, grads) -> [], bool`, on the gradients as they arrive: should this update
            be applied? It is if every function returns True.
        gradients: `(state, grads) -> grads`, in the order listed.
        after_update: `(state, report) -> state`, in the order listed.
        should_stop: `() -> bool`, called as a step begins: should the run end after it? If one on
            any rank returns True, `report.extras["stop"]` is True on all.
        observers: `(plan, strategy, state) -> Observer`: objects that watch the run and do not
            change its results.

    Raises:
        TypeError: one of the first four arguments, a frozen model or `finish` has the wrong type.
        ValueError: `weight_fn` is an empty mapping, has a term "loss", or is combined with
            `reduction="sum"`; a frozen model has an empty name, or one with "/" or "@".

    >>> import accel_fn as af
    >>> af.Plan(loss_fn, model, optimizer)
    Plan(loss_fn, Linear, SGD, weight_fn=count_samples)
    """

    loss_fn: LossFn[Batch]
    model: nn.Module
    optimizer: Optimizer | Mapping[str, Optimizer]
    weight_fn: WeightFn | Mapping[str, WeightFn] = count_samples
    reduction: Literal["mean", "sum"] = field(default="mean", kw_only=True)
    frozen: Mapping[str, nn.Module] = field(default_factory=dict, kw_only=True)
    finish: Mapping[str, FinishFn] = field(default_factory=dict, kw_only=True)
    init_state: tuple[InitFn, ...] = field(default=(), kw_only=True)
    place_model: tuple[ModuleFn, ...] = field(default=(), kw_only=True)
    place_frozen: tuple[ModuleFn, ...] = field(default=(), kw_only=True)
    place_batch: tuple[BatchFn, ...] = field(default=(), kw_only=True)
    shard_model: tuple[ModuleFn, ...] = field(default=(), kw_only=True)
    compile_loss: tuple[ModuleFn, ...] = field(default=(), kw_only=True)
    compile_step: tuple[CompileFn, ...] = field(default=(), kw_only=True)
    strategy: tuple[StrategyFn, ...] = field(default=(), kw_only=True)
    forward_contexts: tuple[ContextFn, ...] = field(default=(), kw_only=True)
    split: tuple[SplitFn, ...] = field(default=(), kw_only=True)
    wrap_grad_fn: tuple[Callable[[GradFn], GradFn], ...] = field(default=(), kw_only=True)
    accept: tuple[AcceptFn, ...] = field(default=(), kw_only=True)
    gradients: tuple[GradientFn, ...] = field(default=(), kw_only=True)
    after_update: tuple[UpdateFn, ...] = field(default=(), kw_only=True)
    should_stop: tuple[StopFn, ...] = field(default=(), kw_only=True)
    observers: tuple[ObserverFn, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        rules = {
            "loss_fn": (callable(self.loss_fn), "be a function (model, batch) -> loss"),
            "model": (isinstance(self.model, nn.Module), "be an nn.Module"),
            "weight_fn": (
                all(map(callable, self._weight_fns())),
                "be a function batch -> number, or a mapping of such by the names of terms",
            ),
            "reduction": (self.reduction in ("mean", "sum"), 'be "mean" or "sum"'),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ArgumentTypeError(message("Plan", name, rule, getattr(self, name)))
        check_optimizers(self.optimizer)
        # Copy the mapping: the user may change it later.
        if isinstance(self.optimizer, Mapping):
            object.__setattr__(self, "optimizer", dict(self.optimizer))
        if isinstance(self.weight_fn, Mapping):
            self._check_terms(self.weight_fn)
            object.__setattr__(self, "weight_fn", dict(self.weight_fn))
        self._check_frozen()
        object.__setattr__(self, "frozen", dict(self.frozen))
        check_finish("Plan", self.finish)
        object.__setattr__(self, "finish", dict(self.finish))

    @property
    def optimizers(self) -> Mapping[str, Optimizer]:
        """Return the optimizers by name, also if there is only one."""
        given = self.optimizer
        return given if isinstance(given, Mapping) else {"optimizer": given}

    @property
    def terms(self) -> tuple[str, ...]:
        """Return the names of the loss's terms; () if the loss is one mean."""
        return tuple(self.weight_fn) if isinstance(self.weight_fn, dict) else ()

    def _weight_fns(self) -> list[WeightFn]:
        given = self.weight_fn
        return [*given.values()] if isinstance(given, Mapping) else [given]

    def _check_terms(self, weight_fns: Mapping[str, WeightFn]) -> None:
        for name in weight_fns:
            if not isinstance(name, str):
                rule = "name terms by strings"
                raise ArgumentTypeError(message("Plan", "weight_fn", rule, name))
        if not weight_fns or "loss" in weight_fns:
            rule = 'name at least one term, and none "loss", which is their sum'
            raise ArgumentError(message("Plan", "weight_fn", rule, list(weight_fns)))
        if self.reduction == "sum":
            rule, repair = 'be "mean" where weight_fn is a mapping', "return the mean of each term"
            raise ArgumentError(message("Plan", "reduction", rule, "sum", repair))

    def _check_frozen(self) -> None:
        rule = "be a mapping of names to models"
        if not isinstance(self.frozen, Mapping):
            raise ArgumentTypeError(message("Plan", "frozen", rule, type(self.frozen).__name__))
        for name, model in self.frozen.items():
            if not isinstance(name, str) or not isinstance(model, nn.Module):
                got = f"{name!r}: {type(model).__name__}"
                raise ArgumentTypeError(
                    message("Plan", "frozen", f"{rule}, each an nn.Module", got)
                )
            if not name or {*"/@"} & {*name}:
                named = 'be named by strings without "/" and "@"'
                raise ArgumentError(message("Plan", "frozen", named, name))

    def trained(self) -> list[nn.Parameter]:
        """Return the optimizers' parameters that require a gradient, in order of their groups."""
        return [p for each in self.optimizers.values() for p in trained_by(each)]

    def entries(self) -> list[Any]:
        """Return the functions of all slots, slot by slot."""
        return [each for name in slot_names() for each in getattr(self, name)]

    def having(self, trait: str) -> list[Any]:
        """Return the slot functions with this trait."""
        return [each for each in self.entries() if trait in getattr(each, "traits", ())]

    def left_out(self) -> list[nn.Parameter]:
        """Return the parameters that slot functions, such as that of `freeze`, exclude from training."""
        made = [each for each in self.entries() if isinstance(each, SlotFunction)]
        return [parameter for each in made for parameter in each.left_out(self)]

    def always_applies(self, state: DistState) -> bool:
        """Return whether every update is applied, whatever the gradients are."""
        return state.scaler is None and not self.accept and not self.having("may_skip")

    def __repr__(self) -> str:
        parts = [
            describe(self.loss_fn),
            type(self.model).__name__,
            describe_optimizer(self.optimizer),
            f"weight_fn={describe(self.weight_fn)}",
        ]
        parts += [] if self.reduction == "mean" else [f"reduction={self.reduction!r}"]
        kinds = [f"{name!r}: {type(each).__name__}" for name, each in self.frozen.items()]
        parts += [f"frozen={{{', '.join(kinds)}}}"] if kinds else []
        parts += [
            f"{name}=[{', '.join(map(describe, getattr(self, name)))}]"
            for name in slot_names()
            if getattr(self, name)
        ]
        return f"Plan({', '.join(parts)})"


class SlotFunction(partial[Any]):
    """A function for a slot, with its settings, that takes part in `build`.

    `SlotFunction(fn, **settings)` is called as `fn(..., **settings)`. Subclass it to override the
    methods below. It prints as the call of the transform that made it.

    Attributes:
        traits: names that other transforms find by `plan.having(trait)`. In use are
            "needs_equal_replicas", "needs_every_parameter" (on several ranks, a loss must reach all
            trained parameters), "local_gradients" (ranks keep their own gradients: they are not
            compared, and `build` refuses a mesh and losses `(sum, count)`), "shards" (forwards have
            collectives, so all ranks run equally many), "cuts_sequences" (forwards have collectives
            along an axis of a mesh), "takes_blocks" (a strategy that averages over all ranks of a
            mesh, so that `wrap_cp` may take it over), "takes_empty" (the model may be on the meta
            device; a strategy calls `give_memory`), "acts_alone" (it has an effect in a world of
            one too), "virtual_ranks" (micro-batches represent ranks), "cuda_graphs" (a backward
            overwrites the previous gradients), "retries" (a batch may be repeated), "takes_windows"
            (a batch is a list of micro-batches), "fixed_microbatches" (their number determines the
            exact result), "compiles_loss" (one graph holds the whole forward), "clips_norm" (it
            clips by the norm `max_norm` among its settings), "collectives_in_apply" (the update has
            collectives, so a rank that is lost in it leaves the others waiting) and "may_skip" (an
            update may be skipped for other reasons than `accept`).
        source: text that `explain` adds: where the settings come from, if not from the call.

    >>> import accel_fn as af
    >>> class OneRank(af.extend.SlotFunction):
    ...     def allows(self, size):
    ...         return size == 1
    >>> def keep(state, grads):
    ...     return grads
    >>> plan = af.Plan(loss_fn, model, optimizer, gradients=(OneRank(keep),))
    >>> state, step = af.build(plan, af.DistState())
    """

    traits: frozenset[str] = frozenset()
    source: str = ""
    call: str = ""

    def validate(self, state: DistState, plan: Plan) -> None:
        """Raise if this plan cannot be built. `build` calls it before anything is moved.

        It runs on every rank. `build` exchanges failures, so no rank waits for one that raised.
        """

    def claim(self, plan: Plan[Batch]) -> Plan[Batch]:
        """Take over the content of another slot: `build` continues with the returned plan."""
        return plan

    def allows(self, size: int) -> bool:
        """Return whether this function works in a world of this size."""
        return True

    def num_parts(self, size: int) -> Mapping[str, int]:
        """Return into how many parts `size` ranks divide the model's memory, by name.

        The names are "parameters", "gradients" and "optimizer"; a name without an entry is not
        divided. Estimates of memory call this method.
        """
        return {}

    def share(self, plan: Plan, meshes: Mapping[str, Any]) -> nn.Module | None:
        """Divide the plan's model as `build` does, but without values: its tensors have no data.

        Estimates of memory call it, with a mesh of one axis for each axis of several ranks. The
        optimizers get the new parameters. Returns the module that maps a batch to its loss, if it
        replaces the loss.
        """
        return None

    def left_out(self, plan: Plan) -> Sequence[nn.Parameter]:
        """Return the parameters that require a gradient but get none."""
        return ()

    def with_source(self, source: str) -> Self:
        """Return a copy of this function with a source of its settings, which `explain` prints."""
        other = type(self)(self.func, *self.args, **self.keywords)
        other.source, other.call = source, self.call
        return other

    def __repr__(self) -> str:
        return self.call or describe_call(self.func, self.args, self.keywords)


class Stateful(SlotFunction):
    """A factory for a slot function that has state. `build` calls it once, so each step has its own.

    `build` calls it as `(state, plan) -> function` when the parameters have their final form. Slots
    that precede it in the plan already hold made functions. If the function has `state_dict` and
    `load_state_dict`, checkpoints hold its state, with tensors in the shapes that they have in a
    new step. Later code must not write in place to the result of `state_dict`. If the function has
    `check_saved` or `check_loaded`, `save` and `load` call it first; it raises, on every rank, if
    its state cannot be saved or loaded now. If it has `on_filled`, that is called before the first
    step, when a model that `empty` made has values: copy parameters then.

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
    >>> plan = replace(
    ...     af.Plan(loss_fn, model, optimizer), after_update=(af.extend.Stateful(counting, every=2),)
    ... )
    >>> state, step = af.build(plan, af.DistState())
    >>> for _ in range(3):
    ...     state, report = step(state, batch)
    2
    """

    def __init__(self, fn: Callable[..., Any], **settings: Any) -> None:
        """Store `fn`, which makes the function when called as `fn(state, plan, **settings)`."""


def check_finish(function: str, finish: object) -> None:
    """Refuse a `finish` that is not a mapping of names to functions."""
    holds = isinstance(finish, Mapping) and all(
        isinstance(name, str) and name and callable(fn) for name, fn in finish.items()
    )
    if not holds:
        rule = "be a mapping of names to functions of means"
        raise ArgumentTypeError(message(function, "finish", rule, type(finish).__name__))


def trained_by(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer that require a gradient, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def slot_names() -> list[str]:
    """Return the names of a plan's slots, in the order of its fields."""
    return [each.name for each in fields(Plan)[7:]]


def describe(fn: Any) -> str:
    """Format a function as in code: `name`, `name(argument=value)`, or its transform's call.

    A mapping of functions becomes a dict of such texts.
    """
    if isinstance(fn, Mapping):
        return f"{{{', '.join(f'{name!r}: {describe(each)}' for name, each in fn.items())}}}"
    call = getattr(fn, "call", None)
    if isinstance(call, str) and call:
        return call
    if isinstance(fn, partial):
        return describe_call(fn.func, fn.args, fn.keywords)
    name = getattr(fn, "__qualname__", None)
    return _describe_object(fn) if name is None else name.replace("<locals>.", "").split(".")[-1]


def describe_with_source(fn: Any) -> str:
    """Format a function as in code, and append where its settings come from."""
    source = getattr(fn, "source", "")
    return f"{describe(fn)}, {source}" if source else describe(fn)


def describe_call(fn: Any, args: Iterable[Any], keywords: Mapping[str, Any]) -> str:
    """Format a call as it is written in a program."""
    values = [*map(_describe_value, args)]
    values += [f"{name}={_describe_value(value)}" for name, value in keywords.items()]
    return f"{describe(fn)}({', '.join(values)})"


def _describe_value(value: Any) -> str:
    return describe(value) if callable(value) else _describe_object(value)


def _describe_object(value: Any) -> str:
    """Return a value's repr, or its type's name if the repr shows an address, which differs by rank."""
    plain: Any = object.__repr__
    return type(value).__name__ if type(value).__repr__ is plain else repr(value)
