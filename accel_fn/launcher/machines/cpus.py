"""The processors that a launch may use: cores, and the memory (NUMA) nodes of each."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Processors:
    """The processors that this process may run on."""

    cores: int
    """The number of physical cores, at most the quota of the container."""
    nodes: tuple[tuple[int, ...], ...]
    """The processors of each memory node."""


def read_processors(root: Path = Path("/"), allowed: Sequence[int] | None = None) -> Processors:
    """Read the machine's processors, of which `allowed` may be used (default: those of this process)."""
    if allowed is None:
        allowed = _allowed()
    cores = {_siblings(root, cpu) for cpu in allowed}
    nodes = [
        tuple(cpu for cpu in allowed if cpu in parse_cpus(path.read_text()))
        for path in sorted((root / "sys/devices/system/node").glob("node*/cpulist"), key=_number)
    ]
    return Processors(
        cores=max(1, math.ceil(min(len(cores), _quota(root)))),
        nodes=tuple(node for node in nodes if node) or (tuple(allowed),),
    )


def _allowed() -> list[int]:
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def parse_cpus(text: str) -> set[int]:
    """Parse the kernel's list of processors.

    >>> from accel_fn.launcher.machines.cpus import parse_cpus
    >>> sorted(parse_cpus("0-3,8"))
    [0, 1, 2, 3, 8]
    """
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def _number(path: Path) -> int:
    return int(path.parent.name.removeprefix("node"))


def _siblings(root: Path, cpu: int) -> str:
    """The processors that share a core with this one."""
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return path.read_text() if path.is_file() else str(cpu)


def _quota(root: Path) -> float:
    """Read how many processors a container may keep busy (cgroup 2); inf without a limit."""
    try:
        limit, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return int(limit) / int(period)
    except (OSError, ValueError):  # no limit reads as "max"
        return math.inf


def bind_ranks(processors: Processors, num_local: int) -> tuple[tuple[int, ...], ...] | None:
    """Choose the processors of each local rank; None if there is nothing to choose.

    Nodes get consecutive ranks; if there are fewer ranks than nodes, each gets several nodes.
    """
    num_nodes = len(processors.nodes)
    if num_nodes == 1 or num_local == 1:
        return None
    if num_local >= num_nodes:
        return tuple(processors.nodes[rank * num_nodes // num_local] for rank in range(num_local))
    bounds = [rank * num_nodes // num_local for rank in range(num_local + 1)]
    return tuple(
        tuple(cpu for node in processors.nodes[first:last] for cpu in node)
        for first, last in pairwise(bounds)
    )
