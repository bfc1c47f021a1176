"""Plug-ins: each uses only names that any package may use, and could be a separate package."""

from accel_fn.names import lazy_names

MODULES = ("accelerate", "deepspeed", "estimate", "migrate", "runs", "transformers")
__getattr__, __dir__, __all__ = lazy_names(__name__, {}, modules=MODULES)
