"""Checks that a variant computes what the base computes; only then is its time worth measuring."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.tools.benchmarks.jobs import EVERY
from tests.tools.benchmarks.loops import COMPILED, PEERS, REPRODUCIBLE, Loop, Update
from tests.tools.benchmarks.measuring import Station
from tests.tools.benchmarks.tasks import LEARNING_RATE, NUM_BATCHES, Scenario, Task, make_task

CHECKED_UPDATES = 5
OF_A_JOB = EVERY + 1  # periodic work was done once, and one more update was made
TOLERANCE = 0.01  # relative to one update, or to the largest gradient; rounding stays far below


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of some updates: the parameters, and AdamW's mean of the gradients.

    The parameters alone say little, since AdamW's update does not depend on
    the gradients' scale.
    """

    parameters: Tensor
    gradients: Tensor

    @classmethod
    def of(cls, task: Task) -> Trained:
        kept = [task.optimizer.state[each] for each in task.model.parameters()]
        moments = [each["exp_avg"] for each in kept if each]  # frozen parameters have none
        return cls(flattened(task.model.parameters()), flattened(moments))

    def difference(self, other: Trained, *, on_average: bool = False) -> float:
        """Return the largest difference: of a parameter in updates, or of a gradient in the largest gradient.

        On average instead, for a compiled loop in bfloat16, which rounds elsewhere: there the
        sign of a gradient near zero, and with it all of one parameter's update, is another.
        """
        moved = (self.parameters - other.parameters).abs() / LEARNING_RATE
        pulled = (self.gradients - other.gradients).abs() / other.gradients.abs().max()
        moved, pulled = (each.mean() if on_average else each.max() for each in (moved, pulled))
        return float(torch.maximum(moved, pulled).nan_to_num(nan=torch.inf))


def flattened(tensors: Iterable[Tensor]) -> Tensor:
    whole = [getattr(tensor, "full_tensor", lambda each=tensor: each)() for tensor in tensors]
    return torch.cat([tensor.detach().flatten() for tensor in whole])


@dataclass(frozen=True, slots=True)
class Checked:
    """A variant to be timed, or a note with the reason why it is not."""

    update: Update | None = None
    trained: Trained | None = None
    difference: float = 0.0
    note: str = ""

    @property
    def is_faulty(self) -> bool:
        """Does it compute something else than the base?"""
        return self.difference > TOLERANCE


def check(
    name: str, loop: Loop | None, scenario: Scenario, station: Station, base: Checked
) -> Checked:
    """Train a fresh task for a few updates, and compare the result with the base's."""
    if loop is None:
        return Checked(note="not installed")
    task = make_task(scenario, 0 if scenario.way.same_data else station.rank)
    try:
        update = loop(task)
        repeat(update, OF_A_JOB if scenario.way.job else CHECKED_UPDATES)
    except Exception as error:
        if name not in PEERS:
            raise
        return Checked(note=f"failed: {type(error).__name__}")
    trained = Trained.of(task)
    on_average = name == REPRODUCIBLE or (scenario.way.bf16 and name == COMPILED)
    difference = station.largest(trained.difference(base.trained or trained, on_average=on_average))
    checked = Checked(update, trained, difference)
    if checked.is_faulty:
        return Checked(difference=difference, note=f"computes something else ({difference:.0e})")
    return checked


def repeat(update: Update, num_updates: int) -> None:
    for index in range(num_updates):
        update(index % NUM_BATCHES)
