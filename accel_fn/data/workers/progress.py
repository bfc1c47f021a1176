"""What each worker of a loader is reading: written there, and read here once one has died."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info


class Progress:
    """For every worker two whole numbers, in memory that is shared with it."""

    def __init__(self, num_workers: int) -> None:
        self._rows = torch.full((num_workers, 2), -1)
        self._rows.share_memory_()  # type: ignore[no-untyped-call]

    def begin(self, number: int) -> None:
        """This process, which is a worker, reads batch `number` from here on."""
        self._row()[:] = number, -1

    def at(self, place: int) -> None:
        """It reads the sample at that place of the batch."""
        self._row()[1] = place

    def end(self) -> None:
        """It has read the batch."""
        self._row()[0] = -1

    def _row(self) -> npt.NDArray[np.int64]:
        info = get_worker_info()
        assert info is not None
        row: npt.NDArray[np.int64] = self._rows.numpy()[
            info.id
        ]  # set in a tenth of a tensor's time
        return row

    def of(self, worker: int) -> tuple[int, int] | None:
        """Number and place that a worker is at, the place -1 where it says none; None between batches."""
        number, place = self._rows[worker].tolist()
        return None if number < 0 else (number, place)
