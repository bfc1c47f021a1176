"""ShardedLoader: this rank's part of every batch, epoch by epoch, from any source."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, Generic, Protocol, TypeAlias

from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import TypeVar

from accel_fn.core.given_batches import note_place
from accel_fn.core.state import DistState
from accel_fn.data.sampled_batches import sampled_with
from accel_fn.errors import ArgumentError, ArgumentTypeError, check_count, message

# The logger for messages about resuming.
_LOG = logging.getLogger("accel_fn.checkpoint")

_PLACE = ("epoch", "batch", "drawn_epoch", "draw")
_NEW_RUN = "begin a new run with a state at step 0, such as init returns"
_Value = TypeVar("_Value")
Batch = TypeVar("Batch", covariant=True, default=Any)
"""The type of a batch. Annotate it: torch's DataLoader knows only the type of a sample."""


Numbered: TypeAlias = tuple[list[Any] | None, Batch]
"""The indices of this rank's samples in a batch, and the batch. The list of indices is None if the
samples have no numbers."""


class Source(Protocol[Batch]):
    """A way to split a loader's batches over ranks, which all read the same epochs and batches."""

    def num_batches(self) -> int:
        """Return an epoch's number of batches, equal on all ranks; raise ArgumentTypeError if unknown."""

    def batches(
        self, epoch: int | None, first_batch: int, *, by_loop: bool = False
    ) -> Iterator[Batch]:
        """Return this rank's part of every batch of an epoch, from `first_batch` on.

        `epoch=None` reads epoch 0, but a map-style data set keeps its current epoch. With
        `by_loop`, data sets and samplers keep an epoch that the loop has set since the last pass.
        All ranks call it in the same order, in the thread of the loop. Another thread may read the
        iterator. If it is `SampledBatches`, the thread of the loop takes the samples from the
        sampler.
        """

    def numbered(self, epoch: int | None, first_batch: int) -> Iterator[Numbered[Batch]]:
        """Yield the same batches, each with the numbers of this rank's samples in it."""

    def facts(self) -> dict[str, Any]:
        """Return the known facts in which a resumed run must be equal; these exclude the number of ranks."""

    def position(self, step: int, window: int = 1) -> tuple[int, int]:
        """Return the epoch, and the window in it, after `step` windows of `window` batches.

        No window spans two epochs.
        """

    def indices(self, epoch: int, batch: int) -> Tensor:
        """Return this rank's samples in a batch, int64; raise ArgumentError if they have no numbers."""

    def global_indices(self, epoch: int, batch: int) -> Tensor:
        """Return all ranks' samples in a batch, int64, in rank order."""


class _Count:
    """A function that returns its argument and counts its calls."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, passing: _Value) -> _Value:
        self.number += 1
        return passing


@dataclass(slots=True)
class Progress:
    """The place of the loop in one pass: the number of batches that it has received.

    The loop reads the loader itself, or a view of it that `prefetch` or `group_batches` made.
    """

    epoch: int
    count: int
    num_each: int
    """The number of the loader's batches in one batch of the view."""
    num_batches: int | None

    def place(self) -> tuple[int, int]:
        """Return the pass and its next batch; after the last batch, the start of the next pass."""
        if self.count == self.num_batches:
            return self.epoch + 1, 0
        return self.epoch, self.count * self.num_each


@dataclass(slots=True)
class DrawnPass:
    """The random draw of rank 0 that determined the order of a loader's last pass."""

    epoch: int | None = None
    draw: int | Tensor | None = None
    """The seed of the pass, or the state of the sampler's generator before it."""
    is_loaded: bool = False
    """Whether `load_state_dict` has set `draw`, but the sampler's generator has not been set to it
    yet."""


class Position:
    """The place of the loop in a loader and all its views: the pass, and the batches received."""

    def __init__(self) -> None:
        self.drawn = DrawnPass()
        self._progress = Progress(0, 0, 1, None)
        self._is_next = True
        """Whether the next pass begins at this place; False once a pass has begun."""

    def place(self) -> tuple[int, int]:
        """Return the number of the pass, and the number of batches received in it."""
        return self._progress.place()

    def start(self) -> tuple[int, int]:
        """Return the place at which the next pass begins."""
        return self.place() if self._is_next else (self._progress.epoch + 1, 0)

    def move_to(self, epoch: int, batch: int = 0) -> None:
        """Set the batch at which the next pass begins."""
        self._progress, self._is_next = Progress(epoch, batch, 1, None), True

    def begin(self, epoch: int, count: int, num_each: int, num_batches: int | None) -> Progress:
        """Begin a pass, which ends the previous one."""
        self._progress = Progress(epoch, count, num_each, num_batches)
        self._is_next = False
        return self._progress


