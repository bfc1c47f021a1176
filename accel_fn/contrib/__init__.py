"""Plug-ins that stand on public names alone."""

from accel_fn import lazy

MODULES = ("estimate",)
__getattr__, __dir__, __all__ = lazy.lazy_names(__name__, {}, modules=MODULES)
