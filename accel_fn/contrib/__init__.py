"""Plug-ins, which nothing but the command line imports."""

from accel_fn.names import lazy_names

MODULES = ("estimate", "transformers")
__getattr__, __dir__, __all__ = lazy_names(__name__, {}, modules=MODULES)
