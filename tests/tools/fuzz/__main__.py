"""`python -m tests.tools.fuzz --minutes 15 --seed 0`: judge random programs until the time is up.

Half of them are of the catalogue of programs that people write; the others are random choices of a
model, a loss, an optimizer, a recipe.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections import Counter

import tests.field.every  # noqa: F401
from tests.field.catalogue import FieldProgram, named
from tests.tools.fuzz.judge import Judge, Program, fails, printed, shrunk
from tests.tools.fuzz.programs import ChosenProgram

CHOICES = "choices"
"""The name of the programs that are no kind of the catalogue."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.fuzz",
        description=__doc__,
        epilog=f"kinds: {', '.join([CHOICES, *named('')])}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", action="store_true", help="end with the first failure")
    parser.add_argument("--only", default="", help="draw from the kinds whose name begins so")
    given = parser.parse_args()
    if given.only != CHOICES and not named(given.only):
        parser.error(f"--only must begin the name of a kind, got {given.only}")
    with Judge() as judge:
        found = hunt(judge, given.seed, given.minutes * 60, given.first, given.only)
    return int(bool(found))


def draw(number: int, seed: int, only: str = "") -> Program:
    """Draw the program of a number, of the kinds whose name begins with `only`."""
    rng = random.Random(f"{seed} {number}")
    if only == CHOICES or (not only and number % 2):
        return ChosenProgram.draw(rng)
    return FieldProgram.draw(rng, only)


def hunt(judge: Judge, seed: int, budget_s: float, first: bool, only: str) -> list[Program]:
    """Judge programs until the time is up; print and return the shortest failing one of each
    kind."""
    start = time.monotonic()
    counts: Counter[str] = Counter()
    kinds: Counter[tuple[str, str]] = Counter()
    found: list[Program] = []
    for number in itertools.count():
        if time.monotonic() - start > budget_s or (first and found):
            break
        program = draw(number, seed, only)
        if any(each.ingredients <= program.ingredients for each in found):
            continue
        result = judge(program)
        outcome = "fail" if fails(result) else result
        counts[outcome] += 1
        kinds[getattr(program, "name", CHOICES), outcome] += 1
        if fails(result):
            smallest = shrunk(program, judge)
            if smallest.ingredients in [each.ingredients for each in found]:
                continue
            found.append(smallest)
            print(f"\n# program {number} of seed {seed}: {sorted(found[-1].ingredients)}")
            print(printed(found[-1], judge(found[-1])), flush=True)
        if counts.total() % 50 == 0:
            show(counts, start)
    for (kind, outcome), count in sorted(kinds.items()):
        print(f"{kind}: {count} {outcome}", file=sys.stderr)
    show(counts, start)
    return found


def show(counts: Counter[str], start: float) -> None:
    words = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    print(f"{time.monotonic() - start:.0f} s: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
