"""Passes over a stream through torch's DataLoader: whose workers, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from accel_fn.data.order import mix
from accel_fn.data.streams.read_stream import WorkerInit
from accel_fn.data.workers.lost_workers import (
    lost_workers,
    make_loader,
    start_workers,
    worker_error,
)
from accel_fn.data.workers.progress import Progress
from accel_fn.errors import ArgumentError

# Simulated ranks are threads: a worker that one of them forks while another forks its own would
# hold the pipe by which that other is known to have ended.
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
    """What a DataLoader was given and a loader over one of our streams is given too."""
    kept = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    if kept["worker_init_fn"] is not None:
        kept["worker_init_fn"] = init(kept["worker_init_fn"])
    return kept


class Passes:
    """Passes over one of our streams, each from a place: [epoch, first batch], int64.

    Every pass has a loader and workers of its own, so that passes do not
    meet. Persistent workers are shared by all, and the place reaches them
    through shared memory; they serve one pass at a time. Where the user gave no generator,
    workers are seeded by seed and epoch: torch would draw from the global one, at every pass.
    """

    def __init__(
        self, stream_of: Callable[[Tensor], Any], options: dict[str, Any], seed: int
    ) -> None:
        self._running: Any = None
        self._stream_of = stream_of
        self._seed = seed
        self._own = torch.Generator()
        self._options = {**options, "generator": options.get("generator") or self._own}
        self._shares = bool(options.get("persistent_workers"))
        self._place = torch.zeros(2, dtype=torch.int64)
        self._shared: DataLoader[Any] | None = None
        self._newest = 0
        if self._shares:
            self._place.share_memory_()  # type: ignore[no-untyped-call]

    def start(self, epoch: int, first_batch: int) -> Iterator[Any]:
        """What the stream gives from there on. Workers start here, not at the first item."""
        self._newest += 1
        self._own.manual_seed(mix(mix(self._seed) + epoch))
        with _STARTING:
            if not self._shares:
                loader = self._loader(torch.tensor([epoch, first_batch]))
                return self._items(start_workers(loader), loader.dataset, epoch, self._newest)
            if self._running is not None and lost_workers(self._running):  # while they were idle
                self._running._shutdown_workers()
                self._shared = None
            self._place[0], self._place[1] = epoch, first_batch
            if self._shared is None:
                self._shared = self._loader(self._place)
            self._running = start_workers(self._shared)
            return self._items(self._running, self._shared.dataset, epoch, self._newest)

    def _loader(self, place: Tensor) -> DataLoader[Any]:
        stream = self._stream_of(place)
        if self._options["num_workers"]:
            stream.progress = Progress(self._options["num_workers"])
        return make_loader(stream, **self._options)

    def _items(self, running: Any, stream: Any, epoch: int, number: int) -> Iterator[Any]:
        """Item by item. Workers are not left to Python to end: an error that somebody keeps keeps them."""
        failed = False
        try:
            while not self._shares or number == self._newest:
                try:
                    item = next(running)
                except StopIteration:
                    return
                yield item
        except Exception as error:
            failed, self._shared = True, None  # persistent workers too: the next pass starts others
            if lost := lost_workers(running, partial(stream.where, epoch=epoch), after=error):
                raise worker_error(lost) from error
            raise
        finally:
            if (failed or not self._shares) and hasattr(running, "_workers"):
                running._shutdown_workers()
        raise ArgumentError(
            "shard_loader: persistent_workers=True must serve one pass at a time, got a second one "
            "before the first had ended; use persistent_workers=False"
        )
