"""Random programs as source, their verdict, and the shortest program that fails in the same way."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import random
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from accel_fn.errors import AccelError
from accel_fn.testing import simulate
from tests.fuzz.choices import FIELDS

Program = dict[str, str]
"""The name of a choice for every field."""

RTOL = 1e-12

LABEL = "torch.where(x[:, 2] > -0.5, (x[:, :3] * 5).long().sum(1) % 3, -100)"
TEMPLATE = """\
import torch, torch.nn.functional as F, accel_fn as af
from torch import nn
{prelude}
SIZES, W = {sizes}, {world}
def make():
    torch.manual_seed(0); model = {model}.double(); optimizer = {optimizer}
    {hooks}
    return model, optimizer
def batch(i, rows):
    x = torch.randn(SIZES[i], 4, generator=torch.Generator().manual_seed(10 * {seed} + i)).double()[rows]
    y, w = x.sum(1, keepdim=True).sin(), (2 * x[:, 3:]).floor().clamp(0, 2); labels = {label}
    {bad}
    return {batch}
def loss_fn(model, b):
    x, y, labels, w = {unpack}; {loss}
def by_hand(losses):
    model, optimizer = make()
    {schedule}
    for i, _ in enumerate(SIZES):
        if i == 1: {between}
        updates = len(losses) + 1
        loss = loss_fn(model, batch(i, slice(None))); loss.backward()
        {frozen}
        {verdict}
        {hand}
        optimizer.step(); model.zero_grad(); losses.append(float(loss.detach()))
        {advance}
    return model
def by_library(state, losses, made=[make() for _ in range(W)]):
    model, optimizer = made[state.rank]
    state, step = af.build(state, af.compose({recipe})(af.Plan(loss_fn, model, optimizer{weight}{more})))
    for i in range(len(SIZES)):
        if i == 1: {between}
        cut = {cut}
        state, report = step(state, batch(i, slice(cut[state.rank], cut[state.rank + 1])))
        if report.applied: losses.append(float(report.loss))
    return model
