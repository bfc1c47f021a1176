"""What tells a rank's own part of a data set from the whole, where that is known at little cost."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

_ENDS = 4096  # of a long list in a file, so many at each end are compared


def checksum_of(dataset: Any) -> int | None:
    """The same on all ranks that hold the same samples; None where nothing is known of a data set.

    Of a `Subset` all indices count, at any depth; of a map of Hugging Face's its indices and its
    first and last row. Data themselves are not read otherwise: ranks may well hold copies
    that differ, of random numbers say.
    """
    if isinstance(dataset, Subset):
        return _mixed(checksum_of_numbers(dataset.indices), checksum_of(dataset.dataset))
    if isinstance(dataset, ConcatDataset):
        return _mixed(*map(checksum_of, dataset.datasets))
    if type(dataset).__module__.startswith("datasets.") and hasattr(dataset, "_indices"):
        return _mixed(_ends(dataset.data, 1), _ends(dataset._indices, _ENDS))
    return None


def checksum_of_numbers(numbers: Any) -> int:
    """Of whole numbers, or of whatever else samples are named by."""
    try:
        found = np.asarray(numbers)
    except (TypeError, ValueError):  # names of several lengths, or numbers elsewhere
        found = np.empty(0)
    if found.dtype.kind in "iu":
        return zlib.crc32(found.astype(np.int64).tobytes())
    return zlib.crc32(repr(list(numbers)).encode())


def _ends(table: Any, count: int) -> int | None:
    """Of the first and the last rows of a table of Arrow's; its length is compared elsewhere."""
    if table is None or not len(table):
        return None
    count = min(count, len(table))
    parts = [table.slice(start, count).to_pydict() for start in (0, len(table) - count)]
    return zlib.crc32(repr(parts).encode())


def _mixed(*checksums: int | None) -> int | None:
    if all(each is None for each in checksums):
        return None
    return zlib.crc32(repr(checksums).encode())
