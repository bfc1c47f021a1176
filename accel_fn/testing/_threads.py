"""Worlds of threads: what the ranks of one find each other through.

Rests on private names of torch; tests/unit/test_torch_internals.py says so
loudly when one of them changes.
"""

from __future__ import annotations

from torch._C._distributed_c10d import HashStore, Store

from accel_fn._meshes import make_group

__all__ = ["make_group", "make_store"]


def make_store() -> Store:
    """What the ranks of one world find each other through."""
    return HashStore()
