"""regrouped: what was saved of one optimizer goes to several, and the reverse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from accel_fn.checkpoint.format.manifest import Manifest
from accel_fn.checkpoint.run_state import RunState, key_of, place_of

Rests = Mapping[str, Mapping[str, Any]]


def regrouped(
    manifest: Manifest, rests: Rests, contents: RunState
) -> tuple[Manifest, Rests, list[str]]:
    """Give what was saved to the program's optimizers, if these have other names.

    A parameter keeps the class of its optimizer, its state and the settings of its group. Returned
    as well is what does not fit; then nothing is changed.
    """
    found = manifest, rests
    problems: list[str] = []
    for step, rest in contents.rest.items():
        saved = rests[step]["optimizers"] if step in rests else rest["optimizers"]
        if saved.keys() == rest["optimizers"].keys():
            continue
        homes = _homes(manifest.plans[step], saved)
        lines = list(_misfits(contents.plans[step], rest["optimizers"], homes))
        problems += lines
        if not lines:
            found = _moved(*found, contents, step, homes)
    return *found, problems


_Homes = dict[str, tuple[str, str, Mapping[str, Any]]]
"""By the name of a parameter: optimizer, its class, and the settings of the group."""


def _homes(plan: Mapping[str, Any], saved: Mapping[str, Any]) -> _Homes:
    return {
        parameter: (name, plan[key_of(name)], {**settings, "params": None})
        for name, each in saved.items()
        for names, settings in zip(
            plan[f"{key_of(name)} groups"], each["others"]["param_groups"], strict=True
        )
        for parameter in names
    }


def _misfits(plan: Mapping[str, Any], here: Mapping[str, Any], homes: _Homes) -> Iterator[str]:
    left = set(homes)
    for name in here:
        kind = plan[key_of(name)]
        for number, group in enumerate(plan[f"{key_of(name)} groups"]):
            left -= set(group)
            for parameter in group:
                there = homes[parameter][1] if parameter in homes else "nothing"
                if there != kind:
                    yield f"optimizer of {parameter}: {there} saved, {kind} here"
            settings = {str(homes[each][2]) for each in group if each in homes}
            if len(settings) > 1:
                yield f"group {number} of {key_of(name)}: {len(settings)} groups with other settings saved"
    for parameter in sorted(left):
        yield f"optimizer of {parameter}: {homes[parameter][1]} saved, nothing here"


def _moved(
    manifest: Manifest, rests: Rests, contents: RunState, step: str, homes: _Homes
) -> tuple[Manifest, Rests]:
    """Write down what was saved as the program's own optimizers would have saved it."""
    saved, here = rests[step]["optimizers"], contents.rest[step]["optimizers"]
    keys = {name: [key_of(name), f"{key_of(name)} groups"] for name in (*saved, *here)}
    plan = dict(manifest.plans[step])
    for name in saved:
        for key in keys[name]:
            del plan[key]
    optimizers: dict[str, Any] = {}
    place_for: dict[str, str] = {}
    for name, each in here.items():
        plan |= {key: contents.plans[step][key] for key in keys[name]}
        groups = contents.plans[step][keys[name][1]]
        place_for |= {parameter: place_of(name, step) for group in groups for parameter in group}
        states = {p: saved[homes[p][0]]["state"] for group in groups for p in group}
        state = {p: values[p] for p, values in states.items() if p in values}
        settings = [
            {**homes[group[0]][2], "params": mine["params"]} if group else mine
            for group, mine in zip(groups, each["others"]["param_groups"], strict=True)
        ]
        optimizers[name] = {"state": state, "others": {**each["others"], "param_groups": settings}}
    places, entries = tuple(place_of(name, step) for name in saved), {}
    for name, entry in manifest.entries.items():
        inside = name.partition("/")[2]
        is_moved = name.startswith(places)
        place = place_for[inside.rpartition("/")[0]] if is_moved else ""
        entries[f"{place}{inside}" if is_moved else name] = entry
    moved = replace(manifest, entries=entries, plans={**manifest.plans, step: plan})
    return moved, {**rests, step: {**rests[step], "optimizers": optimizers}}
