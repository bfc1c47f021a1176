"""profile: trace a few steps on every rank, and make a table of the time in each phase."""

from __future__ import annotations

import gzip
import json
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch.profiler import record_function

from accel_fn.checks.first_batches import FirstBatches
from accel_fn.core import primitives
from accel_fn.core.collectives import agreed, all_or_none
from accel_fn.core.loop import Strategy
from accel_fn.core.observers import Observer
from accel_fn.core.plan import Plan, SlotFunction
from accel_fn.core.report import Report
from accel_fn.core.state import DistState
from accel_fn.core.torch_internals import is_profiling
from accel_fn.core.transform import Transform, fill, transform
from accel_fn.core.warn import warn_user
from accel_fn.errors import ArgumentError, ArgumentTypeError, StateError, check_folder, message
from accel_fn.observe.phase_times import DATA, PREFIX, STEP, PhaseTimes, phase_times, table
from accel_fn.parallel.main_rank import on_main, print_on_main

_COMPRESSION = 3


@transform
def profile(folder: str | os.PathLike[str], *, steps: range = range(11, 14)) -> Transform:
    """Profile a few steps on every rank, with their phases named, and name the straggler.

    Each rank writes a Chrome trace by `torch.profiler`: `rank0.json.gz` and so on, for ui.perfetto.dev. The
    main rank prints a table, and writes it to `phases.txt`: for each rank, milliseconds a step in

    - `data`: from one step to the next, so the loader, your own code, `save` and `evaluate`;
    - `forward`: `loss_fn`, with the move of the batch to the device;
    - `backward`;
    - `collectives`: a collective is under way, and the rank computes nothing;
    - `update`: transforms of gradients, optimizers, loss scale;
    - `checks`: the checks of batches 1, 2, 10 and 100 of a process;
    - `rest`: cutting and weighing the batch, functions of `after_update`, and with
      `compiled(scope="step")` the whole step.

    These times are measured on the host, and no two of them overlap. Gradients that DDP averages
    during the backward count as `backward` until its last operation has run, and as `collectives`
    from then on. The straggler is the rank that waits least in collectives, since its peers wait
    for it there; the table names the phase in which it is slower than its peers.

    On an accelerator a second table has the time in which the device runs the kernels that each
    phase launched, and collectives of NCCL that overlap with nothing. It is tested on traces as
    CUDA writes them, and has never run on a GPU.

    A resumed run profiles only the steps that it makes itself. If the run ends before the last of
    them, even by an exception, each rank writes the trace so far, and there is no table. Ranks that
    are threads of one process share its profiler, which the first of these ranks starts.

    Law: the step computes the same bits as without it. Tests: `tests/observe/test_profile.py`.

    Args:
        folder: the folder for traces and table; made if missing; `~` is your home folder. Earlier
            traces and tables in it are replaced.
        steps: consecutive steps, as `state.step` counts them after each.

    Returns:
        A transform.

    Raises:
        TypeError: `steps` is not a range, or `folder` is not a path.
        ValueError: `steps` is empty, begins below 1 or leaves steps out. From `build`, on every
            rank: a rank cannot write to the folder. From the step before the first, on every rank:
                a profiler of
            torch runs already.

    Warns:
        UserWarning: once, on the main rank: the run begins after the last of the steps, or ends
            before it.

    Cost: less than a microsecond in other steps. Profiled steps are slower by some microseconds an
    operation. Four small collectives before the first of them; after the last every rank waits for its
    device, writes its trace and reads it: a second or two for 100,000 events, and four small collectives.

    >>> import accel_fn as af
    >>> af.profile("runs/a/profile", steps=range(11, 14))(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=count_samples,
    observers=[profile('runs/a/profile', steps=range(11, 14))])
    """
    path = check_folder("profile", folder)
    if not isinstance(steps, range):
        rule, repair = "be a range of steps in a row", "use range(11, 14)"
        raise ArgumentTypeError(message("profile", "steps", rule, steps, repair))
    if steps.step != 1 or not steps or steps[0] < 1:
        rule = "be a range of steps in a row, the first >= 1"
        raise ArgumentError(message("profile", "steps", rule, steps))
    return fill(observers=ProfileSlot(Profile, folder=path, steps=steps))


