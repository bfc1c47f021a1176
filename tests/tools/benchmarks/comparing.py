"""One scenario: compare the result of every variant with the base, then time them side by side."""

from __future__ import annotations

import gc
from functools import partial

from tests.tools.benchmarks.checking import Checked, check, repeat
from tests.tools.benchmarks.counting import count
from tests.tools.benchmarks.jobs import loops_of
from tests.tools.benchmarks.loops import COMPILED, OURS, loops
from tests.tools.benchmarks.measuring import Station, time_in_turn
from tests.tools.benchmarks.results import Row, Table, make_row
from tests.tools.benchmarks.tasks import Scenario


def compare(scenario: Scenario, station: Station, rounds: int, patience_s: float) -> Table:
    """Make the table of a scenario; every rank of its world calls this."""
    variants: dict[str, Checked] = {}
    job = scenario.way.job
    for name, loop in (loops_of(job) if job else loops(scenario.world_size)).items():
        base = next(iter(variants.values()), Checked())
        variants[name] = check(name, loop, scenario, station, base)
    num_updates = scenario.updates_per_block
    works = {
        name: partial(repeat, variant.update, num_updates)
        for name, variant in variants.items()
        if variant.update is not None
    }
    gc.collect()
    gc.freeze()  # garbage collection of the steps to come must not walk what the libraries imported
    blocks = time_in_turn(works, rounds, station, patience_s)
    first, *_ = blocks.values()
    targets = {OURS: scenario.way.target, COMPILED: scenario.compiled_target}
    rows = []
    for name, variant in variants.items():
        target = targets.get(name)
        if name in blocks:
            counts = None
            if variant.update is not None and "compiled" not in f"{job} {name}":
                counts = count(variant.update)
            row = make_row(
                name, blocks[name], first, num_updates, variant.difference, target, counts
            )
        else:
            row = Row(name, variant.note, is_faulty=variant.is_faulty)
        rows.append(row)
    every = [block.is_disturbed for of_one in blocks.values() for block in of_one]
    return Table(scenario.name, tuple(rows), disturbed=sum(every) / len(every))