class Received(Iterator[Batch]):
    """Yields the batches of a pass, and counts the batches that the loop receives."""

    def __init__(self, batches: Iterator[Batch], progress: Progress) -> None:
        self._batches = batches
        self._progress = progress
        self._is_first = True

    def __next__(self) -> Batch:
        progress = self._progress
        try:
            batch = next(self._batches)
        except BaseException as error:
            # Drop the iterator, so that its workers end. Otherwise an error that the caller stores
            # would keep the iterator alive.
            self._batches = iter(())
            if isinstance(error, StopIteration):
                progress.num_batches = progress.count
            raise
        if self._is_first:
            note_place(batch, progress.place())
            self._is_first = False
        progress.count += 1
        return batch


@dataclass(frozen=True, slots=True)
class Epoch(Generic[Batch]):
    """One pass over this rank's batches, or the rest of one.

    Attributes:
        index: the number of the epoch, from 0.
        first_batch: the batch at which it starts; > 0 if a run resumes within the epoch.
        max_batches: the number of batches after which the run, and so the epoch, ends.
    """

    loader: ShardedLoader[Batch]
    index: int
    first_batch: int = 0
    max_batches: int | None = None
    _read: _Count = field(default_factory=_Count, repr=False, compare=False)
    """Counts the batches of a pass if `max_batches` is set."""

    def __len__(self) -> int:
        left = len(self.loader) - self.first_batch
        return left if self.max_batches is None else min(left, self.max_batches)

    def __iter__(self) -> Iterator[Batch]:
        batches = self.loader._source.batches(self.index, self.first_batch)
        return self._cut(self.loader._received(batches, self.index, self.first_batch))

    def enumerate(self) -> Iterator[tuple[int, Batch]]:
        """Yield each batch after its number in the whole epoch: from `first_batch` on, not from 0."""
        return enumerate(self, self.first_batch)

    def _numbered(self) -> Iterator[Numbered[Batch]]:
        return self._cut(self.loader._source.numbered(self.index, self.first_batch))

    def _cut(self, batches: Iterator[_Value]) -> Iterator[_Value]:
        if self.max_batches is None:
            return batches
        self._read.number = 0
        return map(self._read, islice(batches, self.max_batches))

    def _num_read(self) -> int:
        """Return the number of batches of the epoch; without a length, the number of batches read."""
        try:
            return len(self)
        except ArgumentTypeError:
            return self._read.number


