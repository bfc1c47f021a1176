"""`python -m tests.fuzz --minutes 15 --seed 0`: judge random programs until the time is up."""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections import Counter

from tests.fuzz.judge import Judge
from tests.fuzz.programs import Program, draw, fails, ingredients, is_fair, printed, shrunk


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", action="store_true", help="end with the first failure")
    given = parser.parse_args()
    with Judge() as judge:
        return int(bool(hunt(judge, given.seed, given.minutes * 60, given.first)))


def hunt(judge: Judge, seed: int, budget_s: float, first: bool) -> list[Program]:
    """Judge programs until the time is up; print and return the shortest failing one of each
    kind."""
    start = time.monotonic()
    counts: Counter[str] = Counter()
    found: list[Program] = []
    for number in itertools.count():
        if time.monotonic() - start > budget_s or (first and found):
            break
        program = draw(random.Random(f"{seed} {number}"))
        if not is_fair(program) or any(ingredients(each) <= ingredients(program) for each in found):
            continue
        result = judge(program)
        counts["fail" if fails(result) else result] += 1
        if fails(result):
            smallest = shrunk(program, judge)
            if ingredients(smallest) in map(ingredients, found):
                continue
            found.append(smallest)
            print(f"\n# program {number} of seed {seed}: {sorted(ingredients(found[-1]))}")
            print(printed(found[-1], judge(found[-1])), flush=True)
        if counts.total() % 50 == 0:
            show(counts, start)
    show(counts, start)
    return found


def show(counts: Counter[str], start: float) -> None:
    words = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    print(f"{time.monotonic() - start:.0f} s: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
