"""Rows 1 to 7: gradients that are not those of the global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests import reference
from tests.field.accelerate import (
    everywhere,
    fresh,
    gradient,
    gradient_by_hand,
    linear,
    off,
    rank,
    ratio,
    row,
    samples,
)
from tests.support import strategies as ours


@row(1)
def last_windows() -> str:
    return f"gradient x{_last_window(3, 2):.1f} for 1 of 2, x{_last_window(6, 4):.1f} for 2 of 4"


def _last_window(num_batches: int, num_steps: int) -> float:
    """Compare the last update's gradient with that of its samples."""
    accelerator = fresh(gradient_accumulation_steps=num_steps)
    data, model = samples(num_batches * 8), linear()
    wrapped, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.0), DataLoader(data, batch_size=4)
    )
    for batch in loader:
        with accelerator.accumulate(wrapped):
            accelerator.backward(ours.mse(wrapped, batch))
            last = gradient(model)
            optimizer.step()
            optimizer.zero_grad()
    size = num_batches % num_steps * 8
    return ratio(last, gradient_by_hand(data[len(data) - size :]))


@row(2)
def filled_tails() -> str:
    _, error = _tail(9)
    copies, _ = _tail(1)
    return f"last gradient of 9 samples {error:.0%} off; 1 sample becomes {copies} copies"


def _tail(count: int) -> tuple[int, float]:
    """Return the number of samples in the last batch, and the error of its gradient."""
    accelerator = fresh()
    data, model = samples(count), linear()
    wrapped, loader = accelerator.prepare(model, DataLoader(data, batch_size=4))
    for batch in loader:
        model.zero_grad()
        accelerator.backward(ours.mse(wrapped, batch))
    copies = sum(everywhere(len(batch[0])))
    return copies, off(gradient(model), gradient_by_hand(data[count // 8 * 8 :]))


@row(3)
def unfilled_tails() -> str:
    accelerator = fresh(dataloader_config=DataLoaderConfiguration(even_batches=False))
    data, model = samples(15), linear()
    wrapped, loader = accelerator.prepare(model, DataLoader(data, batch_size=9))
    for batch in loader:
        accelerator.backward(ours.mse(wrapped, batch))
    first, second = everywhere(len(batch[0]))
    error = off(gradient(model), gradient_by_hand(data[:]))
    return f"{error:.0%} off for {first} and {second} samples"


@row(4)
def tokens() -> str:
    labels = torch.full((12, 3), -100)
    labels[:5] = 1
    labels[6, :] = 2
    inputs = torch.randn(12, 3, 3, generator=torch.Generator().manual_seed(0)).double()
    batch = {"inputs": inputs, "labels": labels}
    accelerator, model = fresh(), ours.token_model()
    wrapped = accelerator.prepare(model)
    mine = ours.rows(batch, 6 * rank(), 6 * rank() + 6)
    accelerator.backward(ours.token_loss(wrapped, mine))
    first, second = everywhere(int((mine["labels"] >= 0).sum()))
    error = off(gradient(model), gradient_by_hand(batch, ours.token_model(), ours.token_loss))
    return f"{error:.0%} off for {first} and {second} valid tokens"


@row(5)
def epochs() -> str:
    accelerator = fresh(gradient_accumulation_steps=4)
    data, model = samples(103), ours.regression_model()
    wrapped, optimizer, loader = accelerator.prepare(
        model, ours.adamw(model.parameters()), DataLoader(data, batch_size=4)
    )
    for _ in range(3):
        for batch in loader:
            with accelerator.accumulate(wrapped):
                accelerator.backward(ours.mse(wrapped, batch))
                optimizer.step()
                optimizer.zero_grad()
    batches = [tuple(batch) for batch in DataLoader(data, batch_size=4 * 4 * 2)]
    alone = ours.regression_model()
    reference.train(alone, ours.mse, ours.adamw(alone.parameters()), batches * 3)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    farthest = max(float((found - right).detach().abs().max()) for found, right in pairs)
    return f"a parameter {farthest:.2f} from the single-process run"


@row(6)
def zeroed() -> str:
    found, data = _window(lambda optimizer: optimizer.zero_grad(), lambda *_: None)
    factor = ratio(found, gradient_by_hand(data[8:]))
    return f"all but the last micro-batch lost, and that x{factor:.1f}"


@row(7)
def clipped() -> str:
    norms = []

    def clip(accelerator: Accelerator, model: nn.Module) -> None:
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))

    found, data = _window(lambda _: None, clip)
    right = gradient_by_hand(data[:])
    first, second = everywhere(norms[0])
    assert abs(first - second) > 0.1
    assert right.norm() > 1.0
    error = off(found, right / right.norm())
    return f"clips partial gradients, different on each rank: {error:.0%} off"


def _window(before: Callable[[Any], None], after: Callable[..., None]) -> tuple[Tensor, Any]:
    """Return the gradient of two micro-batches, with calls before or after each backward."""
    accelerator = fresh(gradient_accumulation_steps=2)
    data, model = samples(16), linear()
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for start in (4 * rank(), 8 + 4 * rank()):
        with accelerator.accumulate(wrapped):
            before(optimizer)
            accelerator.backward(ours.mse(wrapped, data[start : start + 4]))
            after(accelerator, wrapped)
    return gradient(model), data
