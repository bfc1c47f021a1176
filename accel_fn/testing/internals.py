"""What the library's own tests look at or break beyond the public names, on one page.

Nothing here is for users: names and meaning change with the code. When a file of the library
moves, this page is what follows it, and no test does.
"""

from __future__ import annotations

from typing import Any

from accel_fn.base.state import DistState
from accel_fn.base.warn import warn_user
from accel_fn.comm.primitives import gather_shards
from accel_fn.comm.primitives import num_calls as num_collectives
from accel_fn.step.step import Step
from accel_fn.step.step import _cloned as kept_gradients
from accel_fn.step.update import apply_update, follow_parameters
from accel_fn.transforms.compile.optimizer_in_graph import keeps_tensors as check_fits_in_graph
from accel_fn.transforms.deepspeed.deepspeed import check_lock as check_deepspeed_lock
from accel_fn.transforms.schedule.advance import BatchSchedule, DeviceSchedule
from accel_fn.transforms.tp.draws import draw_by_shard, may_draw

# ---- step


def ddp_of(step: Step) -> Any:
    """Return torch's DistributedDataParallel of a step."""
    return step.strategy.ddp


def verdict_of(step: Step) -> str:
    """Return what the comparison of a step's loss has found."""
    return step.checks.comparison.verdict


# ---- ranks

# ---- data

# ---- transforms


def place_of_rate(transform: Any) -> str:
    """Return where a schedule that was begun computes rates, or that it counts batches."""
    kinds = {DeviceSchedule: "device", BatchSchedule: "batches"}
    return kinds.get(type(transform), "host")


# ---- checkpoint

# ---- observe
