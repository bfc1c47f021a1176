"""Checks of the first batch of a step: what the loss is a mean or a sum of, and the model's mode."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from accel_fn.base.batch import num_samples, tensors_of
from accel_fn.base.rng import random_state, restore_random
from accel_fn.base.split_batch import split_batch
from accel_fn.base.state import DistState
from accel_fn.base.torch_compile import uncompiled
from accel_fn.base.weights import count_labels, weigh
from accel_fn.comm import primitives
from accel_fn.comm.collectives import broadcast
from accel_fn.comm.gather import gather
from accel_fn.errors import AccelError, LossError
from accel_fn.step.loss_module import run_forward
from accel_fn.step.plan import Plan
from accel_fn.step.strategy import Strategy

_NUM_SAMPLES = 8
_MOST_LOOKS = 10
_TOO_FEW = "no batch has had two samples"
_NO_HALVES = "half of each batch weighs nothing, or a loss is not finite"
_EXACT = {torch.float64: 1e-8, torch.float32: 1e-4}
_HALF = 2e-2
"""How far a sum in another order may be from a loss, of its size: by its dtype, and under autocast."""


class Halves(NamedTuple):
    """A batch and its halves: losses, weights, and weights without the first label of each row."""

    losses: tuple[float, float, float]
    weights: tuple[float, float, float]
    shifted: tuple[float, float, float] | None
    tolerance: float


class FirstBatch:
    """Looks at the first batch of a step; after it, nothing of this runs."""

    def __init__(
        self, state: DistState, plan: Plan, strategy: Strategy, *, check_loss: bool
    ) -> None:
        self._plan = plan
        self._strategy = strategy
        self._num_looks = 0
        self.is_due = True
        """Is there still something to look at?"""
        is_cut = state.world_size > 1 or plan.split or plan.having("virtual_ranks")
        check_loss = check_loss and not plan.terms
        self._checks_loss = check_loss and bool(is_cut)
        self.verdict = "is not compared with that of its halves"
        """The result of the comparison, for `explain`."""
        if check_loss:
            self.verdict = (
                "is compared with that of its halves in the first step"
                if is_cut
                else "is of whole batches alone, so it may be a mean or a sum"
            )

    def look(self, state: DistState, batch: Any) -> None:
        """Warn of a model in evaluation mode; refuse a loss of another reduction, on all ranks alike."""
        if not self._num_looks:
            self._warn_of_evaluation_mode()
        self._num_looks += 1
        self.is_due = False
        if not self._checks_loss:
            return
        found = self._measured(state, batch)
        if isinstance(found, Halves):
            self._judge(found)
            return
        self.verdict = f"could not be compared with that of its halves: {found}"
        self.is_due = self._num_looks < _MOST_LOOKS

    def _warn_of_evaluation_mode(self) -> None:
        model = self._plan.model
        if not model.training:
            warnings.warn(
                f"step: model should be in training mode, got a {type(model).__name__} in evaluation mode: "
                "dropout and batch statistics are off; call model.train() before the step",
                stacklevel=4,
            )

    def _measured(self, state: DistState, batch: Any) -> Halves | str:
        """The losses of the first rank that has them, on all ranks; or why there are none."""
        mine: Halves | str
        try:
            part = self._part(state, batch)
        except AccelError as error:  # on all ranks alike
            return f"its rows cannot be joined: {error}"
        if part is None:
            return _TOO_FEW
        try:
            mine = self._run(state, part)
        except Exception as error:  # if training raises it too, the step itself raises it
            self._strategy.reset()
            mine = f"{type(error).__name__} in a forward in evaluation mode"
        every = primitives.exchange(mine, state, "step")
        found = next((each for each in every if isinstance(each, Halves)), every[0])
        if isinstance(found, Halves) and not (
            all(found.weights) and all(map(isfinite, found.losses))
        ):
            return _NO_HALVES
        return found

    def _part(self, state: DistState, batch: Any) -> Any:
        """A few samples of the global batch, the same number on all ranks; None if there are no two."""
        whole, num_rows = _counted(self._plan, batch)
        # All ranks run as many forwards: FSDP unshards in each, and a loss may hold collectives.
        rows = primitives.exchange(num_rows, state, "step")
        if max(rows) < 2:
            return _joined(whole, state) if sum(rows) > 1 else None
        part = None if num_rows < 2 else split_batch(whole, max(1, num_rows // _NUM_SAMPLES))[0]
        if min(rows) < 2:
            part = broadcast(part, state, source=[each > 1 for each in rows].index(True))
        return part

    def _run(self, state: DistState, part: Any) -> Halves:
        """Losses and weights of a batch and its halves, without a trace in the model."""
        plan, strategy = self._plan, self._strategy
        parts = [part, *split_batch(part, 2)]
        weights = weigh(plan.weight_fn, parts)
        shifted = _shifted(plan)
        others = None if shifted is None else _triple(weigh(shifted, parts))
        with ExitStack() as around:
            around.enter_context(_untouched(plan.model, state))
            around.enter_context(torch.no_grad())
            around.enter_context(uncompiled())
            losses = [run_forward(state, plan, strategy.loss_module, each)[0] for each in parts]
        tolerance = _HALF if plan.forward_contexts else _EXACT.get(losses[0].dtype, _HALF)
        return Halves(_triple(map(float, losses)), _triple(weights), others, tolerance)

    def _judge(self, found: Halves) -> None:
        """Refuse the plan if another reduction fits, and the plan's does not."""
        declared = self._plan.reduction
        candidates = {
            "mean": _mean(found.losses, found.weights),
            "sum": found.losses[1] + found.losses[2],
            "shift": None if found.shifted is None else _mean(found.losses, found.shifted),
        }
        fits = [
            name
            for name, value in candidates.items()
            if value is not None and _is_close(value, found.losses[0], found.tolerance)
        ]
        if declared in fits:
            self.verdict = f"is a {declared} over the items of a batch: that of its halves agrees"
        elif declared == "mean" and "shift" in fits:
            fitting = _other_shift(self._plan)
            raise LossError(
                "step: weight_fn must count the labels that the loss is a mean over, got num_labels(shift="
                f"{1 - fitting}) where shift={fitting} fits; use num_labels(..., shift={fitting}), or "
                "build(..., check_loss=False)"
            )
        elif fits and fits[0] in ("mean", "sum"):
            (loss, first, second), (_, *sizes) = found.losses, found.weights
            raise LossError(
                f"step: loss_fn must return the {declared} over the batch's items, got a {fits[0]}: "
                f"{loss:.6g} for a batch, {first:.6g} and {second:.6g} for its halves of {sizes[0]:g} and "
                f"{sizes[1]:g} items; use Plan(..., reduction={fits[0]!r}), return the {declared}, or "
                "build(..., check_loss=False)"
            )
        else:
            self.verdict = (
                "is neither a mean nor a sum over the items of a batch: its halves give "
                f"{found.losses[1]:.6g} and {found.losses[2]:.6g}, the batch {found.losses[0]:.6g}"
            )


