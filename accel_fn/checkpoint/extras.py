"""Extras of a checkpoint: objects with a `state_dict`, and dicts and generators, which have none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accel_fn.errors import ArgumentTypeError, message


def check_extras(extras: Mapping[str, Any], function: str) -> None:
    if not isinstance(extras, Mapping) or not all(isinstance(name, str) for name in extras):
        raise ArgumentTypeError(message(function, "extras", "be a dict, by names", extras))
    for name, extra in extras.items():
        if not _has_state(extra) and not isinstance(extra, dict | torch.Generator):
            rule = "have state_dict and load_state_dict, or be a dict or a torch.Generator"
            raise ArgumentTypeError(message(function, f"extras[{name!r}]", rule, extra))


def stateful(extras: Mapping[str, Any]) -> dict[str, Any]:
    """Give dicts and generators a `state_dict`."""
    found = {}
    for name, extra in extras.items():
        if not _has_state(extra):
            extra = _Generator(extra) if isinstance(extra, torch.Generator) else _Dict(extra)
        found[name] = extra
    return found


def _has_state(extra: object) -> bool:
    return hasattr(extra, "state_dict") and hasattr(extra, "load_state_dict")


class _Dict:
    def __init__(self, values: dict[Any, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[Any, Any]:
        return dict(self._values)

    def load_state_dict(self, saved: Mapping[Any, Any]) -> None:
        """Overwrite what was saved, tensors on their device, and keep other keys."""
        for key, value in saved.items():
            here: Any = self._values.get(key)
            is_moved = isinstance(value, Tensor) and isinstance(here, Tensor)
            self._values[key] = value.to(here.device) if is_moved else value


class _Generator:
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Tensor]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        self._generator.set_state(saved["state"])
