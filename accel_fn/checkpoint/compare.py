"""Differences between a checkpoint and the running program, found before anything is overwritten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from accel_fn.checkpoint.format.manifest import Entry, FrozenEntry, Manifest
from accel_fn.checkpoint.format.shard_plan import name_of_dtype, to_entries
from accel_fn.checkpoint.run_state import RunState, is_optimizer, key_of, prefix_of
from accel_fn.core.state import DistState

_NOTHING, _LONGEST = "nothing", 10_000
_MODEL = ("model/", "model@")
_FROZEN = ("frozen/", "frozen@")
Rests = Mapping[str, Mapping[str, Any]]
"""`RunState.rest`: by step name, the non-tensor state."""


def differences(
    manifest: Manifest, rests: Rests, contents: RunState, state: DistState
) -> Iterator[str]:
    """List what differs between checkpoint and program, a line each, with both values."""
    other = dict(_other_optimizers(rests, contents.rest))
    yield from other.values()
    plans = [
        {
            step: {key: plan[key] for key in plan if step not in other or not is_optimizer(key)}
            for step, plan in each.items()
        }
        for each in (manifest.plans, contents.plans)
    ]
    compared = (*_MODEL, *_FROZEN, *misfits(manifest, contents))
    saved: dict[str, Entry | FrozenEntry] = {**manifest.entries, **manifest.frozen}
    here = to_entries({**contents.tensors, **contents.frozen})
    facts = [
        _facts(manifest.seed, plans[0], manifest.tied, saved, rests, compared),
        _facts(state.seed, plans[1], contents.tied, here, contents.rest, compared),
    ]
    yield from _compare(*facts)


def _other_optimizers(saved: Rests, here: Rests) -> Iterator[tuple[str, str]]:
    """Describe, by step, plans whose optimizers have other names than those that were saved."""
    for step in (each for each in here if each in saved):
        names, names_here = (sorted(each[step]["optimizers"]) for each in (saved, here))
        if names != names_here:
            where = f"optimizers of step {step!r}" if step else "optimizers"
            yield (
                step,
                f"{where}: {names} saved, {names_here} here; give Plan those that were saved, or load "
                'with match="names", by which moments go on, or strict=False, which starts them fresh',
            )


def _facts(
    seed: int,
    plans: Mapping[str, Mapping[str, Any]],
    tied: Mapping[str, str],
    entries: Mapping[str, Entry | FrozenEntry],
    rests: Rests,
    compared: tuple[str, ...],
) -> dict[str, Any]:
    facts: dict[str, Any] = {"seed": seed}
    for step, plan in plans.items():
        facts |= {f"{key} of step {step!r}" if step else key: plan[key] for key in plan}
    facts |= {f"{name} is tied to": first for name, first in tied.items()}
    for name, entry in entries.items():
        if name.startswith(compared):
            facts[name] = f"{entry.dtype} {list(entry.shape)}"
    for step, rest in rests.items():
        facts |= {f"{prefix_of('model', step)}{key}": "extra state" for key in rest["model"]}
    return facts


def extra_differences(saved: Mapping[str, Any], extras: Mapping[str, Any]) -> Iterator[str]:
    yield from _compare(*({"extras": sorted(each)} if each else {} for each in (saved, extras)))
    for name in extras:
        for line in _differences_from(name, saved, extras):
            yield f"extras/{name}: {line}"


def fitting_extras(saved: Mapping[str, Any], extras: Mapping[str, Any]) -> list[str]:
    return [name for name in extras if name in saved and not _differences_from(name, saved, extras)]


def fitting(entries: Mapping[str, Entry | FrozenEntry], contents: RunState) -> dict[str, Tensor]:
    return {
        name: tensor
        for name, tensor in (*contents.tensors.items(), *contents.frozen.items())
        if (is_model(name) or is_frozen(name)) and _fits(entries.get(name), tensor)
    }


def misfits(manifest: Manifest, contents: RunState) -> dict[str, str]:
    """Find transforms whose saved tensors have other shapes: prefix of their entries -> name."""
    return {
        place: function
        for place, function in contents.stateful.items()
        if any(name.startswith(place) for name in manifest.entries)
        and not all(
            _fits(manifest.entries.get(name), tensor)
            for name, tensor in contents.tensors.items()
            if name.startswith(place)
        )
    }


def has_optimizer(
    manifest: Manifest, contents: RunState, fits: Mapping[str, Tensor], step: str, optimizer: str
) -> bool:
    """Return whether that step was saved with this optimizer over these parameters, in shapes that fit."""
    saved, here = manifest.plans.get(step, {}), contents.plans[step]
    key, prefix = key_of(optimizer), prefix_of("model", step)
    groups = f"{key} groups"
    names = {f"{prefix}{name}" for group in here[groups] for name in group}
    return names <= fits.keys() and all(saved.get(each) == here[each] for each in (key, groups))


def listed(lines: list[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)


def is_model(name: str) -> bool:
    """Return whether an entry is the model's, and so a tensor that must exist before it is loaded."""
    return name.startswith(_MODEL)


