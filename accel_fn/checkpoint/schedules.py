"""Restore the schedules of a resumed run: the saved ones or the program's, at the saved update."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler, SequentialLR

from accel_fn.checkpoint.run_state import Steps, of_step, stateful_functions
from accel_fn.core.state import DistState
from accel_fn.errors import ArgumentError, message
from accel_fn.transforms.schedule.advance import Schedule, StateSchedule, by_optimizer
from accel_fn.transforms.schedule.schedule import takes_metric

Choice = Literal["saved", "program"] | None
Match = Literal["program", "names"]
_LENGTHS = ("total_steps", "T_max", "total_iters", "milestones", "_milestones")
"""Attributes of schedulers that count updates of a whole run, and so depend on its length."""
RATES = ("lr", "initial_lr", "max_lr", "min_lr")
MOMENTA = ("momentum", "betas", "base_momentum", "max_momentum")
"""With `RATES`, the settings in an optimizer's groups that schedules change."""


def check_choices(function: str, schedule: object, match: object) -> None:
    """Refuse unknown values, and saved schedules together with `match="names"`."""
    if schedule not in (None, "saved", "program"):
        rule = 'be "saved" or "program", or left out'
        raise ArgumentError(message(function, "schedule", rule, schedule))
    if match not in ("program", "names"):
        raise ArgumentError(message(function, "match", 'be "program" or "names"', match))
    if match == "names" and schedule == "saved":
        rule = 'be left out, or "program", beside match="names"'
        raise ArgumentError(message(function, "schedule", rule, schedule))


class _Saved(NamedTuple):
    """A scheduler of the program and its saved state."""

    name: str
    scheduler: Any
    state: Mapping[str, Any]
    in_plan: Schedule | None
    """The plan's schedule that advances the scheduler; None for an extra, which the loop
    advances."""


class _OfPlan(NamedTuple):
    """A schedule of a step's plan, with its saved state."""

    place: str
    """The prefix of the entries of the schedule's function."""
    function: str
    """The name of the schedule's function in errors."""
    name: str
    """The name of the schedule: a function may have one schedule for each of several optimizers."""
    schedule: Schedule
    saved: Mapping[str, Any] | None
    """The saved state; None if the schedule's function was not saved."""


def _of_plans(steps: Steps, rests: Mapping[str, Mapping[str, Any]]) -> Iterator[_OfPlan]:
    for step in steps:
        saved = rests[step]["transforms"] if step in rests else {}
        for place, where, function in stateful_functions(steps[step].plan, step):
            title, state = of_step(where, step), saved.get(where)
            for optimizer, schedule in by_optimizer(function).items():
                if not optimizer:
                    yield _OfPlan(place, title, title, schedule, state)
                else:
                    own = None if state is None else state.get(optimizer, {})
                    yield _OfPlan(place, title, f"{title} of {optimizer}", schedule, own)


