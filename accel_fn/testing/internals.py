"""What the library's own tests look at or break beyond the public names, on one page.

Nothing here is for users: names and meaning change with the code. When a file of the library
moves, this page is what follows it, and no test does.
"""

from __future__ import annotations

from typing import Any

from accel_fn.base.warn import warn_user
from accel_fn.comm.primitives import num_calls
from accel_fn.step import step as step_file
from accel_fn.step.step import Step
from accel_fn.step.update import apply_update, follow_parameters
from accel_fn.transforms.compile.optimizer_in_graph import keeps_tensors
from accel_fn.transforms.deepspeed.deepspeed import check_lock
from accel_fn.transforms.schedule.advance import BatchSchedule, DeviceSchedule
from accel_fn.transforms.tp.draws import draw_by_shard, may_draw

__all__ = [
    "apply_update",
    "check_deepspeed_lock",
    "check_fits_in_graph",
    "ddp_of",
    "draw_by_shard",
    "follow_parameters",
    "kept_gradients",
    "may_draw",
    "num_collectives",
    "place_of_rate",
    "warn_user",
]

# ---- step

kept_gradients = step_file._cloned


def ddp_of(step: Step) -> Any:
    """Return torch's DistributedDataParallel of a step."""
    return step.strategy.ddp  # type: ignore[attr-defined]


# ---- ranks

num_collectives = num_calls

# ---- data

# ---- transforms

check_deepspeed_lock = check_lock
check_fits_in_graph = keeps_tensors


def place_of_rate(transform: Any) -> str:
    """Return where a schedule that was begun computes rates, or that it counts batches."""
    kinds = {DeviceSchedule: "device", BatchSchedule: "batches"}
    return kinds.get(type(transform), "host")


# ---- checkpoint

# ---- observe
