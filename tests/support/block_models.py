"""A model of repeated blocks, as wrap_fsdp shards it, and its training on any number of ranks."""

from __future__ import annotations

import torch
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        self.calls += 1
        return inputs + self.inner(inputs)


class Stack(nn.Module):
    """Blocks between two layers that belong to no block."""

    def __init__(self, depth=3, width=5, block=Block):
        super().__init__()
        self.first = nn.Linear(3, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(depth))
        self.last = nn.Linear(width, 1)

    def encode(self, inputs):
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, inputs):
        return self.last(self.encode(inputs))


def stack(seed=0, block=Block):
    """Make a stack in float64, from a generator of its own."""
    model = Stack(block=block).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def batches(num=3, size=7):
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(size, 3, generator=generator).double() for _ in range(num)]
    return [(each, each.sum(dim=1, keepdim=True)) for each in inputs]


def part(batch, state):
    return tuple(each.tensor_split(state.world_size)[state.rank] for each in batch)


def train(state, recipe, *, model=None, loss_fn=ours.mse, optimizer=ours.adamw, before=None):
    """Train a few steps; return the model, the optimizer and the step."""
    model = stack() if model is None else model
    made = optimizer(model.parameters())
    if before is not None:
        before(model, made)
    plan = recipe(af.Plan(loss_fn, model, made))
    state, step = af.build(plan, state, check_loss=False)
    for batch in batches():
        state, _ = step(state, part(batch, state))
    return model, made, step, state


def weights_after(recipe, world_size, **settings):
    def run(state):
        return ours.whole(train(state, recipe, **settings)[0].state_dict())

    return simulate(run, world_size=world_size)


def assert_trains_as_alone(recipe, world_size=2, **settings):
    (expected,) = weights_after(af.compose(), 1, **settings)
    for actual in weights_after(recipe, world_size, **settings):
        ours.assert_close(
            {n: v for n, v in actual.items() if "calls" not in n},
            {n: v for n, v in expected.items() if "calls" not in n},
        )


LAYERS = ["first", *[f"blocks.{i}.inner.{j}" for i in range(3) for j in (0, 2)], "last"]
BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
CHOICES = [
    (None, BLOCKS),
    (Block, BLOCKS),
    (nn.Linear, LAYERS),
    ((Block, nn.Linear), [*BLOCKS, *LAYERS]),
    ("blocks", BLOCKS),
    (["blocks.0", "blocks.2"], ["blocks.0", "blocks.2"]),
    ("blocks.1.inner", ["blocks.1.inner"]),
]
"""Ways to choose blocks of a stack, and the modules that they select."""


def is_in(name, module):
    """Does the parameter of this name belong to that module?"""
    return name == module or name.startswith(f"{module}.")


class Tied(nn.Module):
    def __init__(self, inside=False):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(Block(5) for _ in range(2))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        if inside:
            self.blocks[1].inner[0].weight = self.blocks[0].inner[0].weight

    def forward(self, inputs):
        hidden = self.embedding(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def tied(seed=0):
    model = Tied().double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model
