"""Mistakes of users: plans that `build`, a step or `assert_equivalent` must notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

import accel_fn as af
from tests.support import strategies as ours
from tests.tools.mutants.probe import batches, who_notices

MANY = af.compose(af.wrap_ddp(), af.accumulate(2))


def by_sample() -> tuple[af.Plan, af.Plan]:
    right = ours.plan(model=ours.token_model(), loss_fn=ours.token_loss, weight_fn=labels)
    return right, MANY(replace(right, weight_fn=af.count_samples))


labels = af.count_labels("labels")


def of(recipe: Callable[[af.Plan], af.Plan] = MANY, **wrong: Any) -> tuple[af.Plan, af.Plan]:
    """Train one plan in one process and, by a recipe, on two ranks."""
    return ours.plan(**wrong), recipe(ours.plan(**wrong))


def sum_loss(model: Any, batch: Any) -> Any:
    return F.mse_loss(model(batch[0]), batch[1], reduction="sum") / 8


def batch_norm() -> torch.nn.Module:
    model = ours.regression_model()
    return torch.nn.Sequential(model[0], torch.nn.BatchNorm1d(5).double(), model[2])


def stepping() -> torch.nn.Module:
    model = ours.regression_model()
    model[0].weight.register_post_accumulate_grad_hook(lambda p: p.data.sub_(0.1 * p.grad))
    return model


def noisy(state: af.DistState, grads: af.Grads) -> af.Grads:
    return grads.map(lambda value: value + state.rank)


def partial_grads(model: Any, batch: Any) -> Any:
    loss = ours.mse(model, batch)
    loss.backward(retain_graph=True)
    return loss


def of_rank(state: af.DistState, batch: Any) -> Any:
    return tuple(value[: len(value) - state.rank] for value in batch)


PLANS: dict[str, Callable[[], tuple[af.Plan, af.Plan]]] = {
    "a masked loss is weighed by samples": by_sample,
    "a loss is a sum, and its plan does not declare it": lambda: of(loss_fn=sum_loss),
    "every batch weighs the same": lambda: of(weight_fn=lambda batch: 1),
    "BatchNorm sees micro-batches": lambda: of(model=batch_norm()),
    "a hook updates a parameter in the backward": lambda: of(model=stepping()),
    "the loss runs a backward of its own": lambda: of(loss_fn=partial_grads),
    "gradient noise of each rank's own": lambda: of(
        lambda plan: replace(MANY(plan), gradients=(noisy,))
    ),
    "a rank drops samples": lambda: of(lambda plan: replace(MANY(plan), place_batch=(of_rank,))),
    "several ranks and no wrapper": lambda: of(af.accumulate(2)),
    "a rate of zero": lambda: of(optimizer=lambda p: torch.optim.SGD(p, lr=0.0)),
}


def noticed_by(name: str) -> str:
    """Return what notices a mistake, `build` or `assert_equivalent`; empty if neither does."""
    plan, other = PLANS[name]()
    given = batches(tokens=plan.weight_fn is labels)
    return who_notices(plan, other, given, 2)
