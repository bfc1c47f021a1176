"""Compute the time of each phase of profiled steps from traces, and make a table of all ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PREFIX = "accel_fn."
"""The prefix of accel_fn's ranges in a trace."""
STEP, DATA, COLLECTIVES, REST = "step", "data", "collectives", "rest"
PHASES = (DATA, "forward", "backward", COLLECTIVES, "update", "checks", REST)
_OF_A_STEP = [each for each in PHASES if each not in (DATA, COLLECTIVES, REST)]
_HOST_COLLECTIVES, _DEVICE_COLLECTIVES, _DISPATCH = "gloo:", "nccl", "c10d::"
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_NOTABLE = 0.1
"""The least wait for a straggler that the table reports, as a fraction of a step."""
Interval = tuple[float, float]
Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """The seconds that a step of one rank spends in each phase."""

    host: Mapping[str, float]
    device: Mapping[str, float]
    """Seconds in which the device runs kernels of each phase; empty without an accelerator."""

    @property
    def step(self) -> float:
        """Return the time from one step to the next."""
        return sum(self.host.values())

    @property
    def waiting(self) -> float:
        """Return the time in which collectives run and the rank computes nothing."""
        return self.host[COLLECTIVES] + self.device.get(COLLECTIVES, 0.0)


def phase_times(trace: Mapping[str, Any]) -> PhaseTimes:
    """Compute the time of each phase from a Chrome trace of torch's profiler.

    The phases of a step do not overlap. Time in a phase in which a collective runs and the rank
    computes nothing counts as `collectives` instead.
    """
    events = [each for each in trace["traceEvents"] if each.get("ph") == "X" and "cat" in each]
    ranges = _ranges(events)
    sums = [_interval(each) for each in events if each["name"].startswith(_HOST_COLLECTIVES)]
    own = _own_operations(events)
    num_steps, num_gaps = len(ranges.pop(STEP)), len(ranges[DATA])
    times, waits = dict.fromkeys(PHASES, 0.0), 0.0
    for phase, every in ranges.items():
        waited = length(minus(union(_under_way(sums, every, phase)), own))
        num = num_gaps if phase == DATA else num_steps
        times[phase] = (length(every) - waited) / max(num, 1)
        waits += waited / max(num, 1)
    times[COLLECTIVES] = waits
    return PhaseTimes(_seconds(times), _seconds(_device_times(events, ranges, num_steps)))


def _ranges(events: Iterable[Event]) -> dict[str, list[Interval]]:
    """Find the intervals of steps and of each phase; the rest of a step counts as a phase."""
    found: dict[str, list[Interval]] = {name: [] for name in (STEP, *PHASES) if name != COLLECTIVES}
    for each in events:
        if each["cat"] == "user_annotation" and each["name"].startswith(PREFIX):
            found[each["name"].removeprefix(PREFIX).split()[0]].append(_interval(each))
    found = {name: union(each) for name, each in found.items()}
    named = union([each for phase in _OF_A_STEP for each in found[phase]])
    return found | {REST: minus(union(found[STEP]), named)}


def _under_way(sums: Iterable[Interval], ranges: Iterable[Interval], phase: str) -> list[Interval]:
    """Cut ranges to the times in which the host may wait for a collective."""
    # A collective counts in the range in which it starts, and in the rest of the step: one that starts
    # before the forward runs at the same time as the forward, and the host waits for it in the rest.
    return [
        (max(begin, start), min(end, stop))
        for start, stop in ranges
        for begin, end in sums
        if begin < stop and end > start and (begin >= start or phase == REST)
    ]


def _own_operations(events: Iterable[Event]) -> list[Interval]:
    """Find when the host computes: in operations that call no other operation or collective."""
    threads: dict[Any, list[tuple[float, float, bool]]] = defaultdict(list)
    for each in events:
        if each["cat"] == "cpu_op":
            begin, end = _interval(each)
            threads[each["tid"]].append((begin, -end, each["name"].startswith(_DISPATCH)))
    found = []
    for operations in threads.values():
        operations.sort()
        following = [begin for begin, _, _ in operations[1:]] + [float("inf")]
        for (begin, end, is_collective), later in zip(operations, following, strict=True):
            if later >= -end and not is_collective:
                found.append((begin, -end))
    return union(found)


