"""What the library's own tests look at or break beyond the public names, on one page.

Nothing here is for users: names and meaning change with the code. When a file of the library
moves, this page is what follows it, and no test does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from accel_fn.base.warn import warn_user
from accel_fn.comm.primitives import num_calls
from accel_fn.step import step as step_file
from accel_fn.step import update
from accel_fn.step.step import Step
from accel_fn.step.torch_internals import run_optimizer
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
    "run_optimizer",
    "warn_user",
    "with_run_optimizer",
]

# ---- step

kept_gradients = step_file._cloned


def ddp_of(step: Step) -> Any:
    """Return torch's DistributedDataParallel of a step."""
    return step.strategy.ddp  # type: ignore[attr-defined]


def with_run_optimizer(run: Callable[[Any], None]) -> AbstractContextManager[Any]:
    """Let updates call this function in place of `run_optimizer`."""
    return patch.object(update, "run_optimizer", run)


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
