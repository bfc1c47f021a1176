"""Find differences between a checkpoint and the program before any value is overwritten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel_fn.checkpoint.files import hash_of_tensor
from accel_fn.checkpoint.manifest import Entry, FrozenEntry, Manifest
from accel_fn.checkpoint.run_state import (
    RunState,
    Steps,
    is_optimizer,
    key_of,
    of_step,
    prefix_of,
    read_whole,
)
from accel_fn.checkpoint.tensors import name_of_dtype, to_entries
from accel_fn.core.collectives import agreed, all_or_none
from accel_fn.core.dtensor import local
from accel_fn.core.plan import unwrapped
from accel_fn.core.primitives import exchange
from accel_fn.core.state import DistState
from accel_fn.errors import ArgumentError, CheckpointError

_NOTHING, _LONGEST = "nothing", 10_000
_MODEL = ("model/", "model@")
_FROZEN = ("frozen/", "frozen@")
Rests = Mapping[str, Mapping[str, Any]]
"""The non-tensor state by step name, in the form of `RunState.rest`."""
_SAMPLE = 64


def differences(
    manifest: Manifest, rests: Rests, contents: RunState, state: DistState
) -> Iterator[str]:
    """List the differences between checkpoint and program, each as a line with both values."""
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
    """Describe, by step name, the plans whose optimizers differ in name from the saved ones."""
    for step in (each for each in here if each in saved):
        names, names_here = (sorted(each[step]["optimizers"]) for each in (saved, here))
        if names != names_here:
            yield (
                step,
                f"{of_step('optimizers', step)}: {names} saved, {names_here} here; give Plan those that were "
                'saved, or load with match="names", by which moments go on, or strict=False, which starts '
                "them fresh",
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
        facts |= {of_step(key, step): plan[key] for key in plan}
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
    """Map the prefix of a transform's entries to its name, if its saved tensors do not fit the program's."""
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
    """Return whether the step was saved with this optimizer over the same parameters and shapes."""
    saved, here = manifest.plans.get(step, {}), contents.plans[step]
    key, prefix = key_of(optimizer), prefix_of("model", step)
    groups = f"{key} groups"
    names = {f"{prefix}{name}" for group in here[groups] for name in group}
    return names <= fits.keys() and all(saved.get(each) == here[each] for each in (key, groups))


def listed(lines: list[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)


def is_model(name: str) -> bool:
    """Return whether an entry belongs to the model. Such an entry is loaded only into an existing tensor."""
    return name.startswith(_MODEL)


def is_frozen(name: str) -> bool:
    """Return whether an entry belongs to a frozen model; a checkpoint holds only its hash."""
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
            texts = [f"{each}" for each in values]
            texts = [text[:_LONGEST] + "..." * (len(text) > _LONGEST) for text in texts]
            # A manifest may be forged and its values very long, so the message holds only their
            # start.
            yield f"{name}: {texts[0]} saved, {texts[1]} here"


def unlike_rests(saved: Rests, here: Rests) -> Iterator[str]:
    """List saved values whose type or size differs from this program's."""
    for step, rest in saved.items():
        for part, values in rest.items():
            there = here[step][part]
            yield from unlike(values, there, part, is_free=True)
            for name in values if part == "optimizers" else ():
                saved_groups, groups = (
                    each[name]["others"]["param_groups"] for each in (values, there)
                )
                yield from unlike(saved_groups, groups, f"{prefix_of(name, step)}param_groups")


def unlike(saved: Any, here: Any, name: str, *, is_free: bool = False) -> Iterator[str]:
    """List saved values whose type or size differs from the program's.

    With `is_free`, for the state of a user's function, a value may also be None, be missing, or
    have another length.
    """
    if isinstance(saved, Mapping) and isinstance(here, Mapping):
        for key in here:
            if key in saved:
                yield from unlike(saved[key], here[key], f"{name}/{key}", is_free=is_free)
            elif not is_free and key != "initial_lr":
                # `initial_lr` may be missing in the checkpoint: a schedule adds it, and the
                # program's schedule may be new.
                yield f"{name}/{key}: {_NOTHING} saved, {here[key]} here"
    elif isinstance(saved, list | tuple) and isinstance(here, list | tuple):
        pairs = enumerate(zip(saved, here, strict=False))
        # Skip None: torch_optimizer's RAdam has a list of None, which its first updates fill.
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
    """Describe the type and shape of a value, as an error prints it.

    Unless `is_exact`, a 0-dim tensor counts as a number. With `is_free`, every tensor does.
    """
    if is_free:
        rough = {bool: "a number", int: "a number", float: "a number", Tensor: "a number"}
        return rough.get(type(value), f"a {type(value).__name__}")
    if isinstance(value, Tensor) and (value.ndim or is_exact):
        return f"{name_of_dtype(value.dtype)} {list(value.shape)}"
    if isinstance(value, int | float | Tensor) and not isinstance(value, bool):
        largest = torch.finfo(torch.float64).max
        return "a number" if -largest <= value <= largest else f"{value}"
    return f"a {type(value).__name__}"