def of_other_optimizers(
    steps: Steps, rests: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """Yield entry prefix and function name of each schedule that was saved for optimizers of other names."""
    for each in _of_plans(steps, rests):
        if each.saved is not None and "scheduler" not in each.saved:
            yield each.place, each.function


def moved_functions(steps: Steps, extras: Mapping[str, Any]) -> list[str]:
    """Return the names of schedules whose functions now give other rates than those in use.

    Such a function reads a value that the program has changed since, such as a count of tokens in
    `extras`. `load` does not call it, since `load` cannot know that value.
    """
    found = [(each.name, each.schedule.scheduler) for each in _of_plans(steps, {})]
    found += [(f"extras/{name}", each) for name, each in extras.items() if _is_scheduler(each)]
    return [name for name, scheduler in found if _has_moved(scheduler)]


def _has_moved(scheduler: Any) -> bool:
    acting = list(_acting(scheduler))
    if len(acting) != 1 or not isinstance(acting[0], LambdaLR):
        return False
    (function,) = acting
    multipliers = [each(function.last_epoch) for each in function.lr_lambdas]
    now = [rate * each for rate, each in zip(function.base_lrs, multipliers, strict=True)]
    return [float(each) for each in now] != [float(each) for each in function._last_lr]


class ResumedSchedules:
    """The schedules of a checkpoint that is loaded into the running program."""

    def __init__(
        self,
        steps: Steps,
        rests: Mapping[str, Mapping[str, Any]],
        extras: Mapping[str, Any],
        extras_saved: Mapping[str, Any],
        choice: Choice,
        moved: Collection[str] = (),
        *,
        by_names: bool = False,
    ) -> None:
        self._by_names = by_names
        """Whether to step the program's schedules to the saved update. Schedules that follow a
        metric continue with their saved state instead."""
        self._moved = moved
        """The schedules whose functions `load` does not call."""
        self._found = [
            _Saved(each.name, each.schedule.scheduler, each.saved["scheduler"], each.schedule)
            for each in _of_plans(steps, rests)
            # A missing "scheduler" means that the schedule was saved for several optimizers and has
            # one here, or the reverse.
            if each.saved and "scheduler" in each.saved
        ]
        self._found += [
            _Saved(f"extras/{name}", extra, extras_saved[name], None)
            for name, extra in extras.items()
            if name in extras_saved and _is_scheduler(extra)
        ]
        self._choice: Choice = "program" if by_names else choice
        optimizers = [each for step in steps.values() for each in step.plan.optimizers.values()]
        optimizers += [each.scheduler.optimizer for each in self._found]
        with self._rates_as_numbers():
            self._groups = [(each, _settings(each)) for each in dict.fromkeys(optimizers)]
            self._states = [copy.deepcopy(each.scheduler.state_dict()) for each in self._found]

    def differences(self) -> Iterator[str]:
        """List lengths that differ, with both values, unless `load` was given a choice."""
        if self._choice is None:
            for each, here in zip(self._found, self._states, strict=True):
                yield from _other_lengths(each, here)

    def obstacles(self) -> Iterator[str]:
        """List reasons why the program's schedules, if chosen, cannot reach the saved update."""
        if self._choice == "program":
            for each, here in zip(self._found, self._states, strict=True):
                if not (self._by_names and takes_metric(each.scheduler)):
                    yield from _obstacles(each, here)

    def follow(self, loaded: DistState, *, calls: bool = True) -> None:
        """Set the rates of the chosen schedules at the saved update, after everything is loaded.

        Without `calls`, functions are not called: they may read extras, which are not loaded yet.
        """
        for each in self._found:
            if isinstance(each.in_plan, StateSchedule):
                each.in_plan.see(loaded)
        with self._rates_as_numbers():
            if self._choice == "program":
                self._restart()
                self._step_to_saved()
            elif calls:
                self._call_functions()

    def undo(self) -> None:
        """Restore the program's schedules to their state before the load."""
        if self._choice == "program":
            with self._rates_as_numbers():
                self._restart()

    def _rates_as_numbers(self) -> ExitStack:
        with ExitStack() as stack:
            for each in self._found:
                if each.in_plan is not None:
                    stack.enter_context(each.in_plan.rates_as_numbers())
            return stack.pop_all()

    def _restart(self) -> None:
        goes_on = [
            each.scheduler.optimizer
            for each in self._found
            if self._by_names and takes_metric(each.scheduler)
        ]
        for optimizer, settings in self._groups:
            for group, values in zip(optimizer.param_groups, settings, strict=True):
                group.update({} if optimizer in goes_on else copy.deepcopy(values))
        for each, state in zip(self._found, self._states, strict=True):
            if each.scheduler.optimizer not in goes_on:
                each.scheduler.load_state_dict(copy.deepcopy(state))

    def _step_to_saved(self) -> None:
        """Step the program's schedulers to their saved counts, all of them at each update, as a run does."""
        left = [
            0 if takes_metric(each.scheduler) else _count(each.state) - _count(state)
            for each, state in zip(self._found, self._states, strict=True)
        ]
        for number in range(max(left, default=0)):
            for each, count in zip(self._found, left, strict=True):
                if number < count:
                    _step(each.scheduler)

    def _call_functions(self) -> None:
        """Compute rates with the program's own schedule functions: no checkpoint holds a function."""
        over = Counter(id(each.scheduler.optimizer) for each in self._found)
        for each in self._found:
            # Skip optimizers with several schedules: a later schedule may have changed the rate
            # that the function returned.
            if over[id(each.scheduler.optimizer)] == 1 and each.name not in self._moved:
                _step_again(each.scheduler)


def _is_scheduler(extra: object) -> bool:
    return isinstance(extra, LRScheduler) or takes_metric(extra)


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Copy the settings of an optimizer's groups that schedules change."""
    return [
        {key: copy.deepcopy(group[key]) for key in (*RATES, *MOMENTA) if key in group}
        for group in optimizer.param_groups
    ]


def _other_lengths(each: _Saved, here: Mapping[str, Any]) -> Iterator[str]:
    saved, lengths = _lengths(each.state), _lengths(here)
    for name in {**saved, **lengths}:
        there, now = saved.get(name), lengths.get(name)
        if there != now:
            yield (
                f"{each.name}: {name} {there} saved, {now} here; give "
                'schedule="program" to follow that of this program, or schedule="saved"'
            )


def _obstacles(each: _Saved, here: Mapping[str, Any]) -> Iterator[str]:
    kind = type(each.scheduler).__name__
    if takes_metric(each.scheduler):
        yield f'{each.name}: {kind} follows metrics, which are not saved; give schedule="saved"'
        return
    count, now = _count(each.state), _count(here)
    if now > count:
        yield f"{each.name}: {count} steps saved, {now} here; build the program again"
    total = here.get("total_steps", count)
    if count > total:
        yield f"{each.name}: {count} steps saved, total_steps {total} here; make it longer"


def _lengths(state: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Return the lengths in a scheduler's state, and those of its inner schedulers, by name."""
    found = {f"{place}{name}": _plain(state[name]) for name in _LENGTHS if name in state}
    for number, inner in enumerate(state.get("_schedulers", ())):
        found |= _lengths(inner, f"{place}schedulers[{number}].")
    return found


def _plain(length: Any) -> Any:
    """Return a length as a number or a list: milestones are a Counter in a MultiStepLR."""
    if isinstance(length, Mapping):
        return sorted(Counter(length).elements())
    return length if isinstance(length, int | float) else list(length)


def _count(state: Mapping[str, Any]) -> int:
    """Return a scheduler's number of steps; a ChainedScheduler counts only in its parts."""
    count: int = state["last_epoch"] if "last_epoch" in state else _count(state["_schedulers"][0])
    return count


def can_restart(scheduler: Any) -> bool:
    """Return whether a scheduler begins from the rates of its groups; a `SequentialLR` does not."""
    parts = scheduler._schedulers if isinstance(scheduler, ChainedScheduler) else [scheduler]
    return not any(isinstance(each, SequentialLR) for each in parts)


def restart(scheduler: Any) -> None:
    """Restart a scheduler that was made during a run, from the rates at the start of the run."""
    if not can_restart(scheduler):
        return
    if isinstance(scheduler, ChainedScheduler):
        for each in scheduler._schedulers:
            restart(each)
    elif isinstance(scheduler, LRScheduler):
        scheduler.last_epoch = -1
        scheduler._initial_step()


def _step(scheduler: Any) -> None:
    # torch warns about a scheduler's step before the first update, unless this flag is set.
    scheduler.optimizer._opt_called = True
    scheduler.step()


def _step_again(scheduler: Any) -> None:
    """Repeat the newest step of a scheduler's last LambdaLR, and of the schedulers after it."""
    acting = list(_acting(scheduler))
    functions = [number for number, each in enumerate(acting) if isinstance(each, LambdaLR)]
    if not functions:
        return
    for each in acting[functions[-1] :]:
        each.last_epoch -= 1
        each._step_count -= 1
        if each.last_epoch < 0:
            # Repeat the step that torch makes in the scheduler's constructor.
            each._initial_step()
        else:
            _step(each)
    scheduler._last_lr = acting[-1]._last_lr


def _acting(scheduler: Any) -> Iterator[Any]:
    """Yield the innermost schedulers that have made the newest step of a scheduler."""
    if isinstance(scheduler, SequentialLR):
        number = bisect_right(scheduler._milestones, scheduler.last_epoch)
        yield from _acting(scheduler._schedulers[number])
    elif isinstance(scheduler, ChainedScheduler):
        for each in scheduler._schedulers:
            yield from _acting(each)
    else:
        yield scheduler
