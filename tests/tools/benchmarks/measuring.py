"""Times loops side by side: blocks in turn, repeated if other processes disturbed them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BUSY_SHARE = 0.1  # of the machine's time: a block in which others used more counts as disturbed
PAUSE_S = 0.5

Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Block:
    """Seconds of one block of work: on the CPU, on the wall, and of other processes meanwhile."""

    cpu: float
    wall: float
    others: float = 0.0

    @property
    def is_disturbed(self) -> bool:
        tick = 1 / os.sysconf("SC_CLK_TCK")
        return self.others > BUSY_SHARE * (os.cpu_count() or 1) * self.wall + 2 * tick


def machine_busy_s() -> float:
    """Return the CPU time that all processes of the machine have used, or 0 if unknown."""
    try:
        counters = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, counters)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Station:
    """The place where work is timed: one process, or one rank of several that measure together."""

    rank: int
    time_block: Callable[[Work], Block]
    largest: Callable[[float], float]
    """Returns the largest value of a figure over all ranks."""


def alone() -> Station:
    return Station(0, time_block, lambda figure: figure)


def time_block(work: Work) -> Block:
    """Time one block in this process."""
    busy, wall, cpu = machine_busy_s(), time.perf_counter(), time.process_time()
    work()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Block(cpu, wall, machine_busy_s() - busy - cpu)


def in_turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Yield every name once per round; each round starts with another name."""
    for turn in range(rounds):
        first = turn % len(names)
        yield from (*names[first:], *names[:first])


def time_in_turn(
    works: Mapping[str, Work], rounds: int, station: Station, patience_s: float
) -> dict[str, list[Block]]:
    """Time every work once per round, in turns.

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