def _device_times(
    events: Sequence[Event], ranges: Mapping[str, Sequence[Interval]], num_steps: int
) -> dict[str, float]:
    """Compute how long the device runs the kernels that the host launched in each phase."""
    kernels = [each for each in events if each["cat"] in _KERNELS]
    if not kernels:
        return {}
    launched = {
        each["args"]["correlation"]: float(each["ts"])
        for each in events
        if each["cat"] in _LAUNCHES and "correlation" in each.get("args", ())
    }
    starts = sorted((begin, end, phase) for phase, every in ranges.items() for begin, end in every)
    by_phase: dict[str, list[Interval]] = {phase: [] for phase in PHASES}
    for each in kernels:
        if each["name"].startswith(_DEVICE_COLLECTIVES):
            phase = COLLECTIVES
        else:
            at = launched.get(each.get("args", {}).get("correlation"), float(each["ts"]))
            index = bisect_right(starts, (at, float("inf"), "")) - 1
            phase = starts[index][2] if index >= 0 and at < starts[index][1] else REST
        by_phase[phase].append(_interval(each))
    merged = {phase: union(each) for phase, each in by_phase.items()}
    computing = union([each for phase in PHASES if phase != COLLECTIVES for each in merged[phase]])
    merged[COLLECTIVES] = minus(merged[COLLECTIVES], computing)
    return {phase: length(each) / num_steps for phase, each in merged.items()}


def _interval(event: Event) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _seconds(times: Mapping[str, float]) -> dict[str, float]:
    # Traces are in microseconds.
    return {phase: each / 1e6 for phase, each in times.items()}


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge overlapping intervals; the result is in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def minus(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the parts of `first` that are not in `second`; both are unions."""
    found, place = [], 0
    for begin, end in first:
        while place < len(second) and second[place][1] <= begin:
            place += 1
        at = place
        while at < len(second) and second[at][0] < end:
            if second[at][0] > begin:
                found.append((begin, second[at][0]))
            begin = max(begin, second[at][1])
            at += 1
        if begin < end:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Add the lengths of the intervals in a union."""
    return sum(end - begin for begin, end in intervals)


def table(ranks: Mapping[int, PhaseTimes], heading: str) -> str:
    """Make a table: a line for each rank, a column for each phase, and the straggler."""
    lines = [heading, _row("", [*PHASES, STEP])]
    for rank, each in ranks.items():
        times = [each.host[phase] for phase in PHASES]
        lines.append(_row(f"rank {rank}", [*map(_milliseconds, [*times, each.step])]))
    if any(each.device for each in ranks.values()):
        lines.append("of which the device is at work, by the phase that launched it")
        for rank, each in ranks.items():
            times = [each.device.get(phase, 0.0) for phase in PHASES]
            lines.append(_row(f"rank {rank}", [*map(_milliseconds, [*times, sum(times)])]))
    if len(ranks) > 1:
        lines.append(_verdict(ranks))
    return "\n".join(lines)


def _row(name: str, cells: Iterable[str]) -> str:
    columns = zip((*PHASES, STEP), cells, strict=True)
    return f"{name:<9}" + "".join(f"{cell:>{max(len(phase), 7) + 1}}" for phase, cell in columns)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _verdict(ranks: Mapping[int, PhaseTimes]) -> str:
    """Describe the rank that the others wait for, and the phase in which it is slower."""
    slowest = min(ranks, key=lambda rank: ranks[rank].waiting)
    others = [each for rank, each in ranks.items() if rank != slowest]
    lost = sum(each.waiting for each in others) / len(others) - ranks[slowest].waiting
    if lost < _NOTABLE * ranks[slowest].step:
        return "no straggler: the ranks wait for each other about as long"
    longer = {
        phase: max(
            getattr(ranks[slowest], where).get(phase, 0.0)
            - sum(getattr(each, where).get(phase, 0.0) for each in others) / len(others)
            for where in ("host", "device")
        )
        for phase in PHASES
        if phase != COLLECTIVES
    }
    phase = max(longer, key=longer.__getitem__)
    more = _milliseconds(longer[phase])
    return (
        f"rank {slowest} is the straggler: its {phase} takes {more} ms a step longer,\n"
        f"and the other ranks wait {_milliseconds(lost)} ms longer in collectives"
    )
