"""Run a script in a separate process, and record the losses and rows of each of its updates."""

from __future__ import annotations

import hashlib
import importlib
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from accel_fn import count_samples
from accel_fn.testing import recorded_updates

_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Part:
    """One backward of an update."""

    value: float
    """The loss that enters the backward, divided as the script and accelerate divide it."""
    rows: int
    num_labels: tuple[int, ...] = ()
    """Two numbers of labels other than -100: in all positions, and in all but the first of each
    row. () if the batch has no labels."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """The shape of a row in each tensor of the batch."""


@dataclass(frozen=True)
class Seen:
    """One update of a script."""

    loss: float
    rows: int
    is_double: bool
    """Whether the loss is float64."""
    position: str
    """A checksum of the host's random generator after the update."""
    draws: bool = False
    """Whether the step itself drew from torch's global generators, as dropout does; False for OLD."""
    parts: tuple[Part, ...] = ()
    is_cleared: bool = False
    """Whether the script has cleared gradients of the update between a backward and the step."""


@dataclass
class Recording:
    """The updates of a script, and whether it calls `af.draw`."""

    updates: list[Seen] = field(default_factory=list)
    uses_draw: bool = False
    divisor: int = 1
    """The number of batches by which accelerate divides each loss."""


class _Enough(BaseException):
    """Ends a script after the last compared update; `except Exception` does not catch it."""


def record(
    script: Path,
    arguments: Sequence[str],
    folder: Path,
    num_updates: int,
    kind: Literal["old", "new"],
    draws: Literal["global", "state"] = "global",
) -> Recording:
    """Run a script in a folder as `python SCRIPT ARGUMENTS` would, and return its first updates."""
    _enter(folder)
    found = Recording()
    watch = _watched_old if kind == "old" else partial(_watched_new, draws=draws)
    if kind == "old" and "init_process_group" not in script.read_text():
        for name in _RANK:
            os.environ.pop(name, None)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        with watch(found, num_updates):
            runpy.run_path(str(script), run_name="__main__")
    except _Enough:
        pass
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RuntimeError(f"{script.name} ended with exit code {end.code}") from end
    return found


def _enter(folder: Path) -> None:
    """Change to the folder of the run, and redirect output to a file next to it."""
    output = os.open(f"{folder}_output_{os.environ['RANK']}.txt", os.O_CREAT | os.O_WRONLY)
    for each in (sys.stdout, sys.stderr):
        each.flush()
        os.dup2(output, each.fileno())
    os.chdir(folder)


@contextmanager
def _watched_new(found: Recording, num_updates: int, *, draws: Any) -> Iterator[None]:
    """Record the steps of a program that uses accel_fn."""

    def add(update: Any) -> None:
        report = update.report
        found.updates.append(
            Seen(
                float(report.loss),
                report.samples,
                report.loss.dtype == torch.float64,
                _position(),
                update.draws,
            )
        )
        found.uses_draw = updates.num_draws > 0
        if len(found.updates) >= num_updates:
            raise _Enough

    with recorded_updates(add, draws=draws) as updates:
        yield


@contextmanager
def _watched_old(found: Recording, num_updates: int) -> Iterator[None]:
    """Record the arguments of `backward` between optimizer steps, in any loop of torch."""
    watch = _Watch(found, num_updates)
    with ExitStack() as stack:
        backward = Tensor.backward
        stack.enter_context(mock.patch.object(Tensor, "backward", watch.around(backward)))
        for home in [DataLoader, *_loaders_of_accelerate()]:
            given = vars(home)["__iter__"]
            stack.enter_context(mock.patch.object(home, "__iter__", watch.batches_of(given)))
        if find_spec("accelerate") is not None:
            accelerator = importlib.import_module("accelerate").Accelerator
            scaled = watch.of_accelerate(accelerator.backward)
            stack.enter_context(mock.patch.object(accelerator, "backward", scaled))
        for home in (Module, Optimizer):
            clears = watch.clears(vars(home)["zero_grad"])
            stack.enter_context(mock.patch.object(home, "zero_grad", clears))
        stack.callback(register_optimizer_step_post_hook(watch.end_update).remove)
        yield


def _loaders_of_accelerate() -> list[type]:
    if find_spec("accelerate") is None:
        return []
    home = importlib.import_module("accelerate.data_loader")
    return [home.DataLoaderShard, home.DataLoaderDispatcher]


