"""Moments of parameters and state of transforms, matched by name between a run and another program."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from torch.optim import Optimizer

from accel_fn.checkpoint.run_state import (
    RESULT_SLOTS,
    RunState,
    Steps,
    is_optimizer,
    key_of,
    prefix_of,
)
from accel_fn.core.plan import Plan, unwrapped
from accel_fn.transforms.schedule.advance import schedules_made
from accel_fn.transforms.schedule.schedule import takes_metric

_Entry = TypeVar("_Entry")
_OF_SCHEDULES = {"lr", "initial_lr", "max_lr", "min_lr"} | {
    "momentum",
    "betas",
    "base_momentum",
    "max_momentum",
}
"""Entries of a group that schedules set, which follow the program."""
_MODEL = ("model/", "model@")
Names = Mapping[str, Mapping[str, str]]
"""By step name: the name of each parameter here -> its name in the run."""


@dataclass
class OfRun(Generic[_Entry]):
    """The state of a run, as a checkpoint or an earlier step has it; or as this program takes it."""

    entries: dict[str, _Entry]
    """By the names of `RunState.tensors`: the tensors, or where they are."""
    rests: dict[str, Any]
    """As `RunState.rest`."""
    plans: dict[str, Mapping[str, Any]]
    """As `RunState.plans`."""
    new: list[str] = field(default_factory=list)
    """A line for each part of the program that starts fresh, and of the run that is dropped."""


def by_names(run: OfRun[_Entry], here: RunState, steps: Steps, names: Names) -> OfRun[_Entry]:
    """Write the state of a run as that of this program, which may have other groups and transforms.

    Settings of groups, such as rates and weight decay, are the program's. Entries of groups that no
    setting gave, such as the step count of a schedule-free optimizer, go on where the parameters of a
    group had one group; so do rates that a schedule by a metric has set.
    """
    model = {name: run.entries[name] for name in run.entries if name.startswith(_MODEL)}
    found = OfRun(
        {name: each for name, each in model.items() if name in here.tensors},
        dict(run.rests),
        dict(run.plans),
    )
    lost = [name for name in model if name not in here.tensors]
    found.new += [f"{_listed(lost)} of the run: left out"] if lost else []
    for step in (each for each in here.plans if each in run.plans):
        own = here.plans[step]
        plan = {
            key: value
            for key, value in run.plans[step].items()
            if key not in RESULT_SLOTS and not is_optimizer(key)
        }
        same = {key: own[key] for key in own if key in RESULT_SLOTS or is_optimizer(key)}
        found.plans[step] = {**plan, **same}
        rest = here.rest[step]
        translation = _Translation(step, run, here, names[step], found, steps[step].plan)
        optimizers = {
            name: translation.optimizer(name, each)
            for name, each in steps[step].plan.optimizers.items()
        }
        transforms = translation.transforms(rest["transforms"])
        found.rests[step] = {
            "model": run.rests[step]["model"],
            "optimizers": optimizers,
            "transforms": transforms,
        }
    return found


def without_new(here: RunState, known: Collection[str]) -> RunState:
    """The program without the tensors that the run does not have, for a comparison of the others."""
    places = (*_MODEL, *here.stateful)
    kept = {
        name: each
        for name, each in here.tensors.items()
        if name in known or not name.startswith(places)
    }
    return replace(here, tensors=kept)


class _Translation(Generic[_Entry]):
    """The state of one step of a run, written as that of the program's."""

    def __init__(
        self,
        step: str,
        run: OfRun[_Entry],
        here: RunState,
        names: Mapping[str, str],
        found: OfRun[_Entry],
        own_plan: Plan,
    ) -> None:
        self._own_plan = own_plan
        self._step, self._run, self._here, self._names, self._found = step, run, here, names, found
        self._plan, self._rest = run.plans[step], run.rests[step]
        self._groups = {
            name: self._plan.get(f"{key_of(name)} groups", []) for name in self._rest["optimizers"]
        }
        self._tensors = {name: self._moments(name) for name in self._groups}

    def _moments(self, optimizer: str) -> dict[str, dict[str, _Entry]]:
        """The entries of an optimizer of the run, by parameter and key."""
        prefix, found = prefix_of(optimizer, self._step), defaultdict[str, dict[str, _Entry]](dict)
        for name, entry in self._run.entries.items():
            if name.startswith(prefix):
                parameter, _, key = name.removeprefix(prefix).rpartition("/")
                found[parameter][key] = entry
        return found

    def optimizer(self, name: str, optimizer: Optimizer) -> dict[str, Any]:
        """The state of one of the program's optimizers."""
        groups = self._here.plans[self._step][f"{key_of(name)} groups"]
        sources = self._sources(type(optimizer))
        state: dict[str, Any] = {}
        for each in dict.fromkeys(each for group in groups for each in group):
            if each in sources:
                source, _ = sources[each]
                before = self._names[each]
                for key, entry in self._tensors[source].get(before, {}).items():
                    self._found.entries[f"{prefix_of(name, self._step)}{each}/{key}"] = entry
                values = self._rest["optimizers"][source]["state"].get(before)
                state |= {} if values is None else {each: values}
        self._list_fresh(name, [each for group in groups for each in group], sources)
        return {"state": state, "others": self._others(name, optimizer, groups, sources)}

    def _sources(self, kind: type) -> dict[str, tuple[str, int]]:
        """The optimizer of the run and the number of the group that had each parameter, of one class."""
        before = {
            each: (source, index)
            for source, groups in self._groups.items()
            if self._plan.get(key_of(source)) == kind.__name__
            for index, group in enumerate(groups)
            for each in group
        }
        return {name: before[old] for name, old in self._names.items() if old in before}

    def _list_fresh(
        self, name: str, held: Sequence[str], sources: Mapping[str, tuple[str, int]]
    ) -> None:
        """List trained parameters whose moments begin anew."""
        model = unwrapped(self._own_plan.model)
        trained = {each for each, value in model.named_parameters() if value.requires_grad}
        known = {
            each
            for each, (source, _) in sources.items()
            if self._names[each] in self._tensors[source] or not self._tensors[source]
        }
        fresh = [each for each in held if each in trained - known]
        if fresh:
            self._found.new.append(f"{_of(name, self._step)} begins anew for {_listed(fresh)}")

    def _others(
        self,
        name: str,
        optimizer: Optimizer,
        groups: Sequence[Sequence[str]],
        sources: Mapping[str, tuple[str, int]],
    ) -> dict[str, Any]:
        """The entries of an optimizer's `state_dict` beside its state: groups, and others of its class."""
        own = self._here.rest[self._step]["optimizers"][name]["others"]
        saved = {each: of_run["others"] for each, of_run in self._rest["optimizers"].items()}
        others = {**own, "param_groups": [dict(each) for each in own["param_groups"]]}
        follows_metric = any(
            each.scheduler.optimizer is optimizer and takes_metric(each.scheduler)
            for each in schedules_made(self._own_plan)
        )
        for group, members in zip(others["param_groups"], groups, strict=True):
            places = {sources[each] for each in members if each in sources}
            if len(places) == 1:
                source, index = places.pop()
                before = saved[source]["param_groups"][index]
                group.update(_progress(before, group, type(optimizer)))
                group.update({"lr": before["lr"]} if follows_metric else {})
        used = {sources[each][0] for members in groups for each in members if each in sources}
        if len(used) == 1:
            more = saved[used.pop()]
            others |= {key: each for key, each in more.items() if key != "param_groups"}
        return others

    def transforms(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """The state of the program's transforms, by slot and name."""
        renamed = {before: name for name, before in self._names.items()}
        prefix, saved = prefix_of("transforms", self._step), self._rest["transforms"]
        pairs = dict(_pairs([*saved], [*own]))
        for before, where in pairs.items():
            for name, entry in self._run.entries.items():
                if name.startswith(f"{prefix}{before}/"):
                    key = name.removeprefix(f"{prefix}{before}/")
                    head, slash, parameter = key.partition("/")
                    if slash and parameter in renamed:
                        key = f"{head}/{renamed[parameter]}"
                    elif (
                        slash
                        and f"{prefix_of('model', self._step)}{parameter}" in self._run.entries
                    ):
                        continue  # of a parameter that the program does not have
                    self._found.entries[f"{prefix}{where}/{key}"] = entry
        for where in own:
            if where not in pairs.values():
                self._found.new.append(f"{_title(where, self._step)} begins anew")
        for before in saved:
            if before not in pairs:
                self._found.new.append(f"{_title(before, self._step)} of the run is left out")
        return {where: _as_here(saved[before], own[where]) for before, where in pairs.items()}


def _pairs(saved: Sequence[str], own: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pair functions of one slot and name, in their order; none of those of which another number is here."""
    lists: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for number, wheres in enumerate((saved, own)):
        for where in wheres:
            lists[_without_index(where)][number].append(where)
    for before, here in lists.values():
        if len(before) == len(here):
            yield from zip(before, here, strict=True)


def _as_here(saved: Any, own: Any) -> Any:
    """The state of a schedule of one optimizer as that of several, by name, or the other way round."""
    of_saved, of_own = _schedules_in(saved), _schedules_in(own)
    if not of_saved or not of_own or of_saved.keys() == of_own.keys():
        return saved
    first = next(iter(of_saved.values()))
    found = {name: of_saved.get(name, first) for name in of_own}
    return found.get("", found)


def _schedules_in(state: Any) -> Mapping[str, Any]:
    """The states of the schedules of several optimizers, by name; "" for one; none of any other function."""
    if "scheduler" in state:
        return {"": state}
    return {
        name: each
        for name, each in state.items()
        if isinstance(each, Mapping) and "scheduler" in each
    }


def _without_index(where: str) -> str:
    """`after_update/0 average` as `after_update average`."""
    slot, _, rest = where.partition("/")
    return f"{slot} {rest.partition(' ')[2]}"


def _title(where: str, step: str) -> str:
    name = where.partition(" ")[2]
    return f"{name} of step {step!r}" if step else name


def _of(optimizer: str, step: str) -> str:
    name = key_of(optimizer)
    return f"{name} of step {step!r}" if step else name


def _progress(saved: Mapping[str, Any], own: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The entries of a group that count the run: those that no argument of the optimizer's class sets."""
    settings = {*inspect.signature(kind).parameters, "params", *_OF_SCHEDULES}
    return {key: each for key, each in saved.items() if key in own and key not in settings}


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
