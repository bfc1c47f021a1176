"""check_replicas: raise an error if ranks that must hold the same parameters differ."""

from __future__ import annotations

from typing import Any

from accel_fn.core.loop import Strategy
from accel_fn.core.observers import Observer
from accel_fn.core.plan import Plan, SlotFunction
from accel_fn.core.report import Report
from accel_fn.core.state import DistState
from accel_fn.core.transform import Transform, fill, transform
from accel_fn.errors import check_count
from accel_fn.parallel.same_on_all_ranks import check_same


@transform
def check_replicas(every: int) -> Transform:
    """Compare the parameters of all ranks every `every` steps, by fingerprints of bits and places.

    Replicas diverge if something changes them on one rank: a loss that writes to
    parameters, random numbers that depend on the rank, faulty memory. No other check finds it.
    With `wrap_fsdp(replicate=...)`, ranks that hold the same shard are compared; a single group
    of shards has nothing to compare. Your own strategy sets `placements` and `compared_ranks`.

    Law: the step computes the same bits as without it. Tests: `tests/laws/law14_replicas.py`.

    Args:
        every: number of steps between comparisons, as `state.step` counts them, >= 1.

    Returns:
        A transform.

    Raises:
        ValueError: `every` is not an integer >= 1. From the step, on every rank, a
            RuntimeError that names the first parameter that differs, and the ranks.

    Cost: when it compares, one read of the parameters, two small collectives and one host
    synchronisation. Otherwise, and in a world of one, nothing.

    >>> import accel_fn as af
    >>> af.check_replicas(every=100)(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=count_samples, observers=[check_replicas(every=100)])
    """
    check_count("check_replicas", "every", every)
    return fill(observers=ReplicaCheck(ReplicaComparison, every=every))


class ReplicaCheck(SlotFunction):
    """The slot function of check_replicas: it calls `ReplicaComparison` with its settings."""

    traits = frozenset({"needs_equal_replicas"})


class ReplicaComparison(Observer):
    """Compares the parameters of one step over the ranks."""

    def __init__(self, plan: Plan, strategy: Strategy, state: DistState, *, every: int) -> None:
        self._model, self._every = plan.model, every
        self._strategy = strategy

    def after(self, state: DistState, batch: Any, report: Report) -> None:
        """Compare the parameters of all ranks, every `every` steps."""
        is_updated = report.applied is not None
        if is_updated and state.world_size > 1 and state.step % self._every == 0:
            tensors = {name: each.detach() for name, each in self._model.named_parameters()}
            rule = f"check_replicas: parameters must be equal on all ranks at step {state.step}"
            words = rule + ", {name} differs on {ranks}; resume from a checkpoint"
            check_same(self._strategy, state, tensors, words)
