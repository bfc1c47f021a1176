"""ema and swa: averages of the parameters over updates, which often evaluate better."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from accel_fn.core.delayed_read import UpdateCount
from accel_fn.core.dtensor import local
from accel_fn.core.empty import has_gaps, is_empty
from accel_fn.core.plan import Plan, Stateful, describe, unwrapped
from accel_fn.core.report import Report, verdict_of
from accel_fn.core.state import DistState
from accel_fn.core.step import Step
from accel_fn.core.transform import Transform, fill, named
from accel_fn.errors import (
    ArgumentError,
    ArgumentTypeError,
    PlanError,
    StateError,
    check_count,
    check_positive,
    message,
)

DecayFn = Callable[[int], float]
RateFn = Callable[[int], float]
_HALVES = {torch.float16, torch.bfloat16}
_dtype = attrgetter("dtype")


def ema(decay: float | DecayFn, *, num_warmup: int = 0) -> Transform:
    """Keep an exponential moving average of the parameters.

    After every update that is made, `mean = decay * mean + (1 - decay) * parameter`;
    after the first one, it is the parameter itself. Use it by `averaged`.

    Law: equal on all ranks; an update that is skipped does not move it.
    Tests: `tests/laws/law10_average.py`.

    Args:
        decay: in (0, 1); 0.999 looks back on about a thousand updates. Or a function of the number
            of updates made since the warm-up, from 1 on, that returns one in [0, 1]: a decay
            that grows, `lambda n: min(0.999, (1 + n) / (10 + n))`, averages from the start on.
        num_warmup: number of updates at the start, >= 0, after which the average still is the
            parameters themselves.

    Returns:
        A transform.

    Raises:
        ValueError: `decay` is not in (0, 1), or `num_warmup` is not an integer >= 0. In a step, on
            all ranks, after the update is made: the function returns a number outside of [0, 1].
        TypeError: `decay` is neither a number nor a function, or does not return a number.

    Cost: one read of the parameters, and one read and one write of their average; memory for the
    average, in float32 for parameters in half precision. No host synchronisation.

    Source: Polyak and Juditsky 1992; `torch.optim.swa_utils.get_ema_multi_avg_fn`.

    >>> import accel_fn as af
    >>> af.ema(0.999)(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=count_samples, \
after_update=[ema(0.999)])
    >>> def growing(num_updates):
    ...     return min(0.999, (1 + num_updates) / (10 + num_updates))
    >>> af.ema(growing)
    ema(growing)
    """
    warmup = f", num_warmup={num_warmup}" if num_warmup else ""
    if callable(decay):
        rate = partial(following, decay_fn=decay)
        return _averaging("ema", rate, num_warmup, f"ema({describe(decay)}{warmup})")
    if not check_positive("ema", "decay", decay) < 1:
        raise ArgumentError(message("ema", "decay", "be < 1", decay))
    rate = partial(exponential, decay=float(decay))
    return _averaging("ema", rate, num_warmup, f"ema({decay}{warmup})")


def swa(*, num_warmup: int = 0) -> Transform:
    """Keep the mean of the parameters over all updates, as SWA does.

    Law: equal on all ranks; an update that is skipped does not move it.
    Tests: `tests/laws/law10_average.py`.

    Args:
        num_warmup: number of updates at the start, >= 0, that do not count.

    Returns:
        A transform.

    Raises:
        ValueError: `num_warmup` is not an integer >= 0.

    Cost: the same as for `ema`.

    Source: Izmailov et al. 2018, arXiv:1803.05407.

    >>> import accel_fn as af
    >>> af.swa(num_warmup=100)(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=count_samples, after_update=[swa(num_warmup=100)])
    """
    warmup = f"num_warmup={num_warmup}" if num_warmup else ""
    return _averaging("swa", uniform, num_warmup, f"swa({warmup})")


@contextmanager
def averaged(step: Step) -> Iterator[None]:
    """Give the model its averaged parameters inside the context: to evaluate, or for `save_model`.

    A step, `save` and `load` raise an error inside. Buffers are not averaged, and changes to
    them inside are undone. For running statistics of the averaged model, call
    `torch.optim.swa_utils.update_bn` inside.

    Args:
        step: a step of a plan with `ema` or `swa`.

    Yields:
        Nothing.

    Raises:
        TypeError: `step` is not a step.
        ValueError: the plan has no average, or several; a step is made inside; nothing has filled the
            parameters of a model that `empty` made.

    Cost: two copies of the parameters, and the memory of one.

    >>> import accel_fn as af
    >>> state, step = af.build(af.ema(0.9)(af.Plan(loss_fn, model, optimizer)), af.DistState())
    >>> state, report = step(state, batch)
    >>> with af.averaged(step):
    ...     loss = step.forward(state, batch)
    """
    if not isinstance(step, Step):
        rule = "be what build gave"
        raise ArgumentTypeError(message("averaged", "step", rule, type(step).__name__))
    found = [each for each in step.plan.after_update if isinstance(each, Average)]
    if len(found) != 1:
        raise PlanError(
            f"averaged: step must have one average in its plan, got {len(found)}; add ema(decay)"
        )
    step.check_filled("averaged")
    step.strategy.reset()
    with found[0].shown():
        try:
            yield
        finally:
            step.strategy.reset()


class Average:
    """Means of the parameters of one step, by name.

    torch's `AveragedModel` is not used: it copies the whole module, counts calls instead of
    updates, and rounds the weight of a uniform average to float32. Tests compare the two.
    """

    def __init__(self, state: DistState, plan: Plan, *, rate: RateFn, num_warmup: int) -> None:
        self._model = unwrapped(plan.model)
        self._rate = rate
        self._num_warmup = num_warmup
        self._updates = UpdateCount(always=plan.always_applies(state))
        self._is_shown = False
        # List the parameters once: in a large model, listing them takes longer than starting the
        # kernels.
        self._averaged = {
            name: each
            for name, each in self._model.named_parameters()
            if each.is_floating_point() or each.is_complex()  # integers have no useful mean
        }
        self._means = {n: _wide(each.detach()).clone() for n, each in self._averaged.items()}
        self._is_waiting = is_empty(plan.model)
        """Whether the means are copies of parameters that have no values yet."""

    def __call__(self, state: DistState, report: Report) -> DistState:
        if self._is_shown:
            raise StateError("step: state must not be stepped within averaged(step), got an update")
        applied = verdict_of(report)
        num_before = self._updates.read()
        made = self._updates.add(applied)
        if made is None:
            self._follow(torch.where(applied, self._weight(num_before), 0.0))
        elif made:
            self._follow(self._weight(num_before))
        return state

    def on_filled(self) -> None:
        """Start the means from the parameters, except those that a checkpoint has given."""
        if self._is_waiting:
            # Copy parameters to means that are still NaN: a step towards the parameter would give
            # NaN again, by NaN + 1.0 * (parameter - NaN).
            gaps = {
                name: self._averaged[name] for name, mean in self._means.items() if has_gaps(mean)
            }
            _copy(gaps, self._means)
            self._is_waiting = False

    def _weight(self, num_updates: int) -> float:
        return self._rate(max(0, num_updates - self._num_warmup))

    def _follow(self, weight: float | Tensor) -> None:
        """Move each mean towards its parameter by a fraction, `weight`, of the difference."""
        means = [*self._means.values()]
        values = [*map(Tensor.detach, self._averaged.values())]
        if not _HALVES.isdisjoint(map(_dtype, values)):
            values = [*map(_wide, values)]
        if isinstance(weight, float):
            torch._foreach_lerp_(means, values, weight)
            return
        means, values = [local(each) for each in means], [local(each) for each in values]
        kinds = {(mean.device, mean.dtype) for mean in means}
        # Copy the weight once for each device and dtype, since the host waits for each copy to the
        # host.
        weights = {kind: weight.to(*kind) for kind in kinds}
        torch._foreach_lerp_(means, values, [weights[mean.device, mean.dtype] for mean in means])

    def _values(self) -> dict[str, Tensor]:
        return {name: each.detach() for name, each in self._model.named_parameters()}

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Copy the means into the model if it has been updated; restore its tensors at the end."""
        if self._is_shown:
            raise StateError(
                "averaged: step must not be within averaged(step) already, got it twice"
            )
        there = {**self._values(), **dict(self._model.named_buffers())}
        kept = {name: value.clone() for name, value in there.items()}
        num_updates = self._updates.read()
        self._is_shown = True
        try:
            if num_updates:
                _copy(self._means, there)
            yield
        finally:
            _copy(kept, there)
            self._is_shown = False

    def check_saved(self) -> None:
        """Refuse a save inside `averaged`, which would store means instead of the parameters."""
        self._check_own("save")

    def check_followed(self) -> None:
        """Refuse a `build` inside `averaged`: its step would begin with means, not with the parameters."""
        self._check_own("build")

    def check_loaded(self) -> None:
        """Refuse a load inside `averaged`, since the end of this context would overwrite the parameters."""
        self._check_own("load")

    def _check_own(self, function: str) -> None:
        if self._is_shown:
            rule = "have its own parameters, got those of averaged(step)"
            raise StateError(f"{function}: step must {rule}; call it before or after")

    def state_dict(self) -> dict[str, Any]:
        """Return the state that checkpoints hold."""
        means = {f"mean/{name}": mean for name, mean in self._means.items()}
        return {**means, "num_updates": self._updates.read()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        means = {name: f"mean/{name}" for name in self._means}
        # Copy only the means that are in the checkpoint: the checkpoint of another program may lack
        # some.
        _copy({name: saved[key] for name, key in means.items() if key in saved}, self._means)
        self._updates.restore(saved["num_updates"])


def _wide(value: Tensor) -> Tensor:
    """Widen half precision to float32.

    In half precision, the change of one update would be rounded away.
    """
    return value.float() if value.dtype in _HALVES else value


def _copy(values: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            into[name].copy_(value)


def _averaging(function: str, rate: Callable[..., float], num_warmup: int, call: str) -> Transform:
    check_count(function, "num_warmup", num_warmup, minimum=0)
    slot = AverageSlot(Average, rate=rate, num_warmup=num_warmup)
    return named(fill(after_update=slot), call)


class AverageSlot(Stateful):
    """The slot function of ema and swa: it calls `Average` with its settings."""

    traits = frozenset({"needs_equal_replicas"})


def exponential(num_updates: int, *, decay: float) -> float:
    """Return the weight of the newest parameters in an exponential average of `num_updates` earlier ones."""
    return 1 - decay if num_updates else 1.0


def following(num_updates: int, *, decay_fn: DecayFn) -> float:
    """Return the weight of the newest parameters for a decay that depends on `num_updates`."""
    if not num_updates:
        return 1.0
    decay = decay_fn(num_updates)
    if isinstance(decay, bool) or not isinstance(decay, numbers.Real):
        raise ArgumentTypeError(message("ema", "decay", "return a number", decay))
    if not 0 <= decay <= 1:
        rule = f"return a number in [0, 1] for {num_updates} updates"
        raise ArgumentError(message("ema", "decay", rule, decay))
    return 1.0 - float(decay)


def uniform(num_updates: int) -> float:
    """Return the weight of the newest parameters in a uniform average with `num_updates` earlier ones."""
    return 1 / (num_updates + 1)
