"""Worlds of threads: one real Gloo group per rank, all in this process.

Rests on private names of torch; tests/unit/test_torch_internals.py says so
loudly when one of them changes.
"""

from __future__ import annotations

import ctypes
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import ProcessGroup


def make_store() -> Store:
    """What the ranks of one world find each other through."""
    return HashStore()


def make_group(store: Store, rank: int, world_size: int, timeout_s: float) -> ProcessGroup:
    """This rank's end of a group; returns once all ranks have called it."""
    gloo = dist.ProcessGroupGloo(
        PrefixStore("gloo", store), rank, world_size, timedelta(seconds=timeout_s)
    )
    group = ProcessGroup(PrefixStore("group", store), rank, world_size)
    kind = ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, gloo)
    # Destroying such a group can deadlock on the GIL: one reference too many keeps it to the end.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    return group