class ShardedLoader(Generic[Batch]):
    """A rank's part of a `DataLoader`. Made by `shard_loader`.

    Each `iter(loader)` is the next pass, in another order if the loader shuffles, as in torch. A
    pass that the loop leaves early counts too. The loader and its views, by `prefetch` and
    `group_batches`, count together; `evaluate` and `predict` count nothing and read epoch 0.
    """

    def __init__(
        self,
        source: Source[Batch],
        loader: DataLoader[Any],
        position: Position | None = None,
        num_each: int = 1,
    ) -> None:
        self._source = source
        self._loader = loader
        self._position = position or Position()
        self._num_each = num_each
        """The number of the loader's batches in one batch of this view."""

    def view(self, source: Source[_Value], num_each: int = 1) -> ShardedLoader[_Value]:
        """Make a view of this loader over a source; each batch of the view holds `num_each` batches."""
        return ShardedLoader(source, self._loader, self._position, self._num_each * num_each)

    @property
    def loader(self) -> DataLoader[Any]:
        """Return the `DataLoader` that was split, with its data set and `collate_fn`."""
        return self._loader

    def __len__(self) -> int:
        """Return the number of batches of an epoch, the same on every rank."""
        return self._source.num_batches()

    def __iter__(self) -> Iterator[Batch]:
        """Begin the next pass, or continue in the middle of the one that `load_state_dict` has set.

        Calls `set_epoch` of data sets and samplers, unless the loop has called it since the last
        pass.
        """
        epoch, first = self._position.start()
        if first % self._num_each:
            rule = f"begin with a window of {self._num_each} batches"
            raise ArgumentError(
                message(
                    "iter",
                    "loader",
                    rule,
                    f"batch {first} of epoch {epoch}",
                    "use the saved run's k",
                )
            )
        first //= self._num_each
        return self._received(self._source.batches(epoch, first, by_loop=True), epoch, first)

    def _received(self, batches: Iterator[Batch], epoch: int, first_batch: int) -> Iterator[Batch]:
        num_batches = self._num_batches()
        progress = self._position.begin(epoch, first_batch, self._num_each, num_batches)
        return sampled_with(batches, Received(batches, progress))

    @property
    def epoch(self) -> int:
        """The number of the next pass. A loop that may resume: `for epoch in range(loader.epoch, 10)`."""
        return self._position.start()[0]

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass start at the beginning of `epoch`.

        Args:
            epoch: the number of the epoch, >= 0.

        Raises:
            ValueError: `epoch` is not an integer >= 0 (also a TypeError if it is not an integer).
        """
        self._position.move_to(check_count("set_epoch", "epoch", epoch, minimum=0))

    def epochs(
        self,
        num_epochs: int | None,
        *,
        max_steps: int | None = None,
        since: DistState | None = None,
    ) -> Epochs[Batch]:
        """Yield epoch after epoch up to `num_epochs` or `max_steps`, from the position of a state.

        Args:
            num_epochs: epochs of the whole run, >= 0. None, with `max_steps`: as many as they take.
            max_steps: batches of the whole run, >= 0, which may end within an epoch. Default: all.
            since: its `step` is the number of batches that were consumed; they are
                skipped by arithmetic, and no sample is read. (A sampler without
                a length runs up to this place, on rank 0.) Default: from the start.

        Returns:
            An iterator of epochs: each has an `index`, a `len`, and iterates over
            its remaining batches, read after `set_epoch(index)` of a map-style data set that has it.
            It is empty if the state is at the end, which rank 0 logs as a warning of
            `accel_fn.checkpoint`: a finished run was started again.

        Raises:
            ValueError: the state is beyond the end of the run; `num_epochs` or `max_steps` is
                negative; an epoch has no batch and `num_epochs` is None.
            TypeError: `since` is not a `DistState`; `num_epochs` is None without `max_steps`.

        >>> import torch, accel_fn as af
        >>> loader = af.shard_loader(torch.utils.data.DataLoader(range(6), batch_size=2), af.DistState())
        >>> [(epoch.index, len(epoch)) for epoch in loader.epochs(None, max_steps=5)]
        [(0, 3), (1, 2)]
        """
        if num_epochs is not None or max_steps is None:
            repair = "" if num_epochs is not None else "or give max_steps beside None"
            check_count("epochs", "num_epochs", num_epochs, minimum=0, repair=repair)  # type: ignore[arg-type]
        if max_steps is not None:
            check_count("epochs", "max_steps", max_steps, minimum=0)
        if not isinstance(since, DistState | None):
            repair = "the state that the last step returned"
            raise ArgumentTypeError(message("epochs", "since", "be a DistState", since, repair))
        if since is None:
            return Epochs(self, num_epochs, max_steps)
        if max_steps is not None and since.step > max_steps:
            rule, repair = f"be at most at step {max_steps}", f"raise max_steps, or {_NEW_RUN}"
            raise ArgumentError(message("epochs", "since", rule, f"step {since.step}", repair))
        start = self._source.position(since.step)
        if num_epochs is not None and start > (num_epochs, 0):
            rule = f"be at most at the end of {num_epochs} epochs"
            place = f"batch {start[1]} of epoch {start[0]}"
            repair = f"that is {place}; raise num_epochs, or {_NEW_RUN}"
            raise ArgumentError(message("epochs", "since", rule, f"step {since.step}", repair))
        has_finished = since.step == max_steps or start == (num_epochs, 0)
        if has_finished and since.step and since.is_main:
            ended = "" if num_epochs is None else f"{num_epochs} epochs, "
            _LOG.warning("the run has finished: %s%d steps; %s", ended, since.step, _NEW_RUN)
        self._position.move_to(start[0], start[1] * self._num_each)
        return Epochs(self, num_epochs, max_steps, since.step, start)

    def state_dict(self) -> dict[str, Any]:
        """Return the facts that a resumed run must share, and the position: "epoch" and "batch".

        With `order="torch"`, also "drawn_epoch" and "draw": the number of the last pass, and the
        number or tensor from which its order was drawn.
        """
        epoch, batch = self._position.place()
        found = {**self._facts(), "epoch": epoch, "batch": batch}
        drawn = self._position.drawn
        if drawn.draw is not None:
            found |= {"drawn_epoch": drawn.epoch, "draw": drawn.draw}
        return found

    def _facts(self) -> dict[str, Any]:
        return {"batches_per_epoch": self._num_batches(), **self._source.facts()}

    def _num_batches(self) -> int | None:
        """Return the number of batches of an epoch; None if it is unknown."""
        try:
            return len(self)
        except ArgumentTypeError:
            return None

    def differences_from(self, saved: Mapping[str, Any]) -> list[str]:
        """List differences from the saved loader, which would change a step's position or samples.

        Args:
            saved: the dict that `state_dict` returned.

        Returns:
            A line for each difference, with both values. `load` compares before it overwrites
            anything.
        """
        here = self._facts()
        return [
            f"{name}: {value} saved, {here.get(name)} here"
            for name, value in saved.items()
            if name not in _PLACE and value != here.get(name)
        ]

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue at the position of a saved run; raise if the data differ.

        The next `iter(loader)` continues in the middle of its pass. `epochs` uses the position of
        its state instead of this one.

        Args:
            saved: the dict that `state_dict` returned.

        Raises:
            ValueError: data, batch size, seed or order differ.
        """
        if found := self.differences_from(saved):
            repair = "give it the same data and batch size"
            rule = "be that of the run that was saved"
            raise ArgumentError(
                f"load_state_dict: loader must {rule}, got {'; '.join(found)}; {repair}"
            )
        epoch, batch, drawn_epoch, draw = (saved.get(name) for name in _PLACE)
        if epoch is not None and batch is not None:
            self._position.move_to(epoch, batch)
        drawn = self._position.drawn
        drawn.epoch, drawn.draw, drawn.is_loaded = drawn_epoch, draw, draw is not None

    def indices(self, epoch: int, batch: int) -> Tensor:
        """Return the samples of this rank in a batch: [num_samples of the part], int64."""
        _check_place("indices", epoch, batch)
        return self._source.indices(epoch, batch)

    def global_indices(self, epoch: int, batch: int) -> Tensor:
        """Return all ranks' samples in a batch, by rank: [num_samples of the batch], int64."""
        _check_place("global_indices", epoch, batch)
        return self._source.global_indices(epoch, batch)


