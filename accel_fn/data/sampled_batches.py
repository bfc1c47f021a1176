"""Batches of a sampler: the loop's thread runs the sampler, while another thread may read the data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

Batch = TypeVar("Batch", covariant=True)


@dataclass(frozen=True, slots=True)
class _Failed:
    """Stands for the samples of a batch at which the sampler raised an error."""

    error: Exception


class SampledParts(Iterator[Any]):
    """The samples of each batch of a pass, taken from the sampler ahead of time or when needed."""

    def __init__(
        self, parts: Iterator[Any], num_ahead: int, send: Callable[[Exception], None] | None
    ) -> None:
        """Workers take `num_ahead` more parts than they have read; `send` sends errors to peers."""
        self._parts = parts
        self._num_ahead = num_ahead
        self._send = send
        self._taken: deque[Any] = deque()
        self.by_loop = False
        """Whether the loop takes the samples, by `take_ahead`."""

    def take_ahead(self, num_batches: int) -> None:
        """Take the samples of more batches; the first call also takes those that workers read ahead."""
        self._take(num_batches if self.by_loop else num_batches + self._num_ahead)
        self.by_loop = True

    def send_error(self, error: BaseException) -> None:
        """Send an error of this rank to its peers, in the thread that runs the sampler."""
        if self._send is not None and isinstance(error, Exception):
            self._send(error)

    def _take(self, num_batches: int) -> None:
        try:
            self._taken.extend(islice(self._parts, num_batches))
        except Exception as error:
            # Raise the error only when the loop takes this batch: it still needs the earlier ones.
            self._taken.append(_Failed(error))

    def __next__(self) -> Any:
        if not self._taken:
            self._take(1)
        if not self._taken:
            raise StopIteration
        found = self._taken.popleft()
        if not isinstance(found, _Failed):
            return found
        try:
            raise found.error
        finally:
            # Delete the reference: otherwise this frame and the error's traceback would keep each
            # other alive.
            del found


class SampledBatches(Iterator[Batch]):
    """Batches that are read from the samples in `parts`; each batch uses `num_each` parts."""

    def __init__(self, batches: Iterator[Batch], parts: SampledParts, num_each: int = 1) -> None:
        self._batches = batches
        self.parts = parts
        self.num_each = num_each

    def __next__(self) -> Batch:
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except Exception as error:
            # Under `prefetch`, this is the reading thread, which must not send: the loop's thread
            # sends the error when it raises it.
            if not self.parts.by_loop:
                self.parts.send_error(error)
            raise


def sampled_with(source: Iterator[Any], found: Iterator[Batch], k: int = 1) -> Iterator[Batch]:
    """Wrap `found` for `prefetch` if `source` has a sampler; each item of `found` uses `k` batches."""
    if not isinstance(source, SampledBatches):
        return found
    return SampledBatches(found, source.parts, k * source.num_each)
