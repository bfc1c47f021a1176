"""Check whether the rows of a batch are its samples, since the default weight counts rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from accel_fn.checks.comparison import is_cut
from accel_fn.core.batch import count_samples, shapes_of
from accel_fn.core.given_batches import samples_of
from accel_fn.core.microbatches import splits_of
from accel_fn.core.plan import Plan
from accel_fn.core.state import DistState
from accel_fn.errors import BatchError

_REPAIR = "put the samples first in each tensor, or give Plan a weight_fn, such as count_labels"


class RowsFound(NamedTuple):
    """A warning about a batch whose rows are not its samples; empty if they may be samples."""

    text: str
    is_sure: bool = False
    """False if the batch has one row: this rank may have left out the other samples."""


def check_rows(state: DistState, plan: Plan, batch: Any) -> RowsFound | None:
    """Check whether the rows of a batch are its samples; refuse to cut rows that are not.

    Return None if the number of samples is unknown or less than two, if the plan has a `weight_fn`,
    or if no batch is cut. Several rows per sample are allowed, such as two views of each sample.
    Fewer rows than samples are allowed too, if some samples were left out.
    """
    count = samples_of(batch)
    if count is None or count < 2 or plan.weight_fn is not count_samples or not is_cut(state, plan):
        return None
    shapes = shapes_of(batch)
    rows = {shape[0] for shape in shapes}
    if len(rows) != 1 or not all(len(shape) > 1 for shape in shapes):
        return RowsFound("")
    (num_rows,) = rows
    is_second = num_rows % count != 0 and all(shape[1] == count for shape in shapes)
    if num_rows != 1 and not is_second:
        return RowsFound("")
    got = f"{num_rows} for {count} samples in tensors of shapes {shapes[:3]}"
    if num_rows != 1 and splits_of(plan):
        raise BatchError(
            f"step: batch must be cut between samples, got rows that are none, {got}; {_REPAIR}"
        )
    text = f"step: weight_fn should count samples, or what the loss is a mean over, got {got}; {_REPAIR}"
    return RowsFound(text, is_sure=num_rows != 1)


class RowsJudge:
    """Combines the findings of all ranks, over the batches that are checked."""

    def __init__(self) -> None:
        self._has_several = False
        """Whether a batch on any rank had several rows. Then one row means that samples were
        left out."""

    def judge(self, every: Sequence[RowsFound | None]) -> str:
        """Return the warning; for one row, only if all ranks with known samples have one row."""
        found = [each for each in every if each is not None]
        sure = [each.text for each in found if each.is_sure]
        if sure:
            return sure[0]
        self._has_several |= not all(each.text for each in found)
        return found[0].text if found and not self._has_several else ""