class Hashed(NamedTuple):
    """The hash of a whole tensor, and a mark of this rank's part, which shows whether to hash it again."""

    hash: str
    mark: tuple[int, str]


def take_frozen(contents: RunState, steps: Steps) -> dict[str, Tensor]:
    """Remove from `contents` the parameters that no step trains or has trained; return them by name."""
    trained = set[int]().union(*(each.strategy.parameters.required for each in steps.values()))
    return {
        name: contents.tensors.pop(name)
        for step, each in steps.items()
        for key, parameter in unwrapped(each.plan.model).named_parameters()
        if not parameter.requires_grad and id(parameter) not in trained
        if (name := f"{prefix_of('model', step)}{key}") in contents.tensors
    }


def hashed(
    tensors: Mapping[str, Tensor], state: DistState, known: Mapping[str, Hashed], function: str
) -> dict[str, Hashed]:
    """Hash whole tensors, each on one rank; do not read tensors with an unchanged mark again.

    Cost: one small collective; if tensors are read, a gather of each sharded one and one more
    small collective.
    """
    marks = all_or_none(lambda: {n: _mark(each) for n, each in tensors.items()}, state, function)
    new = [name for name in tensors if name not in known or known[name].mark != marks[name]]
    news = {name for names in exchange(new, state, function) for name in names}
    hashes = {name: each.hash for name, each in known.items()}
    if news:
        hashes |= _hashes({n: each for n, each in tensors.items() if n in news}, state, function)
    return {name: Hashed(hashes[name], mark) for name, mark in marks.items()}


def check_unchanged(before: Mapping[str, Hashed], found: Mapping[str, Hashed]) -> None:
    """Raise if the loop has changed frozen parameters, such as a teacher's, since the last save or load."""
    changed = [n for n in found if n in before and found[n].hash != before[n].hash]
    models = [name for name in changed if is_frozen(name)]
    if models:
        raise ArgumentError(
            "save: frozen models must stay as they are, since a checkpoint does not hold them, got a change "
            f"since they were last saved or loaded in {shortened(models)}; make a model that moves a part of "
            "Plan's model, or leave it out of frozen and put it into extras"
        )
    if changed:
        raise ArgumentError(
            'save: only="trained" must leave out parameters that stay as they are, got a change since '
            f"they were last saved or loaded in {shortened(changed)}; save without only"
        )


def check_loaded(path: Path, saved: Mapping[str, FrozenEntry], here: Mapping[str, Hashed]) -> None:
    """Refuse a program whose frozen parameters differ from those that a checkpoint left out."""
    changed = [name for name in here if here[name].hash != saved[name].hash]
    if changed:
        raise CheckpointError(
            f"load: {path} leaves out frozen parameters, which the program must have as they were saved, "
            f"got other values in {shortened(changed)}; give each model the weights that training began "
            "with, then load"
        )


def _mark(tensor: Tensor) -> tuple[int, str]:
    """Return a tensor's version, and a hash of some elements.

    Comparing these two takes less time than a full hash, and finds most changes.

    The version alone is not enough: writes through `.data` do not change it.
    """
    held = local(tensor).detach()
    few = held.flatten()[:: max(1, held.numel() // _SAMPLE)]
    return held._version, hash_of_tensor(few)


def shortened(names: Sequence[str], most: int = 3) -> str:
    """Join the first names, and append the number of the remaining names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _hashes(tensors: Mapping[str, Tensor], state: DistState, function: str) -> dict[str, str]:
    """Hash whole tensors, which the ranks take in turn; return all hashes on every rank."""
    own = [*tensors][state.rank :: state.world_size]
    hashes = read_whole(tensors, own, lambda _, gathered: hash_of_tensor(gathered))
    return {n: each for found in agreed(hashes, state, function) for n, each in found.items()}
