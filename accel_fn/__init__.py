"""Training steps out of small pure transforms: one script on a CPU, on many GPUs, on many machines.

Names load on first use, so `import accel_fn` does not import torch.
"""

from __future__ import annotations

import importlib
import re

__version__ = "0.1.0"

# The loader's, not `open`: a package may lie in a zip file.
_STUB = __spec__.loader.get_data(f"{__file__}i").decode()
_HOMES = {
    name: module
    for module, name in re.findall(
        r"^from (accel_fn\.\S+) import \(?\s*(\w+) as", _STUB, re.MULTILINE
    )
}
_PUBLIC_MODULES = ("errors", "testing")
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name in _PUBLIC_MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_PUBLIC_MODULES, "__version__"})
