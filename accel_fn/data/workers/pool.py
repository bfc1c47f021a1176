"""Pools of DataLoader workers: one for each pass; persistent ones are kept for later passes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader

from accel_fn.data.workers.lost_workers import lost_workers, start_workers


class WorkerPool:
    """The workers of one DataLoader, for one pass at a time; `where` is the batch that one is reading."""

    def __init__(self, loader: DataLoader[Any], where: Callable[[int], str]) -> None:
        self.loader = loader
        self._where = where
        self._running: Any = None

    def start(self) -> None:
        """Begin a pass. Ends what was begun before."""
        self._running = start_workers(self.loader)

    def items(self) -> Iterator[Any]:
        """Yield what the loader gives in this pass."""
        while True:
            try:
                item = next(self._running)
            except StopIteration as end:
                if end.args:  # a worker's error, which torch raises again; not the end
                    raise RuntimeError(*end.args) from end
                return
            except Exception as error:
                if hasattr(self._running, "_workers"):  # torch's frames hold the error, it holds
                    traceback.clear_frames(error.__traceback__)  # them, and they hold the workers
                raise
            yield item

    def drop_rest(self) -> None:
        """Drop what is left to read; the workers stay for the next pass."""

    def close(self) -> None:
        """End the workers. Python might not: an error that is kept would keep them."""
        self.drop_rest()
        if hasattr(self._running, "_workers"):
            self._running._shutdown_workers()
        self._running = None

    def lost(self, *, after: Exception | None = None) -> str:
        """List the workers that have died, as `lost_workers` does."""
        return lost_workers(self._running, self._where, after=after)


Pool = TypeVar("Pool", bound=WorkerPool)


class IdlePools(Generic[Pool]):
    """The pools of persistent workers that no pass uses: passes at the same time have one each."""

    def __init__(self, make: Callable[[], Pool], is_persistent: bool) -> None:
        self._make = make
        self._is_persistent = is_persistent
        self._idle: list[Pool] = []

    def take(self) -> Pool:
        """Return one whose workers live, or a new one."""
        while self._idle:
            pool = self._idle.pop()
            if not pool.lost():
                return pool
            pool.close()
        return self._make()

    def give_back(self, pool: Pool, *, failed: bool) -> None:
        """After a pass: keep it for the next one, or end its workers."""
        if self._is_persistent and not failed and not pool.lost():
            pool.drop_rest()
            self._idle.append(pool)
        else:
            pool.close()
