"""Worlds of threads: one real Gloo group per rank, all in this process.

Rests on private names of torch; tests/unit/test_torch_internals.py says so
loudly when one of them changes.
"""

from __future__ import annotations

import ctypes
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def make_group(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> ProcessGroup:
    """This rank's end of a group; returns once all ranks have called it."""
    gloo = dist.ProcessGroupGloo(
        dist.PrefixStore("gloo", store), rank, world_size, timedelta(seconds=timeout_s)
    )
    group = ProcessGroup(dist.PrefixStore("group", store), rank, world_size)
    kind = ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, gloo)
    # Destroying such a group can deadlock on the GIL: one reference too many keeps it to the end.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    return group
