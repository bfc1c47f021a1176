"""Batches of a sampler: the thread of the loop draws their samples, another one may read their data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from accel_fn.data.loader import Batch


@dataclass(frozen=True, slots=True)
class _Failed:
    """Stands for the samples of a batch that could not be drawn."""

    error: Exception


class Draws(Iterator[Any]):
    """The samples of each batch of a pass, drawn ahead by `draw`, or else as they are taken."""

    def __init__(
        self, samples: Iterator[Any], num_ahead: int, send: Callable[[Exception], None] | None
    ) -> None:
        """Workers take `num_ahead` more than they have read; `send` sends an error to the peers."""
        self._samples = samples
        self._num_ahead = num_ahead
        self._send = send
        self._drawn: deque[Any] = deque()
        self.by_loop = False

    def draw(self, num_batches: int) -> None:
        """Draw the samples of so many batches more; at first also of those that workers take."""
        self._draw(num_batches if self.by_loop else num_batches + self._num_ahead)
        self.by_loop = True

    def send(self, error: BaseException) -> None:
        """Send an error of this rank to its peers, in the thread that draws."""
        if self._send is not None and isinstance(error, Exception):
            self._send(error)

    def _draw(self, num_batches: int) -> None:
        try:
            self._drawn.extend(islice(self._samples, num_batches))
        except Exception as error:
            self._drawn.append(_Failed(error))

    def __next__(self) -> Any:
        if not self._drawn:
            self._draw(1)
        if not self._drawn:
            raise StopIteration
        found = self._drawn.popleft()
        if not isinstance(found, _Failed):
            return found
        try:
            raise found.error
        finally:
            del found  # the frame would keep the error, which keeps the frame


class Drawn(Iterator[Batch]):
    """Batches that are read by `draws`, so many for each."""

    def __init__(self, batches: Iterator[Batch], draws: Draws, num_each: int = 1) -> None:
        self._batches = batches
        self.draws = draws
        self.num_each = num_each

    def __next__(self) -> Batch:
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except Exception as error:
            if not self.draws.by_loop:
                self.draws.send(error)
            raise
