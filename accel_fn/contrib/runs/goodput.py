"""Divide the wall time of a run into updates that count and other categories."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from accel_fn.contrib.runs.run_log import Column, Run, is_time

CATEGORIES = {
    "updates": "steps that count",
    "start": "before the first step",
    "compile": "first steps, less a usual one",
    "data": "between steps: data, own code",
    "checkpoints": "saves and loads",
    "evaluation": "evaluate",
    "repeated": "steps lost and done again",
    "down": "no process ran",
    "other": "skipped updates, ends",
}
"""The categories of the wall time of a run, each with its text in a report."""

_SPENT_IN = {"save": "checkpoints", "load": "checkpoints", "evaluate": "evaluation"}
"""The category of each kind of event that takes time."""

_PAUSED = "paused"
"""The time between a process that ended without an error and the next process. Nobody waited for
the run, so this time is in no category."""

_PRIORITY = ("down", _PAUSED, "compile", "repeated", "checkpoints", "evaluation", "start", "other")
"""Categories by priority. Where claims overlap, the first one counts: a save between repeated steps is
"repeated"."""


@dataclass(frozen=True)
class Goodput:
    """The wall time of a run by category."""

    microseconds: dict[str, int]
    """The time in each category, in integers, which sum to the wall time exactly."""

    paused: int
    """The microseconds between a process that ended without an error and the next. They are in no
    category."""

    processes: int
    """The number of processes that trained, one after the other."""

    @property
    def wall(self) -> int:
        """Return the microseconds from the first process's start to the last entry, without pauses."""
        return sum(self.microseconds.values())

    @property
    def share(self) -> float:
        """Return the fraction of wall time that went into updates that count; nan without time."""
        return self.microseconds["updates"] / self.wall if self.wall else float("nan")


class _Entry(NamedTuple):
    """One entry of the log: an event, or a line of values."""

    time: int
    """The time in microseconds."""
    step: int
    values: Mapping[str, Any]
    """The values of the event, or of the line."""

    @property
    def kind(self) -> str:
        """Return the kind: `line` for a line of values, `lost` for the last line that a load cut off."""
        return str(self.values["event"])

    @property
    def spent(self) -> int:
        """Return the microseconds that the event took. Its `time` is the end."""
        return max(_microseconds(self.values.get("seconds")) or 0, 0)


class _Process(NamedTuple):
    """The times of a process (start, first step, end of the last step, last entry), and its entries."""

    began: int
    steps_began: int
    steps_ended: int
    ended: int
    entries: list[_Entry]


class _Claim(NamedTuple):
    """A span of time, and a category that it may belong to; spans may overlap."""

    begin: int
    end: int
    category: str


class _Window(NamedTuple):
    """The time from one line of a process to the next, or from the first step to the first line."""

    begin: int
    end: int
    num_steps: int
    data_wait: float
    skipped: float
    """The fraction of updates that were skipped."""


def goodput(run: Run) -> Goodput:
    """Divide the wall time of a run into categories, by its log, over all of its processes."""
    entries = sorted(_entries(run), key=lambda entry: entry.time)
    processes = list(_processes(entries))
    windows = [window for process in processes for window in _windows(process)]
    claims = [*_claims(processes, _usual_step(processes)), *_lost(entries, processes)]
    parts = Counter(dict.fromkeys(CATEGORIES, 0))
    running: Counter[_Window] = Counter()
    for begin, end, category in _stretches(claims, windows, processes):
        parts[category] += end - begin
        place = bisect_right(windows, begin, key=lambda each: each.begin) - 1
        if category == "updates" and place >= 0 and begin < windows[place].end:
            running[windows[place]] += end - begin
    paused = parts.pop(_PAUSED, 0)
    for window, spent in running.items():
        waited = min(round(window.data_wait * (window.end - window.begin)), spent)
        skipped = round(window.skipped * (spent - waited))
        parts.update(data=waited, other=skipped, updates=-waited - skipped)
    return Goodput(dict(parts), paused, len(processes))


def _microseconds(seconds: Any) -> int | None:
    return round(seconds * 1e6) if is_time(seconds) else None


def _entries(run: Run) -> Iterator[_Entry]:
    """Yield an entry for each line of the log and for each event.

    A resumed run removes the lines after its checkpoint from the log: the last of them has an entry
    too.
    """
    waits, skips = map(_by_step, (run.of_plans("data_wait"), run.of_plans("skipped_updates")))
    for step, seconds in zip(*run.columns.get("time", ([], [])), strict=True):
        if (time := _microseconds(seconds)) is not None:
            # The data wait of each plan includes the steps of the other plans. So add up the time in
            # steps over all plans; the rest is the wait.
            in_steps = sum(1 - min(wait, 1.0) for wait in waits[step])
            wait = max(1 - in_steps, 0.0) if waits[step] else 0.0
            values = {"event": "line", "data_wait": wait, "skipped": sum(skips[step])}
            yield _Entry(time, step, values)
    for event in run.events:
        lost_time, lost_step = _microseconds(event.get("lost_time")), event.get("lost_step")
        if lost_time is not None and isinstance(lost_step, int):
            yield _Entry(lost_time, lost_step, {"event": "lost"})
        yield _Entry(round(event["time"] * 1e6), event["step"], event)


