"""Passes over a stream through torch's DataLoader: which workers read, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from accel_fn.data.order import mix
from accel_fn.data.streams.read_stream import WorkerInit, WorkerStream
from accel_fn.data.workers import IdlePools, Progress, WorkerPool, make_loader, worker_error

# Simulated ranks are threads: a worker that one of them forks while another forks its own would
# hold the pipe by which that other is known to have ended, and locks that were held meanwhile.
_STARTING = threading.Lock()
_KEPT = (
    "num_workers",
    "pin_memory",
    "pin_memory_device",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


def options_of(loader: DataLoader[Any], init: Callable[[Any], WorkerInit]) -> dict[str, Any]:
    """Select the options of a user's DataLoader that a loader over our stream takes over."""
    kept = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    if kept["worker_init_fn"] is not None:
        kept["worker_init_fn"] = init(kept["worker_init_fn"])
    return kept


class _StreamPool(WorkerPool):
    """Workers over one of our streams, from a place that each pass sets."""

    def __init__(
        self, stream_of: Callable[[Tensor], WorkerStream], options: dict[str, Any]
    ) -> None:
        self.place = torch.zeros(2, dtype=torch.int64)
        if options["persistent_workers"]:
            self.place.share_memory_()  # type: ignore[no-untyped-call]
        stream = stream_of(self.place)
        if options["num_workers"]:
            stream.progress = Progress(options["num_workers"])
        super().__init__(make_loader(stream, **options), stream.where)


class Passes:
    """Passes over one of our streams, each from a place: [epoch, first batch], int64.

    Every pass has workers of its own. Persistent workers serve one pass after the other, and get
    the place through shared memory. Where the user gave no generator, workers are seeded by seed
    and epoch: torch would draw from the global one at every pass.
    """

    def __init__(
        self, stream_of: Callable[[Tensor], WorkerStream], options: dict[str, Any], seed: int
    ) -> None:
        self._seed = seed
        self._own = torch.Generator()
        options = {**options, "generator": options.get("generator") or self._own}
        make = partial(_StreamPool, stream_of, options)
        self.pools = IdlePools(make, options["persistent_workers"])

    def start(self, epoch: int, first_batch: int) -> Iterator[Any]:
        """Yield what the stream gives from there on. Workers start here, not at the first item."""
        self._own.manual_seed(mix(mix(self._seed) + epoch))
        with _STARTING:
            pool = self.pools.take()
            pool.place[0], pool.place[1] = epoch, first_batch
            pool.start()
        return self._items(pool)

    def _items(self, pool: _StreamPool) -> Iterator[Any]:
        failed = False
        try:
            yield from pool.items()
        except Exception as error:
            failed = True
            if lost := pool.lost(after=error):
                raise worker_error(lost) from error
            raise
        finally:
            self.pools.give_back(pool, failed=failed)
