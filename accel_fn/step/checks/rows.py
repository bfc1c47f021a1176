"""A look at whether the rows of a batch are its samples, where the default weight counts rows."""

from __future__ import annotations

from typing import Any

from accel_fn.base.batch import num_samples, shapes_of
from accel_fn.base.given_batches import samples_of
from accel_fn.base.state import DistState
from accel_fn.errors import BatchError
from accel_fn.step.checks.comparison import is_cut
from accel_fn.step.microbatches import splits_of
from accel_fn.step.plan import Plan

_REPAIR = "put the samples first in each tensor, or give Plan a weight_fn, such as num_labels"


def check_rows(state: DistState, plan: Plan, batch: Any) -> str | None:
    """Return a warning of a batch whose rows are not its samples, empty if there is none; refuse its cut.

    None if it is not known of how many samples, two or more, it was made.

    The loader knows of how many samples it made the batch. Several rows a sample are right, such as two
    views of each, and so are fewer rows, where some were left out.
    """
    count = samples_of(batch)
    if count is None or count < 2 or plan.weight_fn is not num_samples or not is_cut(state, plan):
        return None
    shapes = shapes_of(batch)
    rows = {shape[0] for shape in shapes}
    if len(rows) != 1 or not all(len(shape) > 1 for shape in shapes):
        return ""
    (num_rows,) = rows
    is_second = num_rows % count != 0 and all(shape[1] == count for shape in shapes)
    if num_rows != 1 and not is_second:
        return ""
    got = f"{num_rows} for {count} samples in tensors of shapes {shapes[:3]}"
    if num_rows != 1 and splits_of(plan):
        raise BatchError(
            f"step: batch must be cut between samples, got rows that are none, {got}; {_REPAIR}"
        )
    return f"step: weight_fn should count samples, or what the loss is a mean over, got {got}; {_REPAIR}"
