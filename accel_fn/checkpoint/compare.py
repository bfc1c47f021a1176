"""How a checkpoint and the running program differ, all of it, before anything is overwritten."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from accel_fn.base.state import DistState
from accel_fn.checkpoint.contents import Contents, place_of
from accel_fn.checkpoint.format.manifest import Entry, Manifest
from accel_fn.checkpoint.format.shard_plan import name_of_dtype

_NOTHING = "nothing"


def differences(manifest: Manifest, contents: Contents, state: DistState) -> list[str]:
    """A line for each: what it is, what was saved, what is here."""
    found = _compare({"seed": manifest.seed}, {"seed": state.seed})
    found += _compare(_plans(manifest.plans), _plans(contents.plans))
    found += _compare(manifest.tied, contents.tied, "{name} is tied to")
    told = ("model", *misfits(manifest, contents))
    saved = {
        name: f"{entry.dtype} {list(entry.shape)}"
        for name, entry in manifest.entries.items()
        if name.startswith(told)
    }
    here = {
        name: f"{name_of_dtype(tensor.dtype)} {list(tensor.shape)}"
        for name, tensor in contents.tensors.items()
        if name.startswith(told)
    }
    return found + _compare(saved, here)


def extra_state_differences(
    saved: Mapping[str, Mapping[str, Any]], here: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """The same of what is in the models' `state_dict` and no tensor: is it there? By step, of `rest`."""
    return _compare(_extra_state(saved), _extra_state(here))


def extra_differences(saved: Mapping[str, Any], extras: Mapping[str, Any]) -> list[str]:
    """The same of extras: of their names, and what those say that can tell without being changed."""
    names = [{"extras": sorted(each)} if each else {} for each in (saved, extras)]
    found = _compare(names[0], names[1])
    return found + [
        f"extras/{name}: {line}"
        for name in extras
        if name in saved
        for line in _told_by(extras[name], saved[name])
    ]


def fitting_extras(saved: Mapping[str, Any], extras: Mapping[str, Any]) -> list[str]:
    """Names of those that can take back what was saved of them."""
    return [name for name in extras if name in saved and not _told_by(extras[name], saved[name])]


def fitting(manifest: Manifest, contents: Contents) -> dict[str, Tensor]:
    """The model's tensors that were saved with this dtype and shape."""
    entries = manifest.entries
    return {
        name: tensor
        for name, tensor in contents.tensors.items()
        if is_model(name) and _is_alike(entries.get(name), tensor)
    }


def misfits(manifest: Manifest, contents: Contents) -> dict[str, str]:
    """What is kept here of transforms in other tensors than were saved: how entries begin, a name."""
    return {
        place: told
        for place, told in contents.kept.items()
        if any(name.startswith(place) for name in manifest.entries)
        and not all(
            _is_alike(manifest.entries.get(name), tensor)
            for name, tensor in contents.tensors.items()
            if name.startswith(place)
        )
    }


def has_optimizer(
    manifest: Manifest, contents: Contents, fits: Mapping[str, Tensor], step: str
) -> bool:
    """Was that step saved with this optimizer over these parameters, in shapes that fit?"""
    saved, here = manifest.plans.get(step, {}), contents.plans[step]
    prefix = place_of("model", step)
    names = {f"{prefix}{name}" for group in here["groups"] for name in group}
    return names <= fits.keys() and all(
        saved.get(key) == here[key] for key in ("optimizer", "groups")
    )


def listed(lines: Iterable[str]) -> str:
    """One under the other."""
    return "\n".join(f"  {line}" for line in lines)


def is_model(name: str) -> bool:
    """Is this entry the model's, and so a tensor that must be there before it is loaded?"""
    return name.startswith("model")


def _is_alike(entry: Entry | None, tensor: Tensor) -> bool:
    """Was it saved with this dtype and shape?"""
    here = name_of_dtype(tensor.dtype), tuple(tensor.shape)
    return entry is not None and (entry.dtype, entry.shape) == here


def _told_by(extra: Any, saved: Any) -> list[str]:
    """The lines of an extra that can compare itself with what was saved of it."""
    compare = getattr(extra, "differences_from", None)
    return [] if compare is None else list(compare(saved))


def _extra_state(rests: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {
        f"{place_of('model', name)}{key}": "extra state"
        for name, rest in rests.items()
        for key in rest["model"]
    }


def _plans(plans: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{key} of step {name!r}" if name else key: value
        for name, plan in plans.items()
        for key, value in plan.items()
    }


def _compare(saved: Mapping[str, Any], here: Mapping[str, Any], told: str = "{name}") -> list[str]:
    return [
        f"{told.format(name=name)}: {saved.get(name, _NOTHING)} saved, {here.get(name, _NOTHING)} here"
        for name in {**saved, **here}
        if saved.get(name) != here.get(name)
    ]
