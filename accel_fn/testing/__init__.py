"""Tools for tests: simulated ranks, equivalence of plans, recorded updates, hypothesis strategies."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_fn.testing import strategies
    from accel_fn.testing.equivalence import assert_equivalent as assert_equivalent
    from accel_fn.testing.simulation import simulate as simulate
    from accel_fn.testing.updates import recorded_updates as recorded_updates

_HOMES = {
    "assert_equivalent": ("equivalence", "assert_equivalent"),
    "recorded_updates": ("updates", "recorded_updates"),
    "simulate": ("simulation", "simulate"),
    "strategies": ("strategies", None),
}
__all__ = ["assert_equivalent", "recorded_updates", "simulate", "strategies"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name, attribute = _HOMES[name]
    module = importlib.import_module(f"{__name__}.{module_name}")
    return module if attribute is None else getattr(module, attribute)
