"""Plug-ins: each takes public names alone, and could be a package of its own."""

from accel_fn.names import lazy_names

MODULES = ("accelerate", "deepspeed", "estimate", "migrate", "runs", "transformers")
__getattr__, __dir__, __all__ = lazy_names(__name__, {}, modules=MODULES)
