"""Differences between a checkpoint and the running program, found before anything is overwritten."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from accel_fn.base.state import DistState
from accel_fn.checkpoint.format.manifest import Entry, Manifest
from accel_fn.checkpoint.format.shard_plan import name_of_dtype, to_entries
from accel_fn.step.contents import Contents, place_of

_NOTHING = "nothing"


def differences(manifest: Manifest, contents: Contents, state: DistState) -> list[str]:
    """List what differs between manifest and program, a line each, with both values."""
    found = _compare({"seed": manifest.seed}, {"seed": state.seed})
    found += _compare(_plans(manifest.plans), _plans(contents.plans))
    found += _compare(manifest.tied, contents.tied, "{name} is tied to")
    compared = ("model", *misfits(manifest, contents))
    saved, here = (
        {
            name: f"{entry.dtype} {list(entry.shape)}"
            for name, entry in entries.items()
            if name.startswith(compared)
        }
        for entries in (manifest.entries, to_entries(contents.tensors))
    )
    return found + _compare(saved, here)


def extra_state_differences(
    saved: Mapping[str, Mapping[str, Any]], here: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """List extra state of the models that is only there or only here; both are `Contents.rest`."""
    there, now = (
        {
            f"{place_of('model', name)}{key}": "extra state"
            for name, rest in rests.items()
            for key in rest["model"]
        }
        for rests in (saved, here)
    )
    return _compare(there, now)


def extra_differences(saved: Mapping[str, Any], extras: Mapping[str, Any]) -> list[str]:
    """List other names of extras, and what extras find in `differences_from`."""
    there, here = ({"extras": sorted(each)} if each else {} for each in (saved, extras))
    return _compare(there, here) + [
        f"extras/{name}: {line}"
        for name in extras
        if name in saved
        for line in _differences_from(extras[name], saved[name])
    ]


def fitting_extras(saved: Mapping[str, Any], extras: Mapping[str, Any]) -> list[str]:
    """List names of extras that can load what was saved of them."""
    return [
        name
        for name in extras
        if name in saved and not _differences_from(extras[name], saved[name])
    ]


def fitting(manifest: Manifest, contents: Contents) -> dict[str, Tensor]:
    """Select the model's tensors that were saved with this dtype and shape."""
    return {
        name: tensor
        for name, tensor in contents.tensors.items()
        if is_model(name) and _is_alike(manifest.entries.get(name), tensor)
    }


def misfits(manifest: Manifest, contents: Contents) -> dict[str, str]:
    """Select state of transforms that was saved in other tensors: how its entries begin -> a name."""
    return {
        place: function
        for place, function in contents.stateful.items()
        if any(name.startswith(place) for name in manifest.entries)
        and not all(
            _is_alike(manifest.entries.get(name), tensor)
            for name, tensor in contents.tensors.items()
            if name.startswith(place)
        )
    }


def has_optimizer(
    manifest: Manifest, contents: Contents, fits: Mapping[str, Tensor], step: str, optimizer: str
) -> bool:
    """Return whether that step was saved with this optimizer over these parameters, in shapes that fit."""
    saved, here = manifest.plans.get(step, {}), contents.plans[step]
    prefix, groups = place_of("model", step), f"{optimizer} groups"
    names = {f"{prefix}{name}" for group in here[groups] for name in group}
    return names <= fits.keys() and all(saved.get(key) == here[key] for key in (optimizer, groups))


def listed(lines: Iterable[str]) -> str:
    """Indent lines, one below the other."""
    return "\n".join(f"  {line}" for line in lines)


def is_model(name: str) -> bool:
    """Return whether an entry is the model's, and so a tensor that must exist before it is loaded."""
    return name.startswith("model")


def _is_alike(entry: Entry | None, tensor: Tensor) -> bool:
    here = name_of_dtype(tensor.dtype), tuple(tensor.shape)
    return entry is not None and (entry.dtype, entry.shape) == here


def _differences_from(extra: Any, saved: Any) -> list[str]:
    compare = getattr(extra, "differences_from", None)
    return [] if compare is None else list(compare(saved))


def _plans(plans: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{key} of step {name!r}" if name else key: value
        for name, plan in plans.items()
        for key, value in plan.items()
    }


def _compare(saved: Mapping[str, Any], here: Mapping[str, Any], label: str = "{name}") -> list[str]:
    return [
        f"{label.format(name=name)}: {saved.get(name, _NOTHING)} saved, {here.get(name, _NOTHING)} here"
        for name in {**saved, **here}
        if saved.get(name) != here.get(name)
    ]
