"""Models, losses, plans and hypothesis strategies that the tests train, and comparisons with the
reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings
from torch import Tensor, nn

import accel_fn as af
from accel_fn.core import dtensor
from accel_fn.testing import simulate
from tests import reference

NUM_FEATURES, NUM_CLASSES = 3, 4
Recipe = Callable[[af.Plan], af.Plan]
Optimizer = torch.optim.Optimizer
MakeOptimizer = Callable[[Any], Optimizer]

# Sums in float64, in another order: a few units in the last place of values near 1, for a dozen
# terms. AdamW divides by the root of a second moment, which can lose half the digits of a gradient
# near zero, but not of the parameters that are compared.
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def share(part: float) -> settings:
    """Return this share of a profile's examples, for tests whose examples are slow."""
    return settings(max_examples=max(2, round(part * settings().max_examples)))


def regression_model(seed: int = 0) -> nn.Module:
    """Make a model in float64 from three features to one number, with a hidden layer."""
    return _seeded(seed, NUM_FEATURES, 5, 1)


def token_model(seed: int = 0) -> nn.Module:
    """Make a model in float64 from three features to four classes, for every token."""
    return _seeded(seed, NUM_FEATURES, 5, NUM_CLASSES)


def _seeded(seed: int, *widths: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(widths[0], widths[1]), nn.Tanh(), nn.Linear(widths[1], widths[2])
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model


def mse(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean over samples."""
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean over labels that are not ignored; 0/0 if all are."""
    logits = model(batch["inputs"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def adamw(parameters: Any) -> Optimizer:
    """Make AdamW, the most common optimizer."""
    return torch.optim.AdamW(parameters, lr=0.05)


def sgd(parameters: Any) -> Optimizer:
    """Make SGD with momentum, so that an update depends on those before it."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def plan(
    *,
    model: nn.Module | None = None,
    optimizer: MakeOptimizer = sgd,
    loss_fn: Any = mse,
    weight_fn: Any = af.count_samples,
) -> af.Plan:
    """Make a plan for the small model, or for another one."""
    model = model or regression_model()
    return af.Plan(loss_fn, model, optimizer(model.parameters()), weight_fn)


def built(
    recipe: Recipe = lambda plan: plan, state: af.DistState | None = None, **given: Any
) -> tuple[af.DistState, af.Step]:
    """Build such a plan after a transform, in one process if no state is given.

    Tests of plans count forwards, so its loss is not compared; tests/core/test_reduction.py is about that.
    """
    return af.build(recipe(plan(**given)), state or af.DistState(), check_loss=False)


def trained_by_hand(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    loss_fn: Any = mse,
    optimizer: MakeOptimizer = adamw,
    max_norm: float | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and parameters of the reference loop."""
    model = copy.deepcopy(model)
    losses = reference.train(
        model, loss_fn, optimizer(model.parameters()), batches, max_norm=max_norm
    )
    return losses, model.state_dict()


def trained(
    model: nn.Module,
    parts: Sequence[Sequence[Any]],
    recipe: Recipe,
    *,
    loss_fn: Any = mse,
    optimizer: MakeOptimizer = adamw,
    weight_fn: Any = af.count_samples,
    check_loss: bool = True,
    **options: Any,
) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Return losses and parameters of every rank; `parts[rank]` is that rank's batches."""
    models = [copy.deepcopy(model) for _ in parts]

    def run(state: af.DistState) -> tuple[list[float], dict[str, Tensor]]:
        mine = models[state.rank]
        plan = af.Plan(loss_fn, mine, optimizer(mine.parameters()), weight_fn, **options)
        state, step = af.build(recipe(plan), state, check_loss=check_loss)
        losses = []
        for batch in parts[state.rank]:
            state, report = step(state, batch)
            losses.append(float(report.loss))
        return losses, whole(mine.state_dict())

    return simulate(run, world_size=len(parts))


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gather the tensors that are sharded; every rank calls it."""
    return {name: dtensor.whole(tensor) for name, tensor in tensors.items()}


def dealt(batches: Sequence[Any], sizes: Sequence[Sequence[int]]) -> list[list[Any]]:
    """Cut each batch into consecutive parts of random sizes: `dealt(...)[rank][batch]`."""
    world_size = len(sizes[0])
    ranks: list[list[Any]] = [[] for _ in range(world_size)]
    for batch, cut in zip(batches, sizes, strict=True):
        start = 0
        for rank, size in enumerate(cut):
            ranks[rank].append(rows(batch, start, start + size))
            start += size
    return ranks


def dealt_evenly(batches: Sequence[Any], world_size: int) -> list[list[Any]]:
    """Cut each batch, a tuple of tensors, as evenly as possible:
    `dealt_evenly(...)[rank][batch]`."""
    sizes = [[len(part) for part in batch[0].tensor_split(world_size)] for batch in batches]
    return dealt(batches, sizes)


def rows(batch: Any, start: int, stop: int) -> Any:
    """Select rows of a tuple or dict of tensors."""
    if isinstance(batch, dict):
        return {key: value[start:stop] for key, value in batch.items()}
    return tuple(value[start:stop] for value in batch)


def kept_tensors(step: af.Step) -> dict[str, Tensor]:
    """Copy parameters, buffers and optimizer state, by name."""
    tensors = dict(step.plan.model.state_dict())
    for number, kept in step.plan.optimizer.state_dict()["state"].items():
        tensors |= {f"{number} {name}": value for name, value in kept.items()}
    return {name: value.clone() for name, value in tensors.items()}


def assert_close(
    actual: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float
) -> None:
    """Compare every parameter; the message names the one that differs."""
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name],
            value,
            **(tolerance or EXACT),
            msg=lambda text, name=name: f"{name}: {text}",
        )


def assert_identical(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare every parameter to the bit."""
    assert_close(actual, expected, rtol=0.0, atol=0.0)


def assert_trained(
    ranks: Sequence[tuple[list[float], dict[str, Tensor]]],
    expected: tuple[list[float], dict[str, Tensor]],
) -> None:
    """Compare losses and parameters of every rank with those of the reference loop."""
    losses, parameters = expected
    for found, actual in ranks:
        assert_close(actual, parameters)
        assert found == pytest.approx(losses, rel=1e-6, abs=1e-12)  # the report may be in float32
