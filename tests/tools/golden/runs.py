"""The table: plans, worlds and losses, five steps each, in float64."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours

NUM_STEPS = 5
Recipe = Callable[[], list[af.Transform]]
STRATEGIES: dict[str, tuple[Recipe, tuple[int, ...]]] = {
    "one": (list, (1,)),
    "ddp": (lambda: [af.wrap_ddp()], (1, 2, 3)),
    "fsdp": (lambda: [af.wrap_fsdp()], (1, 2, 3)),
    "fsdp kept whole": (lambda: [af.wrap_fsdp(reshard_after_forward=False)], (2,)),
    "reproducible": (lambda: [af.reproducible(num_virtual_ranks=2)], (1, 2)),
    "local_sgd": (lambda: [af.local_sgd(2)], (1, 2, 3)),
}
RECIPES: dict[str, Recipe] = {
    "plain": list,
    "clip": lambda: [af.clip(0.3)],
    "accumulate": lambda: [af.accumulate(2)],
    "everyday": lambda: [
        af.accumulate(2),
        af.clip(0.3),
        af.schedule(lambda step: 1 / (1 + step)),
        af.place(),
    ],
    "bf16": lambda: [af.with_amp("bf16")],
    "average": lambda: [af.ema(0.9)],
    "skips": lambda: [af.skip_nonfinite(), af.skip_spikes()],
    "freeze": lambda: [af.freeze("0.weight", until=2)],
    "activations": lambda: [af.checkpoint_activations(blocks="0")],
}
REFUSED = {
    ("local_sgd", "average"),
    ("local_sgd", "skips"),
    ("reproducible", "accumulate"),
    ("reproducible", "everyday"),
}
OPTIMIZERS = {"AdamW": ours.adamw, "SGD": ours.sgd}


@dataclass(frozen=True)
class Run:
    """A row of the table."""

    strategy: str
    recipe: str
    world_size: int
    optimizer: str
    loss: str

    def __str__(self) -> str:
        return f"{self.strategy}, {self.recipe}, {self.world_size}, {self.optimizer}, {self.loss}"


def table() -> Iterator[Run]:
    """All rows."""
    rows = product(STRATEGIES, RECIPES, OPTIMIZERS, ("rows", "tokens"))
    for strategy, recipe, optimizer, loss in rows:
        if (strategy, recipe) not in REFUSED:
            for world_size in STRATEGIES[strategy][1]:
                yield Run(strategy, recipe, world_size, optimizer, loss)


def bits(run: Run) -> str:
    """A checksum of the losses and the parameters of all ranks after five steps."""
    is_rows = run.loss == "rows"
    model = ours.regression_model() if is_rows else ours.token_model()
    batches = [*(_rows() if is_rows else _tokens())]

    def program(state: af.DistState) -> list[Tensor]:
        own = copy.deepcopy(model)
        loss_fn = ours.mse if is_rows else ours.token_loss
        options: dict[str, Any] = {} if is_rows else {"weight_fn": af.count_labels("labels")}
        plan: af.Plan[Any] = af.Plan(
            loss_fn, own, OPTIMIZERS[run.optimizer](own.parameters()), **options
        )
        transforms = [*RECIPES[run.recipe](), *STRATEGIES[run.strategy][0]()]
        state, step = af.build(af.compose(*transforms)(plan), state)
        found = []
        for batch in batches:
            state, report = step(state, af.shard_batch(batch, state))
            found.append(report.loss)
        return [*found, *map(_own, own.parameters())]

    torch.manual_seed(0)
    digest = hashlib.sha256()
    for tensors in simulate(program, world_size=run.world_size, timeout_s=60.0):
        for tensor in tensors:
            digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _own(parameter: nn.Parameter) -> Tensor:
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()


def _rows() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for size in (12, 12, 8, 12, 6)[:NUM_STEPS]:
        inputs = torch.randn(size, 3, generator=generator, dtype=torch.float64)
        yield inputs, inputs.sum(1, keepdim=True).tanh()


def _tokens() -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    for size in (12, 12, 8, 12, 6)[:NUM_STEPS]:
        labels = torch.randint(0, 4, (size, 4), generator=generator)
        ignored = torch.rand(size, 4, generator=generator) < 0.3
        ignored[:, 0] = False
        inputs = torch.randn(size, 4, 3, generator=generator, dtype=torch.float64)
        yield {"inputs": inputs, "labels": labels.masked_fill(ignored, -100)}
