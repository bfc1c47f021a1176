"""Timing things side by side: blocks in turn, taken again where other processes disturbed them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BUSY_SHARE = 0.1  # of the machine: a block counts as disturbed where others took more
PAUSE_S = 0.5

Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Block:
    """Seconds that one block of work took: on the CPU, on the wall, and of others meanwhile."""

    cpu: float
    wall: float
    others: float = 0.0

    @property
    def is_disturbed(self) -> bool:
        tick = 1 / os.sysconf("SC_CLK_TCK")
        return self.others > BUSY_SHARE * (os.cpu_count() or 1) * self.wall + 2 * tick


def machine_busy_s() -> float:
    """CPU time that all processes of the machine have used, where that is known; else 0."""
    try:
        counters = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, counters)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Station:
    """Where work is timed: a process alone, or one rank of several that time together."""

    rank: int
    time_block: Callable[[Work], Block]
    largest: Callable[[float], float]
    """Of a figure over all ranks."""


def alone() -> Station:
    return Station(0, time_block, lambda figure: figure)


def time_block(work: Work) -> Block:
    """One block in this process."""
    busy, wall, cpu = machine_busy_s(), time.perf_counter(), time.process_time()
    work()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Block(cpu, wall, machine_busy_s() - busy - cpu)


def in_turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Every name once per round, starting with another one each time."""
    for turn in range(rounds):
        first = turn % len(names)
        yield from (*names[first:], *names[:first])


def time_in_turn(
    works: Mapping[str, Work], rounds: int, station: Station, patience_s: float
) -> dict[str, list[Block]]:
    """Every work once per round, in turns.

    A disturbed block is taken again, for up to `patience_s` in all; the least
    disturbed one counts.
    """
    blocks: dict[str, list[Block]] = {name: [] for name in works}
    for name in in_turns(list(works), rounds):
        best = station.time_block(works[name])
        while best.is_disturbed and patience_s > 0:
            time.sleep(PAUSE_S)
            block = station.time_block(works[name])
            patience_s -= block.wall + PAUSE_S
            best = min(best, block, key=lambda each: each.others / each.wall)
        blocks[name].append(best)
    return blocks
