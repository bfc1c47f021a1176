"""Lists which optimizers update shards, and which resume from a checkpoint with the same bits.

`python -m tests.support.optimizers_sharded_and_saved` writes the table of docs/tested-optimizers.md.
"""

from __future__ import annotations

import re
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import accel_fn as af
from accel_fn.testing import simulate
from tests.support.optimizers import (
    MAX_NORM,
    PARTS,
    ROWS,
    Batch,
    Row,
    assert_alike,
    assert_same_bits,
    batches,
    trained_by_hand,
    write_table,
)
from tests.support.strategies import dealt, mse

FENCES = (
    "<!-- table: python -m tests.support.optimizers_sharded_and_saved -->\n",
    "<!-- end of table -->\n",
)
EXPLAINED = {
    "torch_optimizer.AggMo": "it keeps a dict of shards for each parameter",
    "torch_optimizer.NovoGrad": "it keeps one number for each parameter, a plain tensor, and writes a "
    "norm over shards into it",
}
"""The reason, if the error does not give it."""
NUM_BEFORE = 2
"""Batches before the checkpoint, and as many after it."""


def check_shards(row: Row) -> None:
    """Check that two ranks of uneven parts, each with half of every parameter, equal the loop of
    one process."""
    recipe = af.compose(af.wrap_fsdp(), af.accumulate(2), af.clip(MAX_NORM))
    parts = dealt(batches(torch.float64), PARTS)
    started = [row.start(torch.float64) for _ in parts]

    def run(state: af.DistState) -> list[Tensor]:
        model, _, _ = go(state, recipe, started[state.rank], parts[state.rank])
        return whole(model.parameters())

    found = simulate(run, world_size=len(parts))
    expected = trained_by_hand(row, torch.float64, MAX_NORM)
    for parameters in found:
        assert_alike(row, parameters, expected)


def check_checkpoint(row: Row, wrap: af.Transform) -> None:
    """Check that a run that was stopped and resumed with new objects has the same bits on each
    rank."""
    recipe = af.compose(wrap, af.clip(MAX_NORM))
    parts = dealt(batches(torch.float64), PARTS)
    started = [[row.start(torch.float64) for _ in parts] for _ in range(2)]

    def run(state: af.DistState) -> tuple[list[Any], list[Any]]:
        mine = parts[state.rank]
        first, second = [each[state.rank] for each in started]
        _, now, step = go(state, recipe, first, mine[:NUM_BEFORE])
        af.save(step, now, folder)
        for batch in mine[NUM_BEFORE:]:
            now, _ = step(now, batch)
        expected = held(*first)
        now, step = af.build(recipe(af.Plan(mse, *second)), state)
        now = af.load(step, now, folder)
        for batch in mine[NUM_BEFORE:]:
            now, _ = step(now, batch)
        return held(*second), expected

    with tempfile.TemporaryDirectory() as folder:
        for actual, expected in simulate(run, world_size=len(parts)):
            assert_same_bits(actual, expected)


def go(
    state: af.DistState, recipe: af.Transform, started: Any, mine: Sequence[Batch]
) -> tuple[Any, af.DistState, af.Step]:
    """Train some steps; return the model, the state and the step."""
    model, optimizer = started
    state, step = af.build(recipe(af.Plan(mse, model, optimizer)), state)
    for batch in mine:
        state, _ = step(state, batch)
    return model, state, step


def held(model: Any, optimizer: Any) -> list[Any]:
    """Return this rank's parameters and optimizer state, with the settings of each group."""
    states = [sorted(optimizer.state.get(each, {}).items()) for each in model.parameters()]
    groups = [
        sorted((name, value) for name, value in group.items() if name != "params")
        for group in optimizer.param_groups
    ]
    return [
        local(each).detach().clone() if isinstance(each, Tensor) else each
        for each in [*model.parameters(), *pytree.tree_leaves([states, groups])]
    ]


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(parameters: Any) -> list[Tensor]:
    return [getattr(each, "full_tensor", lambda each=each: each)().detach() for each in parameters]


CONTRACT: dict[str, Callable[[Row], None]] = {
    "shards": check_shards,
    "checkpoint": partial(check_checkpoint, wrap=af.wrap_ddp()),
    "checkpoint of shards": partial(check_checkpoint, wrap=af.wrap_fsdp()),
}


def outcome(row: Row, check: str) -> str:
    """Return an empty text if the check passes, else the reason."""
    try:
        CONTRACT[check](row)
    except Exception as error:
        return reason_of(error)
    return ""


def reason_of(error: Exception) -> str:
    """Return the reason: our whole message, the first sentence of torch's, or the line that
    fails."""
    words = str(error)
    tried = re.search(r"those of whole parameters, got \w+: (.*?)\.?; use wrap_ddp", words)
    if tried:
        return f"build: {tried[1]}"
    ours = re.search(r".*((?:build|save): .*? must .*?), got", words)
    if ours:
        return ours[1]
    if words:
        return re.split(r"(?<=[^.])[.!:](?:\s|$)", words)[0]
    frames = traceback.extract_tb(error.__traceback__)
    line = next(each.line for each in reversed(frames) if "torch_optimizer" in each.filename)
    return f"torch fails at `{line}`"


def line(name: str) -> str:
    """Format a row of the table."""
    reasons = [outcome(ROWS[name], check) for check in CONTRACT]
    cells = ["no" if reason else "yes" for reason in reasons]
    said = [reason.replace("|", "/") for reason in reasons if reason]
    why = "; ".join(dict.fromkeys([*said, *([EXPLAINED[name]] if name in EXPLAINED else [])]))
    return "| " + " | ".join((f"`{name}`", *cells, why)) + " |"


def table() -> str:
    """Format the table, one row per optimizer."""
    head = ("optimizer", *CONTRACT, "why not")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *map(line, ROWS)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_table(table, FENCES)
