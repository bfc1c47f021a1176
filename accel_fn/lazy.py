"""Names of a package that load on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence

from accel_fn.renamed import NAMES


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]], modules: Sequence[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Make `__getattr__`, `__dir__` and `__all__` of a package, whose modules have these names.

    An old name is refused with the new one.
    """
    home_of = {name: module for module, names in homes.items() for name in names}
    own = vars(sys.modules[package])

    def load(name: str) -> object:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name not in home_of:
            new = f"; it is {NAMES[name]} now" if name in NAMES and package == "accel_fn" else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{new}")
        value = getattr(importlib.import_module(f"accel_fn.{home_of[name]}"), name)
        own[name] = value
        return value

    def names() -> list[str]:
        return sorted({*home_of, *modules, *own})

    return load, names, sorted(home_of)