def _by_step(columns: list[Column]) -> defaultdict[int, list[float]]:
    found = defaultdict(list)
    for column in columns:
        for step, value in zip(*column, strict=True):
            # Count nan as 0, since one nan would make a sum of times nan.
            found[step].append(value if value > 0 else 0.0)
    return found


def _processes(entries: list[_Entry]) -> Iterator[_Process]:
    begins: list[int] = []
    started = -1
    for entry in entries:
        if entry.kind == "start":
            began = _microseconds(entry.values.get("process_began")) or entry.time
            # If a process starts several plans, only the first start begins the process.
            if began > started:
                begins.append(began)
            started = entry.time
    if entries:
        begins[:1] = [min([entries[0].time, *begins[:1]])]
    places = [bisect_left(entries, began, key=lambda entry: entry.time) for began in begins]
    for began, (first, last) in zip(
        begins, itertools.pairwise([*places, len(entries)]), strict=True
    ):
        yield _process(began, entries[first:last])


def _process(began: int, entries: list[_Entry]) -> _Process:
    ended = entries[-1].time if entries else began
    firsts = [entry.time - entry.spent for entry in entries if entry.kind == "first_step"]
    lines = [entry.time for entry in entries if entry.kind == "line"]
    steps_began = max(began, min(firsts or lines[:1], default=ended))
    rises = [after.time for entry, after in itertools.pairwise(entries) if after.step > entry.step]
    return _Process(began, steps_began, max([steps_began, *rises[-1:]]), ended, entries)


def _windows(process: _Process) -> Iterator[_Window]:
    begin, step = process.steps_began, 0
    for entry in process.entries:
        if entry.kind == "load":
            begin, step = max(begin, entry.time), entry.step
        if entry.kind == "line" and entry.time > begin:
            num_steps = entry.step - step
            skipped = min(entry.values["skipped"] / max(num_steps, 1), 1.0)
            yield _Window(begin, entry.time, num_steps, entry.values["data_wait"], skipped)
            begin, step = entry.time, entry.step


def _usual_step(processes: list[_Process]) -> int:
    """Return the median time of a step, without waits for data and without events."""
    found = []
    for process in processes:
        times = [entry.time for entry in process.entries]
        events = [0, *itertools.accumulate(entry.spent for entry in process.entries)]
        # Skip the first window: it contains the first step, which may compile.
        for window in itertools.islice(_windows(process), 1, None):
            first, last = bisect_right(times, window.begin), bisect_right(times, window.end)
            length = window.end - window.begin
            busy = length - window.data_wait * length - (events[last] - events[first])
            found.append(busy / max(window.num_steps, 1))
    return round(median(found)) if found else 0


def _claims(processes: list[_Process], usual_step: int) -> Iterator[_Claim]:
    """Yield claims for starts, events, compilation and ends of processes, and for the time between them."""
    for process in processes:
        yield _Claim(process.began, process.steps_began, "start")
        yield _Claim(process.steps_ended, process.ended, "other")
        for entry in process.entries:
            begin = max(entry.time - entry.spent, process.began)
            if entry.kind == "first_step":
                yield _Claim(begin, entry.time - min(usual_step, entry.time - begin), "compile")
            elif entry.kind in _SPENT_IN:
                yield _Claim(begin, entry.time, _SPENT_IN[entry.kind])
    for before, after in itertools.pairwise(processes):
        yield _Claim(before.ended, after.began, _PAUSED if _has_ended(before) else "down")


def _has_ended(process: _Process) -> bool:
    """Return whether a process has ended without an error."""
    last = process.entries[-1] if process.entries else None
    return last is not None and last.kind == "end" and last.values.get("error") is None


def _lost(entries: list[_Entry], processes: list[_Process]) -> Iterator[_Claim]:
    """Yield claims for the steps that a later process, or the same process after a load, repeated."""
    kept: list[_Entry] = []
    for entry in entries:
        if entry.kind in ("load", "start"):
            end = kept[-1].time if kept else entry.time
            while kept and kept[-1].step > entry.step:
                kept.pop()
            begin = kept[-1].time if kept else processes[0].began
            for each in processes:
                yield _Claim(max(begin, each.steps_began), min(end, each.ended), "repeated")
        kept.append(entry)


def _stretches(
    claims: list[_Claim], windows: list[_Window], processes: list[_Process]
) -> Iterator[_Claim]:
    """Cut time where a claim, window or process begins or ends; yield each piece with its category."""
    edges = [
        edge
        for begin, end, category in claims
        if begin < end
        for edge in ((begin, 1, category), (end, -1, category))
    ]
    edges += [(edge, 0, "") for window in windows for edge in (window.begin, window.end)]
    edges += [(edge, 0, "") for each in processes for edge in (each.began, each.ended)]
    edges.sort()
    active: Counter[str] = Counter()
    for (begin, change, category), (end, *_) in itertools.pairwise(edges):
        active[category] += change
        if begin < end:
            owner = next((each for each in _PRIORITY if active[each] > 0), "updates")
            yield _Claim(begin, end, owner)
