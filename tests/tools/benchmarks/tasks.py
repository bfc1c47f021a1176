"""The models that are timed, and the ways to train them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LEARNING_RATE = 1e-3
NUM_BATCHES = 8  # distinct batches, used in turn

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Size:
    """A perceptron, its micro-batch size, and the number of updates in a timed block."""

    name: str
    widths: tuple[int, ...]
    batch_size: int
    updates_per_block: int
    clipping_target: float
    compiled_targets: tuple[float, float, float]
    """Targets with the whole step compiled, beside default AdamW: plain, accumulation 4, bf16."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to make an update, and accel_fn's target: CPU time as a ratio to the base."""

    name: str
    target: float | None = None
    max_norm: float | None = None
    num_microbatches: int = 1
    bf16: bool = False
    compiled_target: float | None = None
    """The target with the whole step compiled."""
    job: str = ""
    """The job around each update; see `jobs`."""
    same_data: bool = False
    """Are all ranks given the same batches?"""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One table of the results."""

    size: Size
    fused: bool
    way: Way
    world_size: int = 1

    @property
    def compiled_target(self) -> float | None:
        """Return the target of a compiled step; none for the small fused loop, which has a third
        less to save."""
        return None if self.fused and self.size is TINY else self.way.compiled_target

    @property
    def name(self) -> str:
        ranks = "two ranks, " if self.world_size > 1 else ""
        return f"{ranks}{self.size.name}, {'fused' if self.fused else 'default'}, {self.way.name}"

    @property
    def updates_per_block(self) -> int:
        return max(1, self.size.updates_per_block // self.way.num_microbatches)


TINY = Size(
    "tiny",
    (64, 64, 10),
    32,
    updates_per_block=240,
    clipping_target=0.95,
    compiled_targets=(0.32, 0.42, 0.40),
)
# Clipping is 2 to 6% of this loop by hand; half of that is the read of the gradients for the norm.
MIDDLE = Size(
    "middle",
    (784, 512, 512, 10),
    128,
    updates_per_block=10,
    clipping_target=1.0,
    compiled_targets=(1.0, 1.0, 1.0),
)

ALONE = [
    Scenario(size, fused, way)
    for size in (TINY, MIDDLE)
    for fused in (False, True)
    for way in (
        Way("plain", target=1.03, compiled_target=size.compiled_targets[0]),
        Way("clipping", target=size.clipping_target, max_norm=1.0),
        Way(
            "accumulation 4",
            target=1.05,
            num_microbatches=4,
            compiled_target=size.compiled_targets[1],
        ),
        Way("bf16", bf16=True, compiled_target=size.compiled_targets[2]),
    )
]
IN_TWO_RANKS = [
    Scenario(MIDDLE, fused, way, world_size=2)
    for fused in (False, True)
    for way in (
        Way("plain", target=1.0),
        Way("accumulation 4", target=1.0, num_microbatches=4),
    )
]


@dataclass(frozen=True, slots=True)
class Task:
    """A scenario with a model and data of its own: what a training loop is given.

    `microbatches[i]` are views of `batches[i]`, already cut.
    """

    scenario: Scenario
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[Batch]
    microbatches: list[list[Batch]]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def make_task(scenario: Scenario, rank: int) -> Task:
    """Make the same model on every call and every rank, and the same data on every call.

    All batches have the same inputs under labels of their own: nothing can be
    learned by heart, so gradients stay large and clipping has work in every update.
    """
    size, num_parts = scenario.size, scenario.way.num_microbatches
    random = torch.Generator().manual_seed(rank)
    rows = size.batch_size * num_parts
    inputs = 2 * torch.randn(rows, size.widths[0], generator=random)
    labels = torch.randint(size.widths[-1], (NUM_BATCHES, rows), generator=random)
    batches = [(inputs.clone(), targets) for targets in labels]
    model = make_model(size)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, fused=True if scenario.fused else None
    )
    microbatches = [
        list(zip(*[tensor.split(size.batch_size) for tensor in batch], strict=True))
        for batch in batches
    ]
    return Task(scenario, model, optimizer, batches, microbatches)


def make_model(size: Size) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for num_in, num_out in pairwise(size.widths):
            layers += [nn.Linear(num_in, num_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
