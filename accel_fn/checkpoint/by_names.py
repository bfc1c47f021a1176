"""Convert a run's state for another program: match moments and the state of transforms by name."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from torch.optim import Optimizer

from accel_fn.checkpoint.compare import is_model, shortened
from accel_fn.checkpoint.run_state import (
    RESULT_SLOTS,
    RunState,
    Steps,
    is_optimizer,
    key_of,
    of_step,
    prefix_of,
    with_prefix,
)
from accel_fn.checkpoint.schedules import MOMENTA, RATES
from accel_fn.core.plan import Plan, unwrapped
from accel_fn.transforms.schedule.advance import schedules_made
from accel_fn.transforms.schedule.schedule import takes_metric

_Entry = TypeVar("_Entry")
_MOST_SHOWN = 8
Names = Mapping[str, Mapping[str, str]]
"""A map from a step's name to a map from parameter names in the program to those in the run."""


@dataclass
class OfRun(Generic[_Entry]):
    """The state of a run: from a checkpoint or an earlier step, or converted for this program."""

    entries: dict[str, _Entry]
    """The tensors, or their places in a checkpoint, under the names of `RunState.tensors`."""
    rests: dict[str, Any]
    """The non-tensor state, in the form of `RunState.rest`."""
    plans: dict[str, Mapping[str, Any]]
    """The signatures of steps, in the form of `RunState.plans`."""
    new: list[str] = field(default_factory=list)
    """A line for each part of the program that starts fresh, and for each part of the run that is
    dropped."""


def by_names(run: OfRun[_Entry], here: RunState, steps: Steps, names: Names) -> OfRun[_Entry]:
    """Convert the state of a run for this program, which may have other groups and transforms.

    Settings of groups, such as rates and weight decay, come from the program. If all parameters of
    a group were in one group of the run, the group's other entries come from there, such as the
    step count of a schedule-free optimizer. So do rates that follow a metric.
    """
    model = {name: each for name, each in run.entries.items() if is_model(name)}
    known = {name: each for name, each in model.items() if name in here.tensors}
    found = OfRun(known, dict(run.rests), dict(run.plans))
    lost = [name for name in model if name not in known]
    found.new += [f"{shortened(lost, _MOST_SHOWN)} of the run: left out"] if lost else []
    for step in (each for each in here.plans if each in run.plans):
        before, own = run.plans[step], here.plans[step]
        compared = {key: before[key] for key in before if not _is_matched(key)}
        found.plans[step] = compared | {key: own[key] for key in own if _is_matched(key)}
        plan, own_rest = steps[step].plan, here.rest[step]
        extra_state = run.rests[step]["model"]
        translation = _Translation(step, run, here, names[step], found, plan)
        found.rests[step] = {
            "model": {key: extra_state[key] for key in extra_state if key in own_rest["model"]},
            "optimizers": {
                n: translation.optimizer(n, each) for n, each in plan.optimizers.items()
            },
            "transforms": translation.transforms(own_rest["transforms"]),
            "weight": run.rests[step].get("weight", 0.0),
        }
    return found


def _is_matched(key: str) -> bool:
    """Return whether a signature's key describes an optimizer or transforms: these are matched by name."""
    return key in RESULT_SLOTS or is_optimizer(key)


def without_new(here: RunState, known: Collection[str]) -> RunState:
    """Return this program's state without tensors that the run lacks, since these cannot be compared."""
    kept = {
        name: each
        for name, each in here.tensors.items()
        if name in known or not (is_model(name) or name.startswith(tuple(here.stateful)))
    }
    return replace(here, tensors=kept)


