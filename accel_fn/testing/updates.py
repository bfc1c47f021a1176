"""recorded_updates: record the report of each step of a program, for a comparison of two runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch

from accel_fn.core.report import Report
from accel_fn.core.state import DistState
from accel_fn.core.step import Step
from accel_fn.errors import ArgumentError, message

_SOURCES = ("global", "state")


@dataclass(frozen=True, slots=True)
class Update:
    """A step of a program, `step(state, batch)`.

    Attributes:
        report: the report that the step returned.
        draws: whether the step itself drew from torch's global generators, as dropout does.
    """

    report: Report
    draws: bool


class Updates(list[Update]):
    """The updates of a program in order, and how often it called `af.draw`."""

    num_draws = 0


@contextmanager
def recorded_updates(
    on_update: Callable[[Update], None] | None = None,
    *,
    draws: Literal["global", "state"] = "global",
) -> Iterator[Updates]:
    """Record each `step(state, batch)` inside the context, of every step of this process.

    On one rank, `af.draw` draws from torch's global generator, in the order of the program: so a
    program that moved its draws from the loss into `af.draw` gets the numbers that it had before. For
    a comparison with several ranks, give `draws="state"`.

    Args:
        on_update: called with each update, after its step.
        draws: "state": `af.draw` works as outside of the context.

    Yields:
        The list of updates, which grows with each step.

    Raises:
        ValueError: `draws` is neither "global" nor "state".

    Cost: two reads of the states of the generators for each step; on an accelerator a host
    synchronisation.

    >>> import accel_fn as af
    >>> with af.testing.recorded_updates() as updates:
    ...     state, step = af.build(af.Plan(loss_fn, model, optimizer), af.DistState())
    ...     for _ in range(2):
    ...         state, report = step(state, batch)
    >>> [update.report.samples for update in updates]
    [8, 8]
    """
    if draws not in _SOURCES:
        rule = f"be one of {', '.join(map(repr, _SOURCES))}"
        raise ArgumentError(message("recorded_updates", "draws", rule, draws))
    updates = Updates()
    run, home = Step.__call__, importlib.import_module("accel_fn.data.draw")
    own = home.generator_of

    def call(
        step: Step[Any], state: DistState, batch: Any, **options: Any
    ) -> tuple[DistState, Report]:
        before = _generators()
        state, report = run(step, state, batch, **options)
        draws_inside = not all(map(torch.equal, before, _generators()))
        update = Update(report, draws_inside)
        updates.append(update)
        if on_update is not None:
            on_update(update)
        return state, report

    def generator_of(state: DistState, name: str) -> torch.Generator:
        updates.num_draws += 1
        is_global = draws == "global" and state.world_size == 1
        return torch.default_generator if is_global else own(state, name)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Step, "__call__", call))
        stack.enter_context(mock.patch.object(home, "generator_of", generator_of))
        yield updates


def _generators() -> list[torch.Tensor]:
    """Return the states of torch's global generators, of the host and the device."""
    states = [torch.get_rng_state()]
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        states.append(torch.get_device_module(device).get_rng_state())
    return states
