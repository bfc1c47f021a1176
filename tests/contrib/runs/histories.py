"""Random histories of runs, with kills and resumes, and the truth about their time."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from math import exp
from pathlib import Path
from random import Random

from hypothesis import strategies as st

EPOCH = 1_764_000_000_000
"""Milliseconds."""
STEP = 200
"""A usual step, in milliseconds: constant, so that its median is known."""


@dataclass
class History:
    """A program that logs as `log_to` does, by a clock that is moved by hand."""

    every: int
    time: int = EPOCH
    step: int = 0
    lines: list[dict] = field(default_factory=list)
    events: list[dict] = field(default_factory=list)
    spans: list[tuple[int, int, str, int]] = field(default_factory=list)
    """Begin, end, category, and the step that is done after it."""
    last_entry: int = EPOCH
    saved: list[int] = field(default_factory=list)

    def pass_time(self, length, category):
        self.spans.append((self.time, self.time + length, category, self.step))
        self.time += length

    def log_event(self, event, **values):
        found = {"event": event, "time": self.time / 1000, "step": self.step, **values}
        self.events.append(found)
        self.last_entry = self.time

    def spend(self, event, length, category, **values):
        self.pass_time(length, category)
        self.log_event(event, seconds=length / 1000, **values)

    def begin(self, down, start, load, damaged):
        """A process begins; it loads the last checkpoint that is not damaged, if there is one."""
        has_ended = self.events and self.events[-1]["event"] == "end"
        self.pass_time(down, "paused" if has_ended else "down")
        self.began = self.time
        self.pass_time(start, "start")
        self.saved = self.saved[: max(len(self.saved) - damaged, 1)]
        if self.saved:
            self.load(load)
            # Of a process, only its steps are lost; its start is not.
            self.spans[-1] = (*self.spans[-1][:3], 0)

    def load(self, length):
        """Go on from the last checkpoint: all time that later steps took is lost."""
        last = self.lines[-1] if self.lines else {}
        self.step = self.saved[-1]
        self.lines = [line for line in self.lines if line["step"] <= self.step]
        for place, (begin, end, category, step) in enumerate(self.spans):
            if step > self.step and category not in ("start", "compile", "down", "paused"):
                self.spans[place] = (begin, end, "repeated", step)
        lost = {"lost_step": last.get("step"), "lost_time": last.get("time")}
        self.spend("load", length, "checkpoints", **lost)
        self.begin_line()

    def begin_line(self):
        self.line_began, self.waited, self.skipped = self.time, 0, 0

    def first_step(self, compilation):
        self.log_event("start", process_began=self.began / 1000, world_size=1)
        self.begin_line()
        self.step += 1
        self.pass_time(compilation, "compile")
        self.pass_time(STEP, "updates")
        self.log_event("first_step", seconds=(compilation + STEP) / 1000)

    def update(self, wait=0, skipped=False):
        self.step += 1
        self.pass_time(wait, "data")
        self.pass_time(STEP, "other" if skipped else "updates")
        self.waited += wait
        self.skipped += skipped
        self.log_line()

    def log_line(self):
        if self.step % self.every == 0:
            wait = self.waited / (self.time - self.line_began)
            values = {"loss": 1.0, "data_wait": wait, "skipped_updates": self.skipped}
            self.lines.append({"step": self.step, "time": self.time / 1000, **values})
            self.last_entry = self.time
            self.begin_line()

    def save(self, length):
        self.spend("save", length, "checkpoints")
        self.saved.append(self.step)

    def evaluate(self, length):
        self.spend("evaluate", length, "evaluation")

    def end(self, length):
        self.pass_time(length, "other")
        self.log_event("end")

    def kill(self, length=0):
        """Nothing is known of a process after its last entry: it counts as down."""
        self.pass_time(length, "down")
        cut = [(begin, min(end, self.last_entry), *rest) for begin, end, *rest in self.spans]
        self.spans = [*cut, (self.last_entry, self.time, "down", 0)]

    def processes(self, kills):
        """Begin a run and its processes, one for each number that is yielded; kill all but the last."""
        self.begin(0, 2000, 0, 0)
        for number in range(kills + 1):
            self.first_step(1000)
            self.log_line()
            yield number
            if number < kills:
                self.kill(3000)
                self.begin(5000, 2000, 250, 0)
        self.end(100)

    def truth(self):
        """Microseconds by category, from the first process to the last entry; pauses are in none."""
        self.kill()
        found = Counter()
        for begin, end, category, _ in self.spans[:-1]:
            found[category] += 1000 * max(end - begin, 0)
        self.paused = found.pop("paused", 0)
        return found

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, entries in {"log": self.lines, "log.events": self.events}.items():
            text = "".join(json.dumps(entry) + "\n" for entry in entries)
            (folder / f"{name}.jsonl").write_text(text)
        return folder


LENGTH, GAP = st.integers(0, 3000), st.integers(1, 3000)
OPERATIONS = (
    st.tuples(st.just("update"), st.integers(0, 300), st.booleans()),
    st.tuples(st.just("update")),
    st.tuples(st.just("save"), LENGTH),
    st.tuples(st.just("evaluate"), LENGTH),
)
ROLLBACK = st.tuples(st.just("load"), LENGTH)
"""A load in the middle of a process."""


def processes(*operations):
    """How each process begins, what it does, and how it ends."""
    return st.lists(
        st.tuples(
            st.tuples(GAP, GAP, LENGTH, st.integers(0, 2)),
            LENGTH,
            st.lists(st.one_of(operations), max_size=25),
            st.sampled_from(["kill", "end"]),
            LENGTH,
        ),
        min_size=1,
        max_size=4,
    )


def play(processes, every) -> History:
    """A run of these processes, each of which ends in order or is killed."""
    history = History(every)
    for number, (beginning, compilation, operations, ending, tail) in enumerate(processes):
        history.begin(*(beginning if number else (0, *beginning[1:])))
        history.first_step(compilation)
        history.log_line()
        if number == 0:  # two lines that stay, by which the usual step is known
            for _ in range(2 * every - 1):
                history.update()
            history.save(0)
        for name, *arguments in operations:
            getattr(history, name)(*arguments)
        getattr(history, ending)(tail)
    return history


def with_values(seed, num_steps=300, kills=1) -> History:
    """A run with all kinds of values, that is killed and resumed."""
    random = Random(seed)
    history = History(every=1)
    for number in history.processes(kills):
        while history.step < num_steps * (number + 1) // (kills + 1):
            history.update(random.randint(0, 30), skipped=random.random() < 0.01)
            if history.step % 50 == 0:
                history.evaluate(800)
                history.save(300)
    for line in history.lines:
        step = line["step"]
        loss = 2.3 * exp(-step / 60) + 0.1 + 0.04 * random.gauss(0, 1) * exp(-step / 200)
        line |= {"loss": loss, "loss/entropy": 0.9 * loss, "loss/penalty": 0.1 * loss}
        line |= {"learning_rate": 1e-3 * min(step / 30, 1) * (1 - step / num_steps / 1.1)}
        line |= {"grad_norm": 1 + 0.3 * random.random(), "peak_memory": 3 * 2**30}
        line |= {"samples_per_second": 600 + 20 * random.random()}
        if step % 50 == 0:
            line |= {"validation/loss": 1.1 * loss, "validation/accuracy": 1 - loss / 3}
    return history