def _counted(plan: Plan, batch: Any) -> tuple[Any, int]:
    """The batch, and its number of samples: 0 if they cannot be counted."""
    # Not by the plan's split, which the user may have written to be called once per batch.
    try:
        # A list is one batch, as torch's collate makes it of pairs, unless it holds micro-batches.
        is_window = bool(plan.having("takes_windows"))
        whole = batch[0] if is_window and type(batch) is list else batch
        return whole, num_samples(whole)
    except Exception:  # the step refuses the batch, on all ranks alike
        return None, 0


def _joined(batch: Any, state: DistState) -> Any:
    """The rows of all ranks; a list that holds tensors is no row, as where a batch is cut."""
    leaves, form = pytree.tree_flatten(batch, lambda x: type(x) is list and not tensors_of(x))
    return pytree.tree_unflatten([*gather(tuple(leaves), state)], form)


def _triple(numbers: Any) -> tuple[float, float, float]:
    first, second, third = numbers
    return first, second, third


def _mean(losses: Sequence[float], weights: Sequence[float]) -> float | None:
    """The mean of the halves' losses; None if one of them has no items."""
    if not weights[1] or not weights[2]:
        return None
    return (losses[1] * weights[1] + losses[2] * weights[2]) / (weights[1] + weights[2])


def _is_close(value: float, loss: float, tolerance: float) -> bool:
    return abs(value - loss) <= tolerance * max(abs(value), abs(loss))


def _shifted(plan: Plan) -> Any:
    """A `num_labels` that leaves out the first label of each row, or does not; None for another weight_fn."""
    weight_fn = plan.weight_fn
    if not isinstance(weight_fn, partial) or weight_fn.func is not count_labels:
        return None
    return partial(count_labels, **{**weight_fn.keywords, "shift": _other_shift(plan)})


def _other_shift(plan: Plan) -> int:
    keywords = getattr(plan.weight_fn, "keywords", {})
    return 0 if keywords.get("shift") else 1


@contextmanager
def _untouched(model: nn.Module, state: DistState) -> Iterator[None]:
    """Evaluation mode; after it modules, buffers and random generators are as they were."""
    modules = list(model.modules())
    # Includes attributes such as caches and counters, unless they are written in place.
    attributes = [dict(vars(module)) for module in modules]
    buffers = [dict(module._buffers) for module in modules]
    values = [(each, each.clone()) for each in model.buffers()]
    # No lock of `kept_random` here: simulated ranks would wait for each other's collectives.
    generators = random_state(state.device)
    try:
        model.eval()
        yield
    finally:
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
        for module, kept, own in zip(modules, attributes, buffers, strict=True):
            vars(module).clear()
            vars(module).update(kept)
            module._buffers.clear()
            module._buffers.update(own)
        restore_random(generators, state.device)
