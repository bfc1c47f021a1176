"""The kinds of the catalogue: how a program of a kind is drawn, judged, shrunk and printed."""

from __future__ import annotations

import ast
import inspect
import io
import itertools
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

import accel_fn as af
from accel_fn.testing import simulate
from tests.field import program
from tests.field.program import Case

Figures = Mapping[str, Tensor]
"""What must be equal: parameters, losses, and whatever a program adds, by name."""

RTOL = 1e-12
NUMBERS: dict[str, Sequence[Any]] = {
    "strategy": ("wrap_ddp", "wrap_fsdp"),
    "world_size": (1, 2, 3),
    "k": (1, 2, 3),
    "batch_size": (6, 8, 9),
    "num_samples": (12, 15, 21, 23, 24),
    "seed": range(100),
    "cp": (1,),
}
"""The values of each number of a program, simplest first."""


class Programs(NamedTuple):
    """The programs of a kind for some numbers."""

    by_hand: Callable[[], Figures]
    natural: Callable[[af.DistState], Figures]
    repaired: Callable[[af.DistState], Figures] | None = None


@dataclass(frozen=True)
class Kind:
    """A kind of program, and what is right for it: `equal`, `refused` or `warned`."""

    make: Callable[[Case], tuple[Any, ...]]
    right: str
    repair: str
    """A pattern for the repair that the error or the warning names."""
    numbers: Mapping[str, Sequence[Any]]

    @property
    def name(self) -> str:
        return f"{self.make.__module__.rpartition('.')[2]}.{self.make.__name__}"


KINDS: dict[str, Kind] = {}


def kind(right: str, repair: str = "", **numbers: Sequence[Any]) -> Callable[[Any], Any]:
    """Put a function into the catalogue; `numbers` are those for which it has programs."""

    def register(make: Callable[[Case], tuple[Any, ...]]) -> Callable[[Case], tuple[Any, ...]]:
        new = Kind(make, right, repair, {**NUMBERS, **numbers})
        KINDS[new.name] = new
        return make

    return register


def named(prefix: str) -> list[str]:
    """List the kind of this name, or those whose name, with or without its group, begins so."""
    if prefix in KINDS:
        return [prefix]
    return [name for name in KINDS if name.startswith(prefix) or f".{prefix}" in name]


@dataclass(frozen=True)
class FieldProgram:
    """A program of the catalogue: the name of its kind, and its numbers."""

    name: str
    case: Case

    @classmethod
    def draw(cls, rng: random.Random, prefix: str = "") -> FieldProgram:
        name = rng.choice(named(prefix))
        drawn = {number: rng.choice(values) for number, values in KINDS[name].numbers.items()}
        return cls(name, Case(**drawn))

    @classmethod
    def small(cls, name: str) -> FieldProgram:
        """Draw a program on at most two ranks, in at most two micro-batches, of few samples.

        The strategy is the first of its kind: replicas, unless the kind is about shards.
        """
        drawn = cls.draw(random.Random(name), name)
        most = {"world_size": 2, "k": 2, "num_samples": 15}
        values = KINDS[name].numbers
        few = {
            number: max(
                (each for each in values[number] if each <= bound), default=values[number][0]
            )
            for number, bound in most.items()
        }
        few["strategy"] = values["strategy"][0]
        return replace(drawn, case=replace(drawn.case, **few))

    @property
    def ingredients(self) -> frozenset[tuple[str, str]]:
        return frozenset({("kind", self.name)})

    def simpler(self) -> Iterator[FieldProgram]:
        """Yield the same program with one number replaced by a simpler one."""
        for number, values in KINDS[self.name].numbers.items():
            for value in itertools.takewhile(getattr(self.case, number).__ne__, values):
                yield replace(self, case=replace(self.case, **{number: value}))

    def source(self) -> str:
        """Return the program as a user can run it."""
        make = KINDS[self.name].make
        shared, group = (inspect.getsource(each) for each in (program, inspect.getmodule(make)))
        imports = dict.fromkeys([*_imports(shared), *_imports(group)])
        _, _, shared = shared.partition("\n\n\n")
        _, _, kind = inspect.getsource(make).partition("\ndef ")
        main = MAIN.format(make=make.__name__, case=self.case)
        return "\n".join([*imports, "\n", shared, f"\ndef {kind}\n", main])

    def verdict(self) -> str:
        """Return `equal`, `refused` or `warned`, or a description of the fault."""
        found = KINDS[self.name]
        programs = Programs(*found.make(self.case))
        expected = programs.by_hand()
        ran = Run(programs.natural, self.case, expected)
        is_whole = self.case.world_size == self.case.k == self.case.cp == 1
        if ran.outcome != found.right and not (is_whole and ran.outcome == "equal"):
            return f"{ran.outcome}; right is: {found.right}"
        if ran.text and not re.search(found.repair, ran.text):
            return f"{ran.outcome} without the repair {found.repair!r}: {ran.text}"
        if programs.repaired is not None:
            again = Run(programs.repaired, self.case, expected)
            if again.outcome != "equal":
                return f"the repaired program: {again.outcome} {again.text}"
        return ran.outcome