class _Watch:
    """The losses passed to `backward` since the last update, and the current batch of the loop."""

    def __init__(self, found: Recording, num_updates: int) -> None:
        self._found, self._num_updates = found, num_updates
        self._parts: list[Part] = []
        self._is_double = False
        self._cleared: set[int] = set()
        """The ids of the parameters whose gradients the script has cleared within this update."""
        self._batch: Any = None
        self._is_new = True
        """Whether no backward of this update has used the batch yet."""
        self._is_counted = False
        """Whether `Accelerator.backward` is running. It has recorded the loss before scaling, so
        `Tensor.backward` must not record it again."""

    def around(self, run: Callable[..., None]) -> Callable[..., None]:
        """Wrap `Tensor.backward`, so that it records its argument."""

        def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            if not self._is_counted:
                self._note(loss)
            run(loss, *args, **kwargs)

        return backward

    def of_accelerate(self, run: Callable[..., None]) -> Callable[..., None]:
        """Wrap `Accelerator.backward`, so that it records the divided loss, before fp16 scales it."""

        def backward(accelerator: Any, loss: Tensor, **kwargs: Any) -> None:
            self._found.divisor = accelerator.gradient_accumulation_steps
            self._note(loss.detach() / self._found.divisor)
            self._is_counted = True
            try:
                run(accelerator, loss, **kwargs)
            finally:
                self._is_counted = False

        return backward

    def clears(self, run: Callable[..., None]) -> Callable[..., None]:
        """Wrap `zero_grad`, so that it records the gradients that it clears within an update."""

        def zero_grad(owner: Module | Optimizer, *args: Any, **kwargs: Any) -> None:
            if self._parts:
                owned = _parameters(owner)
                self._cleared |= {id(each) for each in owned if each.grad is not None}
            run(owner, *args, **kwargs)

        return zero_grad

    def batches_of(self, iterate: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Any]:
        """Wrap `__iter__` of a loader, so that it records the batches that it yields."""

        def batches(loader: Any) -> _Noted:
            return _Noted(iterate(loader), self._take)

        return batches

    def _take(self, batch: Any) -> None:
        self._batch, self._is_new = batch, True

    def _note(self, loss: Tensor) -> None:
        """Record a backward. If several losses of an update use one batch, its rows count once."""
        rows = _num_rows(self._batch) if self._is_new else 0
        self._is_new = False
        self._is_double = loss.dtype == torch.float64
        labels, shapes = _num_labels(self._batch), _row_shapes(self._batch)
        self._parts.append(Part(float(loss.detach()), rows, labels, shapes))

    def end_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Record an update. If a second optimizer steps after the same backwards, do nothing."""
        if not self._parts:
            return
        parts, self._parts = tuple(self._parts), []
        cleared, self._cleared = self._cleared, set()
        self._is_new = True
        self._found.updates.append(
            Seen(
                sum(each.value for each in parts),
                sum(each.rows for each in parts),
                self._is_double,
                _position(),
                parts=parts,
                is_cleared=any(id(each) in cleared for each in _parameters(optimizer)),
            )
        )
        if len(self._found.updates) >= self._num_updates:
            raise _Enough


class _Noted:
    """An iterator that calls a function with each item."""

    def __init__(self, items: Iterator[Any], take: Callable[[Any], None]) -> None:
        self._items, self._take = items, take

    def __iter__(self) -> _Noted:
        return self

    def __next__(self) -> Any:
        item = next(self._items)
        self._take(item)
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._items, name)


def _parameters(owner: Module | Optimizer) -> list[Tensor]:
    if isinstance(owner, Module):
        return [*owner.parameters()]
    return [each for group in owner.param_groups for each in group["params"]]


def _position() -> str:
    """Return a checksum of the random generator of the host."""
    return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16]


def _num_rows(batch: Any) -> int:
    try:
        return count_samples(batch)
    except (TypeError, ValueError):
        return 0


def _row_shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(each.shape[1:]) for each in tree_leaves(batch) if isinstance(each, Tensor))


def _num_labels(batch: Any) -> tuple[int, ...]:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.ndim < 2 or labels.is_floating_point():
        return ()
    return tuple(int((labels[:, shift:] != -100).sum()) for shift in (0, 1))