def _check_place(function: str, epoch: int, batch: int) -> None:
    check_count(function, "epoch", epoch, minimum=0)
    check_count(function, "batch", batch, minimum=0)


class Epochs(Iterator[Epoch[Batch]]):
    """The epochs of a run that are left. Made by `ShardedLoader.epochs`."""

    def __init__(
        self,
        loader: ShardedLoader[Batch],
        num_epochs: int | None,
        max_steps: int | None,
        step: int = 0,
        start: tuple[int, int] = (0, 0),
    ) -> None:
        self.loader, self.num_epochs, self.max_steps = loader, num_epochs, max_steps
        # The position from which the run continues: the number of batches before it, and (epoch,
        # batch in the epoch).
        self.step, self.start = step, start
        self._left = self._epochs()

    def __next__(self) -> Epoch[Batch]:
        return next(self._left)

    def _epochs(self) -> Iterator[Epoch[Batch]]:
        num_epochs, max_steps, step = self.num_epochs, self.max_steps, self.step
        first_epoch, first_batch = self.start
        numbers = count(first_epoch) if num_epochs is None else range(first_epoch, num_epochs)
        for index in numbers:
            if max_steps is None:
                yield Epoch(self.loader, index, first_batch)
            elif step < max_steps:
                epoch = Epoch(self.loader, index, first_batch, max_steps - step)
                yield epoch
                step += epoch._num_read()
                if num_epochs is None and not epoch._num_read():
                    raise ArgumentError(
                        "epochs: loader must give a batch in every epoch where num_epochs is None, got none "
                        f"in epoch {index}"
                    )
            else:
                return
            first_batch = 0


def numbered_batches(loader: Iterable[Any]) -> Iterator[Numbered[Any]]:
    """Yield a loader's batches, each with the numbers of its samples; for other iterables, with None."""
    if isinstance(loader, Epoch):
        return loader._numbered()
    if isinstance(loader, ShardedLoader):
        return loader._source.numbered(None, 0)
    return unnumbered(iter(loader))


def unnumbered(batches: Iterator[Batch]) -> Iterator[Numbered[Batch]]:
    """Yield batches whose samples have no numbers."""
    return ((None, batch) for batch in batches)