"""
MAIN = """\
from accel_fn.testing import simulate
models = [by_hand([])] + simulate(lambda state: by_library(state, []), world_size=W)
for model in models: print([value.tolist() for value in model.state_dict().values()])
"""
PLACES = (
    "prelude",
    "hooks",
    "bad",
    "schedule",
    "between",
    "frozen",
    "verdict",
    "hand",
    "advance",
    "recipe",
)


def draw(rng: random.Random) -> Program:
    """Draw a program, mostly of the simplest choices."""
    program = {}
    for field, choices in FIELDS.items():
        names = list(choices)
        simple = field not in {"world", "sizes", "cut", "seed", "micro-batches", "strategy"}
        program[field] = names[0] if simple and rng.random() < 0.55 else rng.choice(names)
    return program


def source(program: Program) -> str:
    """Return the program as a user would write it."""
    filled: dict[str, str] = dict.fromkeys((*PLACES, "weight", "more", "start"), "")
    chosen = [FIELDS[field][name] for field, name in program.items()]
    for name, line in itertools.chain.from_iterable(map(dict.items, chosen)):
        joint = {"prelude": "\n", "recipe": "", "hand": "\n        "}.get(name, "")
        filled[name] = joint.join(filter(None, (filled.get(name), line)))
    if filled["start"]:
        filled["schedule"], filled["advance"] = f"schedule = {filled['start']}", "schedule.step()"
    filled["label"] = LABEL
    filled["between"] = filled["between"] or "pass"
    batch = FIELDS["batch"][program["batch"]]
    outputs = filled.pop("o", "1")
    text = TEMPLATE
    for place in ("weight", "recipe"):
        filled[place] = filled[place].rstrip(", ")
    if filled["weight"]:
        weight = filled["weight"].replace("{labels}", batch["labels"]).replace("{w}", batch["w"])
        filled["weight"] = f", weight_fn={weight}"
    for name, line in filled.items():
        text = text.replace(f"{{{name}}}", line)
    unneeded = {"        if i == 1: pass"}
    if program["other"] != "freeze":
        unneeded.add("        updates = len(losses) + 1")
    lines = text.replace("{o}", outputs).splitlines()
    return "\n".join(each for each in lines if each.strip() and each not in unneeded) + "\n"


NOT_LINEAR = {"clamp", "optimizer", "one batch"}
"""Hooks and skips of a mean of gradients are not the mean of those of each rank."""


def is_fair(program: Program) -> bool:
    """Does the loop by hand define the result? Documented limits are not faults."""
    sgd = program["optimizer"] in {"sgd", "momentum", "decay", "nesterov", "fused sgd", "groups"}
    linear = program["clip"] == "none" and not {program["hook"], program["skip"]} & NOT_LINEAR
    is_added = program["model"] == "added loss"
    # Beside a penalty, no parameter is missed: a hook by hand sees the gradient of the checkpoint apart,
    # and what changes the forward may add as many nodes to the graph as the checkpoint hides.
    is_hidden = program["model"] == "reentrant checkpoint" and program["loss"] == "penalty"
    is_changed = program["hook"] == "clamp" or program["between"] in {"forward hook", "forward"}
    return not (
        (program["strategy"] == "local sgd" and not (sgd and linear))
        or (program["strategy"] == "fsdp" and program["between"] == "assign")
        or (program["strategy"] == "fsdp" and is_added)
        or (program["strategy"] == "local sgd" and is_added and program["loss"] != "mean")
        or (is_hidden and is_changed)
        or (program["model"] == "sparse table" and program["loss"] == "penalty")
        or (program["schedule"] != "none" and program["between"] == "rate")
        or (program["skip"] == "one batch" and program["loss"] not in {"mean", "of one sample"})
    )


def verdict(program: Program) -> str:
    """Return `equal`, `refused`, `undefined` if the loop by hand itself fails, or a description of
    the fault."""
    space: dict[str, Any] = {}
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        losses: list[float] = []
        try:
            exec(compile(source(program), "<program>", "exec"), space)  # makes models, too
            expected = tensors(space["by_hand"](losses))
        except Exception:
            return "undefined"
        ends_finite = all(each.isfinite().all() for each in expected.values())
        if not (ends_finite and all(map(math.isfinite, losses))):
            return "undefined"
        world_size = int(program["world"])
        made = [space["make"]() for _ in range(world_size)]
        found: list[list[float]] = [[] for _ in made]
        try:
            ends = simulate(
                lambda state: tensors(space["by_library"](state, found[state.rank], made)),
                world_size=world_size,
            )
        except AccelError:
            return "refused"
        except Exception as error:
            first, *_ = [*str(error).strip().splitlines(), ""]
            return f"{type(error).__name__}: {first[:200]}"
    differences = (difference(end, expected, found[r], losses) for r, end in enumerate(ends))
    return next((f"{text} on rank {r}" for r, text in enumerate(differences) if text), "equal")


def difference(
    end: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    found: list[float],
    losses: list[float],
) -> str:
    """Return in what a rank differs from the loop by hand; empty if in nothing."""
    for name, value in expected.items():
        largest = float((end[name] - value).abs().max()) if value.numel() else 0.0
        if not largest <= RTOL * max(1.0, float(value.abs().max())):
            return f"{name} differs by {largest:.2g}"
    if len(found) != len(losses):
        return f"the number of updates differs: {len(found)}, {len(losses)} by hand,"
    for i, (loss, hand) in enumerate(zip(found, losses, strict=True)):
        if not abs(loss - hand) <= RTOL * max(1.0, abs(hand)):
            return f"loss {i} is {loss:.17g}, {hand:.17g} by hand,"
    return ""


def tensors(model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the parameters at the end of a run."""
    values = {name: value.detach() for name, value in model.named_parameters()}
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, value in values.items()
    }


def fails(result: str) -> bool:
    return result not in {"equal", "refused", "undefined"}


def shrunk(program: Program, judge: Callable[[Program], str]) -> Program:
    """Replace choices by the simplest ones wherever the program still fails."""
    for field, choices in FIELDS.items():
        names = list(choices)
        place = names.index(program[field])
        for name in names[: min(place, 2)]:
            simpler = {**program, field: name}
            if is_fair(simpler) and fails(judge(simpler)):
                program = simpler
                break
    return program


def ingredients(program: Program) -> frozenset[tuple[str, str]]:
    """List the choices that are not the simplest ones, without numbers."""
    numbers = {"sizes", "seed", "cut"}
    return frozenset(
        (field, name)
        for field, name in program.items()
        if name != next(iter(FIELDS[field])) and field not in numbers
    )


def printed(program: Program, result: str) -> str:
    """Return the program as a user can run it, with the fault in its first line."""
    return f"# {result}\n{source(program)}{MAIN}"
