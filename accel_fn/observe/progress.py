"""progress: show tqdm's bar for the loop of a run, with values of the loop, and for long waits."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from operator import length_hint
from typing import Any, Generic, overload

from torch import Tensor
from typing_extensions import TypeVar

from accel_fn.core.delayed_read import DelayedRead
from accel_fn.core.report import Report
from accel_fn.core.state import DistState, check_state
from accel_fn.data.loader import Batch, Epoch, Epochs
from accel_fn.data.sampled_batches import sampled_with
from accel_fn.errors import ArgumentTypeError, message

T = TypeVar("T", covariant=True)
# Show a bar only for waits of at least this many seconds.
_DELAY_S = 1.0


@overload
def progress(loader: Epochs[Batch], state: DistState) -> Progress[ShownEpoch[Batch]]: ...
@overload
# mypy warns that these overloads overlap. The first match decides, and the narrower type stands
# first.
def progress(  # type: ignore[overload-overlap]
    loader: Epoch[Batch], state: DistState
) -> ShownEpoch[Batch]: ...
@overload
def progress(loader: Iterable[T], state: DistState) -> Progress[T]: ...
def progress(
    loader: Epochs[Batch] | Epoch[Batch] | Iterable[Any], state: DistState
) -> Progress[Any] | ShownEpoch[Batch]:
    """Show a bar of the loop on the main rank: batches, their rate, the time left, the epoch.

    The bar is tqdm's, on stderr or in a notebook; if stderr is not a terminal, as with a log file,
    there is no bar. The result has `show(report)`, which puts the loss next to the bar.

    Law: the identity on batches, their order, and the batches that are read ahead.
    Tests: `tests/observe/test_progress.py`.

    Args:
        loader: the epochs that `loader.epochs(...)` returned, for one bar over the whole run; one
            of these epochs; or a loader, or anything else that can be iterated.
        state: this rank's state.

    Returns:
        The same batches: an iterable of epochs with `show`, an epoch with `show`, or an iterable
        with `show`. The bar starts at the position of a resumed run, and ends with the loop, by its
        end, a `break` or an error.

    Raises:
        TypeError: `loader` cannot be iterated.

    Cost: under a microsecond a batch; each tenth of a second at most, a line is drawn and the shown
        values are read, on an accelerator by a copy for which the host does not wait until the next
        line. At the end of the loop it waits for the last.

    >>> import torch, accel_fn as af
    >>> state, step = af.build(af.Plan(loss_fn, model, optimizer), af.DistState())
    >>> data = torch.utils.data.TensorDataset(*batch)
    >>> loader = af.shard_loader(torch.utils.data.DataLoader(data, batch_size=4), state)
    >>> for epoch in af.progress(loader.epochs(2, since=state), state):
    ...     for batch in epoch:
    ...         state, report = step(state, batch)
    ...         epoch.show(report)
    """
    check_state("progress", state)
    if isinstance(loader, Epoch):
        return ShownEpoch.of(loader, LoopBar(state))
    if not isinstance(loader, Iterable):
        rule = "be a loader, its epochs, or anything else that can be iterated"
        raise ArgumentTypeError(message("progress", "loader", rule, type(loader).__name__))
    return Progress(loader, LoopBar(state))


class Shows:
    """A base class with a bar, next to which a loop can show values."""

    __slots__ = ()
    _bar: LoopBar

    def show(self, report: Report | None = None, **values: float | Tensor) -> None:
        """Put the loss of a report, and other values by name, next to the bar.

        Args:
            report: the report of a step.
            **values: numbers, or tensors of one element. Each stays until it is shown again.

        Raises:
            TypeError: `report` is not a `Report`, or a value is not a number.
        """
        shown = self._bar.values
        if report is not None:
            if not isinstance(report, Report):
                got, repair = type(report).__name__, "give other values by name"
                raise ArgumentTypeError(message("show", "report", "be a Report", got, repair))
            shown["loss"] = report.loss
        for name, value in values.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                shown[name] = value.detach()
            elif isinstance(value, numbers.Real):
                shown[name] = value
            else:
                rule, got = "be a number, or a tensor of one element", type(value).__name__
                raise ArgumentTypeError(message("show", name, rule, got))


class Progress(Shows, Generic[T]):
    """Batches, or the epochs of a run, with a bar while they are iterated. Made by `progress`."""

    def __init__(self, loader: Iterable[T], bar: LoopBar) -> None:
        self._loader = loader
        self._bar = bar

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        if isinstance(self._loader, Epochs):
            return self._epochs(self._loader)
        items = iter(self._loader)
        return sampled_with(items, self._bar.over(items, total=loader_length(self._loader)))

    def _epochs(self, epochs: Epochs[Any]) -> Iterator[Any]:
        epoch, batch = epochs.start
        place, ends = epochs.step, [epochs.max_steps]
        per_epoch = loader_length(epochs.loader)
        if per_epoch is not None:
            place = epoch * per_epoch + batch
            ends += [None if epochs.num_epochs is None else epochs.num_epochs * per_epoch]
        total = min((each for each in ends if each is not None), default=None)
        with self._bar.opened(desc=f"epoch {epoch}", initial=place, total=total):
            for each in epochs:
                yield ShownEpoch.of(each, self._bar)


@dataclass(frozen=True, slots=True)
class ShownEpoch(Epoch[Batch], Shows):
    """An epoch with a bar while it is iterated. Made by `progress`."""

    _bar: LoopBar = field(kw_only=True, repr=False, compare=False)

    @classmethod
    def of(cls, epoch: Epoch[Batch], bar: LoopBar) -> ShownEpoch[Batch]:
        return cls(**{each.name: getattr(epoch, each.name) for each in fields(Epoch)}, _bar=bar)

    def _cut(self, batches: Iterator[T]) -> Iterator[T]:
        # `dataclass(slots=True)` replaces the class, so `super()` would fail here.
        cut = Epoch._cut(self, batches)
        return sampled_with(cut, self._bar.over_epoch(cut, self))


class LoopBar:
    """The bar of a loop, in a terminal or a notebook, with the loop's values."""

    def __init__(self, state: DistState) -> None:
        self._is_main = state.is_main
        self._bar: Any = None
        self.values: dict[str, float | Tensor] = {}
        self._reads: dict[str, DelayedRead] = {}

    @contextmanager
    def opened(self, **options: Any) -> Iterator[None]:
        """Keep the bar open; its last line has the last values, unless the loop was left early."""
        bar = self._bar = open_bar(is_main=self._is_main, unit="batch", **options)
        try:
            yield
            if bar is not None:
                bar.set_postfix_str(self._read(is_last=True), refresh=False)
        finally:
            self._bar = None
            if bar is not None:
                bar.close()

    def over(self, items: Iterator[T], **options: Any) -> Iterator[T]:
        with self.opened(**options):
            yield from self._counted(items)

    def over_epoch(self, items: Iterator[T], epoch: Epoch[Any]) -> Iterator[T]:
        """Yield the batches of an epoch, in a bar of the epoch or in the bar of the whole run."""
        text, first = f"epoch {epoch.index}", epoch.first_batch
        if self._bar is None:
            left = loader_length(epoch)
            total = None if left is None else first + left
            yield from self.over(items, desc=text, initial=first, total=total)
            return
        self._bar.set_description_str(text, refresh=False)
        per_epoch = loader_length(epoch.loader)
        if per_epoch is not None:
            # Move the bar to this place: the loop may have left the previous epoch early.
            self._bar.update(epoch.index * per_epoch + first - self._bar.n)
        yield from self._counted(items)

    def _counted(self, items: Iterator[T]) -> Iterator[T]:
        """Yield the items; an item counts when the loop requests the next one."""
        bar = self._bar
        if bar is None:
            yield from items
            return
        number = 0
        try:
            for item in items:
                yield item
                # Delete the item: this frame would keep it while the next one is read.
                del item
                number += 1
                # With fewer items than `miniters`, tqdm would not redraw.
                if number >= bar.miniters:
                    is_drawn, number = bar.update(number), 0
                    if is_drawn:
                        bar.set_postfix_str(self._read())
        finally:
            bar.update(number)

    def _read(self, *, is_last: bool = False) -> str:
        """Format the values that the host knows; with `is_last`, wait for the newest values."""
        texts = []
        for name, value in self.values.items():
            known: Any = value
            if isinstance(value, Tensor):
                read = self._reads.setdefault(name, DelayedRead())
                known = read(value)
                newest = read.last() if is_last else None
                known = known if newest is None else newest
            if known is not None:
                texts.append(f"{name}={float(known):.4g}")
        return ", ".join(texts)


def open_bar(*, is_main: bool, wanted: bool | None = None, **options: Any) -> Any:
    """Open tqdm's bar on the main rank, by default in a terminal or notebook; or return None."""
    looked_at = sys.stderr.isatty() or "ipykernel" in sys.modules
    if not is_main or not (looked_at if wanted is None else wanted):
        return None
    from tqdm.auto import tqdm

    return tqdm(**options)


@contextmanager
def bytes_bar(text: str, total: int, *, is_main: bool = True) -> Iterator[Callable[[int], object]]:
    """After one second, show how many of `total` bytes are done; yield a function to count them."""
    options: dict[str, Any] = {"unit": "B", "unit_scale": True, "delay": _DELAY_S, "leave": False}
    bar = open_bar(is_main=is_main, desc=text, total=total, **options)
    if bar is None:
        yield lambda _: None
    else:
        with bar:
            yield bar.update


def loader_length(loader: Iterable[Any]) -> int | None:
    """Return a loader's length, or None; an error in its `__len__` must not end the loop."""
    try:
        return length_hint(loader) or None
    except Exception:
        return None
