"""Programs of random choices: their source, their verdict, and simpler programs."""

from __future__ import annotations

import contextlib
import io
import itertools
import random
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from accel_fn import DistState
from accel_fn.errors import AccelError
from accel_fn.testing import simulate
from tests.field.catalogue import difference
from tests.field.program import figures
from tests.tools.fuzz.choices import FIELDS

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
    state, step = af.build(af.compose({recipe})(af.Plan(loss_fn, model, optimizer{weight}{more})), state)
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


def _source(choices: Mapping[str, str]) -> str:
    filled: dict[str, str] = dict.fromkeys((*PLACES, "weight", "more", "start"), "")
    chosen = [FIELDS[field][name] for field, name in choices.items()]
    for name, line in itertools.chain.from_iterable(map(dict.items, chosen)):
        joint = {"prelude": "\n", "recipe": "", "hand": "\n        "}.get(name, "")
        filled[name] = joint.join(filter(None, (filled.get(name), line)))
    if filled["start"]:
        filled["schedule"], filled["advance"] = f"schedule = {filled['start']}", "schedule.step()"
    filled["label"] = LABEL
    filled["between"] = filled["between"] or "pass"
    batch = FIELDS["batch"][choices["batch"]]
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
    if choices["other"] != "freeze":
        unneeded.add("        updates = len(losses) + 1")
    lines = text.replace("{o}", outputs).splitlines()
    return "\n".join(each for each in lines if each.strip() and each not in unneeded) + "\n"


NOT_LINEAR = {"clamp", "optimizer", "one batch"}
"""Hooks and skips of a mean of gradients are not the mean of those of each rank."""


def is_fair(program: Mapping[str, str]) -> bool:
    """Does the loop by hand define the result? Documented limits are not faults."""
    sgd = program["optimizer"] in {"sgd", "momentum", "decay", "nesterov", "fused sgd", "groups"}
    linear = program["clip"] == "none" and not {program["hook"], program["skip"]} & NOT_LINEAR
    return not (
        (program["strategy"] == "local sgd" and not (sgd and linear))
        or (program["strategy"] == "fsdp" and program["between"] == "assign")
        or (program["model"] == "sparse table" and program["loss"] == "penalty")
        or (program["schedule"] != "none" and program["between"] == "rate")
        or (program["skip"] == "one batch" and program["loss"] not in {"mean", "of one sample"})
    )


@dataclass(frozen=True)
class ChosenProgram:
    """A program by the name of a choice for every field."""

    choices: Mapping[str, str]

    @classmethod
    def draw(cls, rng: random.Random) -> ChosenProgram:
        """Draw a fair program, mostly of the simplest choices."""
        while True:
            chosen = {}
            for field, choices in FIELDS.items():
                names = list(choices)
                simple = field not in {"world", "sizes", "cut", "seed", "micro-batches", "strategy"}
                chosen[field] = names[0] if simple and rng.random() < 0.55 else rng.choice(names)
            if is_fair(chosen):
                return cls(chosen)

    @property
    def ingredients(self) -> frozenset[tuple[str, str]]:
        """List the choices that are not the simplest ones, without numbers."""
        numbers = {"sizes", "seed", "cut"}
        return frozenset(
            (field, name)
            for field, name in self.choices.items()
            if name != next(iter(FIELDS[field])) and field not in numbers
        )

    def simpler(self) -> Iterator[ChosenProgram]:
        """Yield the same program with one choice replaced by a simpler one."""
        for field, choices in FIELDS.items():
            names = list(choices)
            for name in names[: min(names.index(self.choices[field]), 2)]:
                simpler = {**self.choices, field: name}
                if is_fair(simpler):
                    yield ChosenProgram(simpler)

    def source(self) -> str:
        """Return the program as a user can run it."""
        return _source(self.choices) + MAIN

    def verdict(self) -> str:
        """Return `equal`, `refused`, `undefined` if the loop by hand itself fails, or a description of
        the fault."""
        space: dict[str, Any] = {}
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            losses: list[float] = []
            try:
                # This makes models, too.
                exec(compile(_source(self.choices), "<program>", "exec"), space)
                expected = _figures(space["by_hand"](losses), losses)
            except Exception:
                return "undefined"
            if not all(each.isfinite().all() for each in expected.values()):
                return "undefined"
            world_size = int(self.choices["world"])
            made = [space["make"]() for _ in range(world_size)]

            def run(state: DistState) -> dict[str, torch.Tensor]:
                losses: list[float] = []
                return _figures(space["by_library"](state, losses, made), losses)

            try:
                ends = simulate(run, world_size=world_size)
            except AccelError:
                return "refused"
            except Exception as error:
                first, *_ = [*str(error).strip().splitlines(), ""]
                return f"{type(error).__name__}: {first[:200]}"
        off = (difference(end, expected, rank) for rank, end in enumerate(ends))
        return next(filter(None, off), "equal")


def _figures(model: torch.nn.Module, losses: list[float]) -> dict[str, torch.Tensor]:
    return figures(model, [torch.tensor(each, dtype=torch.float64) for each in losses])