class _Translation(Generic[_Entry]):
    """Converts the state of a run's step to the state of the program's step."""

    def __init__(
        self,
        step: str,
        run: OfRun[_Entry],
        here: RunState,
        names: Mapping[str, str],
        found: OfRun[_Entry],
        own_plan: Plan,
    ) -> None:
        self._step, self._run, self._here, self._names, self._found = step, run, here, names, found
        self._own_plan = own_plan
        self._plan, self._rest = run.plans[step], run.rests[step]
        self._groups: dict[str, list[list[str]]] = {}
        """For each optimizer of the run, the names of the parameters in each group."""
        self._tensors: dict[str, dict[str, dict[str, _Entry]]] = {}
        """The entries of each optimizer of the run, by parameter and key."""
        for name in self._rest["optimizers"]:
            self._groups[name] = self._plan.get(f"{key_of(name)} groups", [])
            self._tensors[name] = defaultdict(dict)
            for place, entry in with_prefix(prefix_of(name, step), run.entries).items():
                parameter, _, key = place.rpartition("/")
                self._tensors[name][parameter][key] = entry

    def optimizer(self, name: str, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state for one of the program's optimizers.

        Record the entries to load into it, and a line for parameters that start without moments.
        """
        groups = self._here.plans[self._step][f"{key_of(name)} groups"]
        held = [*dict.fromkeys(each for group in groups for each in group)]
        sources = self._sources(type(optimizer))
        state: dict[str, Any] = {}
        known = set[str]()
        for each in (each for each in held if each in sources):
            source, before = sources[each][0], self._names[each]
            moments = self._tensors[source]
            if before in moments or not moments:
                known.add(each)
            for key, entry in moments.get(before, {}).items():
                self._found.entries[f"{prefix_of(name, self._step)}{each}/{key}"] = entry
            values = self._rest["optimizers"][source]["state"].get(before)
            state |= {} if values is None else {each: values}
        model = unwrapped(self._own_plan.model)
        trained = {each for each, value in model.named_parameters() if value.requires_grad}
        fresh = [each for each in held if each in trained - known]
        if fresh:
            title = of_step(key_of(name), self._step)
            self._found.new.append(f"{title} begins anew for {shortened(fresh, _MOST_SHOWN)}")
        return {"state": state, "others": self._others(name, optimizer, groups, sources)}

    def _sources(self, kind: type) -> dict[str, tuple[str, int]]:
        """Map each parameter to the run's optimizer of class `kind` that had it, and its group's number."""
        before = {
            each: (source, index)
            for source, groups in self._groups.items()
            if self._plan.get(key_of(source)) == kind.__name__
            for index, group in enumerate(groups)
            for each in group
        }
        return {name: before[old] for name, old in self._names.items() if old in before}

    def _others(
        self,
        name: str,
        optimizer: Optimizer,
        groups: Sequence[Sequence[str]],
        sources: Mapping[str, tuple[str, int]],
    ) -> dict[str, Any]:
        """Return an optimizer's `state_dict` without moments: its groups, and entries that its class adds."""
        own = self._here.rest[self._step]["optimizers"][name]["others"]
        saved = {each: of_run["others"] for each, of_run in self._rest["optimizers"].items()}
        others = {**own, "param_groups": [dict(each) for each in own["param_groups"]]}
        follows_metric = any(
            each.scheduler.optimizer is optimizer and takes_metric(each.scheduler)
            for each in schedules_made(self._own_plan)
        )
        # Take a group's counts from the run. A count is an entry that no argument of the
        # optimizer's class sets.
        settings = {*inspect.signature(type(optimizer)).parameters, "params", *RATES, *MOMENTA}
        used = set[str]()
        for group, members in zip(others["param_groups"], groups, strict=True):
            places = {sources[each] for each in members if each in sources}
            used |= {source for source, _ in places}
            if len(places) == 1:
                source, index = places.pop()
                before = saved[source]["param_groups"][index]
                counts = [key for key in before if key in group and key not in settings]
                group.update({key: before[key] for key in counts})
                group.update({"lr": before["lr"]} if follows_metric else {})
        if len(used) == 1:
            more = saved[used.pop()]
            others |= {key: each for key, each in more.items() if key != "param_groups"}
        return others

    def transforms(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state for the program's transforms, by slot and name; record the entries to load."""
        renamed = {before: name for name, before in self._names.items()}
        model, prefix = (prefix_of(kind, self._step) for kind in ("model", "transforms"))
        saved, new = self._rest["transforms"], self._found.new
        pairs = dict(_pairs([*saved], [*own]))
        for before, where in pairs.items():
            for key, entry in with_prefix(f"{prefix}{before}/", self._run.entries).items():
                head, slash, parameter = key.partition("/")
                if slash and parameter in renamed:
                    key = f"{head}/{renamed[parameter]}"
                elif slash and f"{model}{parameter}" in self._run.entries:
                    # The entry belongs to a parameter that the program does not have.
                    continue
                self._found.entries[f"{prefix}{where}/{key}"] = entry
        for where in (each for each in own if each not in pairs.values()):
            new.append(f"{self._title(where)} begins anew")
        for before in (each for each in saved if each not in pairs):
            new.append(f"{self._title(before)} of the run is left out")
        return {where: _as_here(saved[before], own[where]) for before, where in pairs.items()}

    def _title(self, where: str) -> str:
        return of_step(where.partition(" ")[2], self._step)


def _pairs(saved: Sequence[str], own: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pair the run's functions with the program's functions of the same slot and name, in order.

    Functions of one slot and name are not paired if run and program have different numbers of them.
    """
    lists: dict[tuple[str, str], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for number, wheres in enumerate((saved, own)):
        for where in wheres:
            slot, _, rest = where.partition("/")
            # For example, "after_update/0 ema" has the name "ema".
            name = rest.partition(" ")[2]
            lists[slot, name][number].append(where)
    for before, here in lists.values():
        if len(before) == len(here):
            yield from zip(before, here, strict=True)


def _as_here(saved: Any, own: Any) -> Any:
    """Convert a schedule's saved state between its two forms: for one optimizer, or for several by name."""
    of_saved, of_own = _schedules_in(saved), _schedules_in(own)
    if not of_saved or not of_own or of_saved.keys() == of_own.keys():
        return saved
    first = next(iter(of_saved.values()))
    found = {name: of_saved.get(name, first) for name in of_own}
    return found.get("", found)


def _schedules_in(state: Any) -> Mapping[str, Any]:
    """Map each optimizer's name to its schedule's state; the key is "" if there is one optimizer."""
    if "scheduler" in state:
        return {"": state}
    return {
        name: each
        for name, each in state.items()
        if isinstance(each, Mapping) and "scheduler" in each
    }
