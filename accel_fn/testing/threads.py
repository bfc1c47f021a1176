"""Groups of simulated ranks.

Uses private names of torch; tests/step/test_torch_internals.py fails when one of them changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch._C._distributed_c10d import HashStore, Store
from torch.distributed import ProcessGroup

from accel_fn.comm.mesh import make_group

__all__ = ["called_alike", "make_group", "make_store"]


def make_store() -> Store:
    """Make the store of one world's rendezvous."""
    return HashStore()


def called_alike(world: Sequence[ProcessGroup | None]) -> bool:
    """Have all ranks called equally many collectives?"""
    groups = [group for group in world if group is not None]
    counts = {group._get_sequence_number_for_group() for group in groups}  # type: ignore[attr-defined]
    return len(counts) <= 1