def _imports(text: str) -> list[str]:
    """List the imports of a file, without those of the catalogue."""
    nodes = [each for each in ast.parse(text).body if isinstance(each, ast.Import | ast.ImportFrom)]
    return [line for line in map(ast.unparse, nodes) if " tests." not in line]


MAIN = """\
case = {case}
by_hand, *with_accel_fn = {make}(case)
print(by_hand())
from accel_fn.testing import simulate
for each in with_accel_fn: print(simulate(each, **case.world))
"""


class Run:
    """A program that ran on simulated ranks: its outcome, and the text of an error or a warning."""

    def __init__(
        self, run: Callable[[af.DistState], Figures], case: Case, expected: Figures
    ) -> None:
        self._expected = expected
        quiet = redirect_stderr(io.StringIO())
        with quiet, warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            self._ends = simulate(lambda state: _ending(run, state), **case.world)
        self._warned = [each for each in recorded if _is_ours(each)]

    @cached_property
    def text(self) -> str:
        errors = [str(each) for each in self._ends if isinstance(each, Exception)]
        return " | ".join([*errors, *(str(each.message) for each in self._warned)])

    @cached_property
    def outcome(self) -> str:
        """`equal`, `refused` on all ranks alike, `warned` once, or what went wrong."""
        errors = [each for each in self._ends if isinstance(each, Exception)]
        if errors:
            if all(isinstance(each, af.AccelError) for each in self._ends):
                return "refused"
            texts = sorted(f"{type(each).__name__}: {each}" for each in errors)
            return f"errors on {len(errors)} of {len(self._ends)} ranks: {texts}"
        places = {Path(each.filename).parent.name for each in self._warned}
        if len(self._warned) > 1 or places - {"field"}:
            return f"{len(self._warned)} warnings that point into {sorted(places)}"
        if self._warned:
            return "warned"
        off = (difference(end, self._expected, rank) for rank, end in enumerate(self._ends))
        return next(filter(None, off), "equal")


def _ending(run: Callable[[af.DistState], Figures], state: af.DistState) -> Figures | Exception:
    try:
        return run(state)
    except Exception as error:
        return error


def _is_ours(warning: warnings.WarningMessage) -> bool:
    return warning.category is UserWarning and "/torch/" not in warning.filename


def difference(found: Figures, expected: Figures, rank: int) -> str:
    """Return in what a rank differs from the loop by hand; empty if in nothing."""
    if found.keys() != expected.keys():
        return f"what a run gives differs: {sorted(found)} for {sorted(expected)} on rank {rank}"
    for name, value in expected.items():
        largest = float((found[name] - value).abs().max())
        if not largest <= RTOL * max(1.0, float(value.abs().max())):
            return f"{name} differs by {largest:.2g} on rank {rank}"
    return ""