def is_frozen(name: str) -> bool:
    """Return whether an entry is of a frozen model of a plan, which a checkpoint knows by its hash."""
    return name.startswith(_FROZEN)


def _fits(entry: Entry | FrozenEntry | None, tensor: Tensor) -> bool:
    here = name_of_dtype(tensor.dtype), tuple(tensor.shape)
    return entry is not None and (entry.dtype, entry.shape) == here


def _differences_from(name: str, saved: Mapping[str, Any], extras: Mapping[str, Any]) -> list[str]:
    compare = getattr(extras[name], "differences_from", None)
    return [] if compare is None or name not in saved else list(compare(saved[name]))


def _compare(saved: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    for name in {**saved, **here}:
        values = saved.get(name, _NOTHING), here.get(name, _NOTHING)
        if values[0] != values[1]:
            saved_value, value = (_cut(f"{each}") for each in values)
            yield f"{name}: {saved_value} saved, {value} here"


def _cut(text: str) -> str:
    """A forged value may be very long."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def unlike_rests(saved: Rests, here: Rests) -> Iterator[str]:
    """List saved values of another type or size than this program's."""
    for step, rest in saved.items():
        for part, values in rest.items():
            there = here[step][part]
            yield from unlike(values, there, part, is_free=True)
            if part == "optimizers":
                for name in values:
                    saved_groups, groups = (
                        each[name]["others"]["param_groups"] for each in (values, there)
                    )
                    yield from unlike(saved_groups, groups, f"{prefix_of(name, step)}param_groups")


def unlike(saved: Any, here: Any, name: str, *, is_free: bool = False) -> Iterator[str]:
    """List saved values of another type or size than the program's.

    With `is_free`, as for state of a user's function, they may be None, missing or of another length.
    """
    if isinstance(saved, Mapping) and isinstance(here, Mapping):
        for key in here:
            if key in saved:
                yield from unlike(saved[key], here[key], f"{name}/{key}", is_free=is_free)
            elif not is_free and key != "initial_lr":  # a schedule adds it, and may be new
                yield f"{name}/{key}: {_NOTHING} saved, {here[key]} here"
    elif isinstance(saved, list | tuple) and isinstance(here, list | tuple):
        pairs = enumerate(zip(saved, here, strict=False))
        # torch_optimizer's RAdam has None in a list until its first updates fill it.
        for number, pair in [each for each in pairs if each[1][1] is not None]:
            yield from unlike(*pair, f"{name}/{number}", is_free=is_free)
        if len(saved) != len(here) and not is_free:
            yield f"{name}: {len(saved)} values saved, {len(here)} here"
    elif not (is_free and (saved is None or here is None)):
        are_tensors = isinstance(saved, Tensor) and isinstance(here, Tensor)
        kinds = [_kind(each, is_free=is_free, is_exact=are_tensors) for each in (saved, here)]
        if kinds[0] != kinds[1]:
            yield f"{name}: {kinds[0]} saved, {kinds[1]} here"


def _kind(value: object, *, is_free: bool, is_exact: bool) -> str:
    """Describe a value's type and size; unless `is_exact`, a tensor of one number is a number."""
    if is_free:
        rough = {bool: "a number", int: "a number", float: "a number", Tensor: "a number"}
        return rough.get(type(value), f"a {type(value).__name__}")
    if isinstance(value, Tensor) and (value.ndim or is_exact):
        return f"{name_of_dtype(value.dtype)} {list(value.shape)}"
    if isinstance(value, int | float | Tensor) and not isinstance(value, bool):
        largest = torch.finfo(torch.float64).max
        return "a number" if -largest <= value <= largest else f"{value}"
    return f"a {type(value).__name__}"
