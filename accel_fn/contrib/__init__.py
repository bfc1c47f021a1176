"""Plug-ins that stand on public names alone."""

from accel_fn.names import lazy_names

MODULES = ("estimate",)
__getattr__, __dir__, __all__ = lazy_names(__name__, {}, modules=MODULES)
