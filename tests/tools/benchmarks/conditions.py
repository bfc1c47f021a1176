"""Sets the same conditions for everything that is timed in a process."""

from __future__ import annotations

import ctypes
import logging
import sys
import warnings

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # constants from glibc's malloc.h


def settle() -> None:
    """Use one thread and a heap that keeps freed memory, and silence the libraries."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    keep_heap()


def keep_heap() -> None:
    """Let glibc keep freed memory.

    Whether it gives memory back within a step, and faults it in again in the
    next, depends on what else happens to live in the process: the same loop
    differs by up to a third.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**25)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
