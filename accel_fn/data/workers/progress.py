"""The batch and sample that each worker of a loader reads, in memory shared with the workers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import get_worker_info


class Progress:
    """Holds for each worker the numbers of a batch and of a sample in it, -1 for none."""

    def __init__(self, num_workers: int) -> None:
        self._rows = torch.full((num_workers, 2), -1)
        self._rows.share_memory_()  # type: ignore[no-untyped-call]

    def begin(self, number: int) -> None:
        """This worker starts to read batch `number`."""
        self._row()[:] = number, -1

    def at(self, place: int) -> None:
        """It reads the sample at that place of the batch."""
        self._row()[1] = place

    def end(self) -> None:
        """It has read the batch."""
        self._row()[0] = -1

    def _row(self) -> Any:
        info = get_worker_info()
        assert info is not None
        return self._rows.numpy()[info.id]  # set in a tenth of a tensor's time

    def of(self, worker: int) -> tuple[int, int] | None:
        """Return the batch and the place in it that a worker reads; None between batches."""
        number, place = self._rows[worker].tolist()
        return None if number < 0 else (number, place)
