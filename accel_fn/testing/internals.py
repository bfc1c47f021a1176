"""What the library's own tests look at or break beyond the public names, on one page.

Nothing here is for users: names and meaning change with the code. When a file of the library
moves, this page is what follows it, and no test does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accel_fn.comm.messages import Channel as Channel
from accel_fn.data import prefetch, workers
from accel_fn.data.loader import ShardedLoader
from accel_fn.data.set_epoch import InEpoch as InEpoch

# ---- step

# ---- ranks

# ---- data


def prefetch_threads() -> list[threading.Thread]:
    """List the living threads that read for `prefetch`."""
    return [each for each in threading.enumerate() if isinstance(each, prefetch.Reader)]


@contextmanager
def reports_of_waits_after(seconds: float) -> Iterator[None]:
    """Let loaders warn of a batch that lasts as long as this."""
    before = workers._REPORT_AFTER_S, prefetch._REPORT_AFTER_S
    workers._REPORT_AFTER_S = prefetch._REPORT_AFTER_S = seconds
    try:
        yield
    finally:
        workers._REPORT_AFTER_S, prefetch._REPORT_AFTER_S = before


def overlook_stopped_workers() -> None:
    """Let this process take stopped workers for running ones, for good."""
    workers._is_stopped = lambda _: False


def counted_batches(loader: ShardedLoader[Any]) -> Iterator[tuple[Any, int | None]]:
    """Yield the batches of epoch 0, and of how many samples each was made."""
    source = loader._source
    for number, batch in enumerate(source.batches(0, 0)):
        yield batch, source.num_samples(0, number)


# ---- transforms

# ---- checkpoint

# ---- observe