class ProfileSlot(SlotFunction):
    """The slot function of profile: it makes a `Profile` for the step."""

    def claim(self, plan: Plan) -> Plan:
        """Move the profile before the other observers, whose work is a part of the step."""
        others = [each for each in plan.observers if each is not self]
        return replace(plan, observers=(self, *others))


class Profile(Observer):
    """Profiles a few steps of one rank: starts before the first one, writes after the last one."""

    def __init__(
        self, plan: Plan, strategy: Strategy, state: DistState, *, folder: Path, steps: range
    ) -> None:
        _check_writable(folder)
        self._steps = steps
        self._trace = RankTrace(state, folder, steps)
        self._strategy = weakref.ref(strategy)
        self._is_over = False
        self._at_program_end = weakref.finalize(self, self._trace.abandon)

    def _phases(self) -> list[tuple[Any, str, str]]:
        """List the methods that run the phases of a step."""
        strategy = self._strategy()
        assert strategy is not None
        return [
            (strategy, "outputs", "forward"),
            (strategy, "backward", "backward"),
            (strategy, "prepare", "update"),
            (strategy, "apply", "update"),
            *((each, "before", "checks") for each in _checks_of(strategy)),
            *((each, "after", "checks") for each in _checks_of(strategy)),
        ]

    def before(self, state: DistState, batch: Any) -> None:
        """Start if a run resumes in the middle of the steps to profile; end if it has passed them."""
        if self._is_over:
            return
        trace, number = self._trace, state.step + 1
        if trace.is_running and number not in self._steps:
            self._finish(state)
        elif number > self._steps[-1]:
            self._end()
            if state.is_main:
                warn_user(
                    f"profile: steps should lie ahead, got {self._steps} at step {state.step}; nothing is "
                    "profiled"
                )
        else:
            if number in self._steps and not trace.is_running:
                self._start(state)
            trace.begin_step(number)

    def after(self, state: DistState, batch: Any, report: Report) -> None:
        """End a step: start the profiler before the first profiled step; write after the last."""
        if self._is_over or report.applied is None:
            return
        if self._trace.is_running and state.step >= self._steps[-1]:
            self._finish(state)
            return
        if state.step + 1 in self._steps and not self._trace.is_running:
            self._start(state)
        if self._trace.is_running:
            self._trace.end_step()

    def _end(self) -> None:
        self._is_over = True
        self._at_program_end.detach()

    def _start(self, state: DistState) -> None:
        """Start the profiler on all ranks; if one fails, all raise."""
        # Simulated ranks share one process, and a process has one profiler. The first rank in it
        # starts the profiler.
        process = socket.gethostname(), os.getpid(), id(profile)
        every = primitives.exchange(process, state, "profile")
        leads = every.index(process) == state.rank
        all_or_none(lambda: self._trace.start(self._phases() if leads else ()), state, "profile")

    def _finish(self, state: DistState) -> None:
        """Stop the profilers; each rank writes its trace, and the main rank writes the table."""
        self._end()
        every = agreed(self._trace.stop, state, "profile")
        ranks = {rank: times for rank, times in enumerate(every) if times is not None}
        first, last = self._trace.first, self._trace.last
        heading = f"profile of steps {first} to {last}, milliseconds a step"
        text = table(ranks, heading)
        on_main(lambda: (self._trace.folder / "phases.txt").write_text(f"{text}\n"), state)
        print_on_main(text, state=state)


def _checks_of(strategy: Strategy) -> list[Observer]:
    return [each for each in strategy.observers.every if isinstance(each, FirstBatches)]


