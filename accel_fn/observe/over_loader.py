"""Run one pass of all ranks over a loader, in evaluation mode and without gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_fn.checks.first_batches import Looks, check_copies, looks_of, warn_of_equal_batches
from accel_fn.core import primitives
from accel_fn.core.batch import count_samples
from accel_fn.core.collectives import agreed
from accel_fn.core.loop import Strategy
from accel_fn.core.loss import run_placed
from accel_fn.core.microbatches import cut
from accel_fn.core.plan import Plan
from accel_fn.core.restored import in_eval_mode, restored_random
from accel_fn.core.state import DistState, check_state, data_places
from accel_fn.core.step import Step
from accel_fn.data.group_batches import Windowed
from accel_fn.data.loader import Epoch, Numbered, ShardedLoader, numbered_batches
from accel_fn.data.prefetch import Prefetched
from accel_fn.errors import ArgumentError, ArgumentTypeError, BatchError, message
from accel_fn.observe.progress import loader_length, open_bar

T = TypeVar("T")
_ENDED, _READY, _FAILED = 0, 1, 2
"""The signals that ranks exchange before each batch, if all must run the same number of batches."""


def check_step(function: str, step: Step, state: DistState) -> None:
    """Refuse a step that `build` did not return, or that belongs to another world."""
    check_state(function, state)
    if not isinstance(step, Step):
        rule = "be what build gave"
        raise ArgumentTypeError(message(function, "step", rule, type(step).__name__))
    step._check_state(state)


def check_loader(function: str, loader: Iterable[Any], state: DistState) -> None:
    """Refuse a loader that cannot be iterated, or a DataLoader that every rank would read whole."""
    if not isinstance(loader, Iterable):
        rule = "be a loader, or anything else that can be iterated"
        raise ArgumentTypeError(message(function, "loader", rule, type(loader).__name__))
    read: Any = loader
    while isinstance(read, Prefetched | Windowed):
        read = read._loader
    if state.world_size > 1 and isinstance(read, DataLoader):
        rule = f"be shared out over {state.world_size} ranks"
        repair = "give it to shard_loader; every rank would read every sample"
        raise ArgumentError(message(function, "loader", rule, type(read).__name__, repair))


def read_on_all_ranks(
    function: str, step: Step, state: DistState, read: Callable[[], tuple[T, Looks]]
) -> list[T]:
    """Call `read` on all ranks, with the buffers of the main rank; return each rank's result.

    On a mesh, return the results of the ranks along `dp`, since ranks along other axes have read
    the same data. `read` also returns a description of its rank's first batch. Observers of the
    step get the time that the ranks spent.
    """
    plan = step.plan
    step.check_filled(function)
    with step.observers.evaluating(state), step.strategy.evaluating(plan, state, function):
        every = agreed(read, state, function)
    warn_of_equal_batches(function, state, [looks for _, looks in every])
    return [found for found, _ in every[data_places(state)]]


def over_loader(
    function: str,
    step: Step,
    loader: Iterable[Any],
    state: DistState,
    cut_up: Callable[[Any], Any],
    use: Callable[[CutBatch], None],
    progress: bool | None,
) -> Looks:
    """Call `use` on every batch of this rank, with the parts that `cut_up` made of it.

    At the end, restore the modes of modules and optimizers, and the global generators. Return a
    description of the first batch, which is empty for a sharded loader and in a world of one.
    """
    if not isinstance(progress, bool | None):
        raise ArgumentTypeError(message(function, "progress", "be True, False or None", progress))
    looks = Looks([], []) if isinstance(loader, ShardedLoader | Epoch) else None
    # Forwards may run collectives, over mesh axes other than `dp` or over shards. Then all ranks
    # must run the same number of forwards.
    together = state.data.world_size < state.world_size
    together = together or (step.strategy.pads and state.world_size > 1)
    with restored_random(state.device):
        batches = numbered_batches(loader)
        modes = in_eval_mode(step.plan.optimizers.values())
        options: dict[str, Any] = {"desc": function, "unit": "batch", "leave": False}
        options |= {"is_main": state.is_main, "wanted": progress, "total": loader_length(loader)}
        bar = open_bar(**options)
        shown: Any = nullcontext() if bar is None else bar
        # Take this module, not the model: it also holds a loss_fn that is a module.
        module = step.strategy.module

        def use_and_show(each: CutBatch) -> None:
            nonlocal looks
            if looks is None and state.world_size > 1:
                looks = looks_of(each.batch)
            use(each)
            if bar is not None:
                bar.update()

        try:
            with shown, _evaluation_mode(module), modes, torch.no_grad():
                if together:
                    _use_in_step(function, batches, state, cut_up, use_and_show)
                else:
                    for numbers, batch in batches:
                        use_and_show(CutBatch(numbers, batch, cut_up(batch)))
        except Exception:
            # Read the loader to its end: a peer may wait for messages that this rank sends while it
            # reads. If ranks run `together`, they have already stopped together.
            if state.world_size > 1 and not together:
                with suppress(Exception):
                    for _ in batches:
                        pass
            raise
        finally:
            # Drop the iterator, so that its workers end. Otherwise an error that the caller stores
            # would keep the iterator alive.
            del batches
    return looks or Looks([], [])


@dataclass(frozen=True, slots=True)
class CutBatch:
    """A batch of this rank, with the numbers of its samples, if known, and its parts."""

    numbers: list[Any] | None
    batch: Any
    parts: Any


def _use_in_step(
    function: str,
    batches: Iterator[Numbered[Any]],
    state: DistState,
    cut_up: Callable[[Any], Any],
    use: Callable[[CutBatch], None],
) -> None:
    """Call `use` equally often on every rank, with a batch of None if this rank has no more batches.

    Forwards have collectives, so all ranks must run the same number of forwards. If a rank has
    failed, all ranks stop before the next batch.
    """
    failure: Exception | None = None
    for number in itertools.count():
        signal = _ENDED
        try:
            found = next(batches, None)
            signal = _ENDED if found is None else _READY
            numbers, batch = found or (None, None)
            each = CutBatch(numbers, batch, cut_up(batch))
        except Exception as error:
            failure = failure or error
        signals = primitives.exchange_number(_FAILED if failure else signal, state, function)
        if _FAILED in signals or _READY not in signals:
            break
        if number == 0 and state.data.world_size < state.world_size:
            check_copies(function, state, primitives.exchange(looks_of(batch), state, function))
        try:
            use(each)
        except Exception as error:
            failure = error
    if failure is not None:
        try:
            raise failure
        finally:
            # Delete the reference: otherwise this frame and the error's traceback would keep each
            # other alive.
            del failure


def parts_with_rows(plan: Plan, batch: Any) -> list[Any]:
    """Return the micro-batches that may have rows."""
    return [part for part in cut(plan, batch)[0] if num_rows(part) != 0]


def over_parts(
    step: Step,
    state: DistState,
    fn: Callable[[Any, Any], Any],
    parts: list[Any],
    use: Callable[[Any, Any], None],
) -> None:
    """Call `use` on every micro-batch and the result of `fn(model, micro-batch)`."""
    plan, strategy = step.plan, step.strategy
    padded, weights = strategy.pad(state, None, parts, [(1,)] * len(parts))
    with settled(strategy, state):
        for part, weight in zip(padded, weights, strict=True):
            found = run_placed(state, plan, lambda placed: fn(strategy.model, placed), part)
            if weight:
                use(part, found)


@contextmanager
def settled(strategy: Strategy, state: DistState) -> Iterator[None]:
    """Call the strategy's `settle` at the end, even after an error: peers may wait for it in a gather."""
    try:
        yield
    except Exception:
        with suppress(Exception):
            strategy.settle(state)
        strategy.reset()
        raise
    strategy.settle(state)


def num_rows(part: Any) -> int | None:
    """Count the samples of a micro-batch; None if its tensors have no common leading dimension."""
    try:
        return count_samples(part)
    except BatchError:
        return None


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode; restore its mode at the end."""
    before = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, training in before.items():
            module.training = training
