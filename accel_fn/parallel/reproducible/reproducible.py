"""reproducible: train with the same bits for every number of ranks."""

from __future__ import annotations

from accel_fn.core.loss import sparse_tables
from accel_fn.core.plan import Plan, SlotFunction
from accel_fn.core.plan_checks import check_row_norms
from accel_fn.core.state import DistState
from accel_fn.core.transform import Transform, fill, transform
from accel_fn.errors import ArgumentError, PlanError, check_count, message
from accel_fn.parallel.reproducible.virtual_ranks import (
    VirtualRanks,
    check_tracking,
    tracking_modules,
)


@transform
def reproducible(num_virtual_ranks: int = 8) -> Transform:
    """Train replicas on all ranks, with the same bits for every number of ranks.

    The global batch is split into `num_virtual_ranks` equal slices, and each rank has the same
    number of them. Each slice has its own forward and backward. Random numbers that it draws from
    the generators of torch, NumPy or Python depend only on `state.seed`, `state.step`, `state.call` and
    the number of the slice; afterwards the generators are restored. Gradients and losses are added up as a
    binary tree over the slices: within a rank, then over the ranks.

    It replaces `wrap_ddp`, also in a world of one. `accumulate` splits each slice.

    Law: parameters, state of the optimizer, losses and norms are the same to the bit for every
    number of ranks that divides `num_virtual_ranks`, also if a run is resumed with another number.
    This holds with one `num_virtual_ranks`, on the same kind of hardware, with the same torch and
    as many threads in each process, and if all operations are deterministic.
    Tests: `tests/laws/law03_reproducible.py`.

    Args:
        num_virtual_ranks: a power of two. The number of ranks must divide it. It determines the exact
            result. Choose it once, at least as large as the largest world size you plan to use.

    Returns:
        A transform.

    Raises:
        ValueError: `num_virtual_ranks` is not a power of two. In `build`, on every rank: the number
            of ranks does not divide it; a BatchNorm or InstanceNorm takes running statistics; an
            `nn.Embedding` has sparse gradients or a `max_norm`; `accumulate("auto")` or
            `compiled(scope="step")`. From the step, on every rank: `num_virtual_ranks` does not divide the
            samples of a batch; the forward of the first one changes a buffer that is saved with the model;
            gradients are sparse.
        RuntimeError: from the step, the loss raised on another rank; ranks are in different steps.

    Cost: one forward and backward per slice; memory for log2(slices of a rank) more gradients than
    with `wrap_ddp`. In a world of several, two small collectives on the host before the first
    forward, one after the last backward, and then as much traffic as in an all-reduce of the
    gradients, without overlap. The traffic is in buckets of 32 MB, or of one larger parameter, and
    begins when the memory of the slices is free. If one parameter is nearly all of a model, two
    ranks hold 1.5 gradients more than with `wrap_ddp`, even with few slices. With metrics, the host
    waits for an accelerator once per step.

    >>> import accel_fn as af
    >>> af.reproducible(num_virtual_ranks=8)(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=count_samples, strategy=[reproducible(num_virtual_ranks=8)])
    """
    check_count("reproducible", "num_virtual_ranks", num_virtual_ranks)
    if num_virtual_ranks.bit_count() > 1:
        raise ArgumentError(
            message("reproducible", "num_virtual_ranks", "be a power of two", num_virtual_ranks)
        )
    return fill(strategy=ReproducibleSlot(VirtualRanks, num_virtual_ranks=num_virtual_ranks))


class ReproducibleSlot(SlotFunction):
    """The slot function of reproducible: it calls `VirtualRanks` with its settings."""

    traits = frozenset({"acts_alone", "virtual_ranks"})

    def allows(self, size: int) -> bool:
        """Return whether this number of ranks divides the number of virtual ranks."""
        divides: bool = self.keywords["num_virtual_ranks"] % size == 0
        return divides

    def validate(self, state: DistState, plan: Plan) -> None:
        """Refuse a plan whose result would depend on the number of ranks."""
        num_virtual_ranks = self.keywords["num_virtual_ranks"]
        if not self.allows(state.world_size):
            raise PlanError(
                f"build: reproducible(num_virtual_ranks={num_virtual_ranks}) must have a number of ranks "
                f"that divides num_virtual_ranks, a power of two, got {state.world_size} ranks"
            )
        check_tracking(tracking_modules(plan.model), "build")
        check_row_norms(plan.model)
        for name in sparse_tables(plan.model):
            rule, repair = "have dense gradients", "use sparse=False"
            raise PlanError(message("build", "reproducible's model", rule, name, repair))
        if plan.having("retries"):
            raise PlanError(
                'build: accumulate("auto") must not be used with reproducible, whose bits depend on the '
                "number of micro-batches; give a number, or more virtual ranks"
            )
        if plan.compile_step:
            raise PlanError(
                'build: compiled(scope="step") must not be used with reproducible, which adds up gradients '
                'in an order of its own; use scope="loss"'
            )