class RankTrace:
    """torch's profiler on one rank, and the ranges of phases while the profiler runs."""

    def __init__(self, state: DistState, folder: Path, steps: range) -> None:
        self.folder, self._steps = folder, steps
        self._path = folder / f"rank{state.rank}.json.gz"
        self._is_main = state.is_main
        self._profiler: torch.profiler.profile | None = None
        self._places: list[tuple[weakref.ref[Any], str]] = []
        self._open: tuple[str, AbstractContextManager[Any]] | None = None
        """The open range: a step, or the time between two steps."""
        self._is_in_phase = False
        self.is_running = False
        self.first = self.last = 0
        """The first profiled step, and the newest step that began."""

    def start(self, phases: Sequence[tuple[Any, str, str]]) -> None:
        """Start to profile, with these methods as phases; without methods, another rank's profiler runs."""
        if phases and is_profiling():
            raise StateError(
                "profile: torch's profiler must be free, got one that runs already; profile one plan at a "
                "time, outside of torch.profiler"
            )
        self.is_running = True
        if phases:
            # Without `acc_events`, torch 2.11 warns that a cycle clears the events of the previous
            # one. Here there is only one cycle.
            self._profiler = torch.profiler.profile(acc_events=True)
            self._profiler.start()
        for owner, name, phase in phases:
            setattr(owner, name, self._ranged(getattr(owner, name), phase))
            self._places.append((weakref.ref(owner), name))

    def _ranged(self, method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """Wrap a method into a range of the trace, unless another phase calls it."""

        @wraps(method)
        def call(*args: Any, **keywords: Any) -> Any:
            if self._is_in_phase:
                return method(*args, **keywords)
            self._is_in_phase = True
            try:
                with record_function(f"{PREFIX}{phase}"):
                    return method(*args, **keywords)
            finally:
                self._is_in_phase = False

        return call

    def begin_step(self, number: int) -> None:
        """Begin a step, unless a call for its gradients has begun it."""
        self.last = number
        if self.is_running:
            self.first = self.first or number
            self._enter(f"{STEP} {number}")

    def end_step(self) -> None:
        """End a step: the time until the next step counts as the phase `data`."""
        self._enter(DATA)

    def _enter(self, name: str) -> None:
        """Leave the open range and enter `name`, unless `name` is already open."""
        if self._profiler is None or (self._open and self._open[0] == name):
            return
        self._leave()
        entered: AbstractContextManager[Any] = record_function(f"{PREFIX}{name}")
        entered.__enter__()
        self._open = name, entered
        # Between steps, claim to be in a phase: the forward of an evaluation must not count as a
        # step's.
        self._is_in_phase = name == DATA

    def _leave(self) -> None:
        if self._open is not None:
            self._open[1].__exit__(None, None, None)
            self._open = None

    def stop(self) -> PhaseTimes | None:
        """Stop, write the trace and return the phases' times; None if another rank's profiler ran."""
        self.is_running = False
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return None
        self._leave()
        for owner, name in self._places:
            if (there := owner()) is not None:
                delattr(there, name)
        # `stop` waits for the device, so the trace has all kernels.
        profiler.stop()
        plain = self._path.with_suffix("")
        profiler.export_chrome_trace(str(plain))
        trace = plain.read_bytes()
        # torch's own compression takes most of the time of an export.
        self._path.write_bytes(gzip.compress(trace, _COMPRESSION))
        plain.unlink()
        return phase_times(json.loads(trace))

    def abandon(self) -> None:
        """Write the trace so far, because the run has ended."""
        if not self.last:
            return
        traces = "no trace is written"
        if self.is_running:
            self.stop()
            traces = f"the trace so far is in {self.folder}"
        if self._is_main:
            warn_user(
                f"profile: run should make steps {self._steps[0]} to {self._steps[-1]}, it ended in or after "
                f"step {self.last}; {traces}"
            )


def _check_writable(folder: Path) -> None:
    """Make the folder; refuse it if no file can be made in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        rule, reason = "be one that every rank can write to", f"the error is {error.strerror}"
        raise ArgumentError(message("profile", "folder", rule, str(folder), reason)) from error
