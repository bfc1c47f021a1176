"""reproducible: the same bits for every number of ranks."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from accel_fn.base.state import DistState
from accel_fn.comm import primitives
from accel_fn.errors import ArgumentError, PlanError, check_count, message
from accel_fn.step.plan import Asked, Plan, Transform
from accel_fn.step.plan_checks import check_row_norms
from accel_fn.transforms.accumulate.retry_on_oom import Fitting
from accel_fn.transforms.reproducible.virtual_ranks import Slotted, check_tracking, tracking_modules


def reproducible(num_slots: int = 8) -> Transform:
    """Train replicas on all ranks, with the same bits for every number of ranks.

    The global batch is cut into `num_slots` slots of as many samples, of which each rank has as
    many. A slot goes through its forward and backward by itself; random numbers that it draws
    from the generators of torch, NumPy or Python depend on `state.seed`, `state.step` and the
    number of the slot alone, and afterwards the generators are where they were. Gradients and
    losses are added up as a binary tree over the slots: within a rank, then over the ranks.

    It stands in place of `wrap_ddp`, in a world of one as well. `accumulate` cuts each slot.

    Law: parameters, state of the optimizer, losses and norms are the same to the bit for every
    number of ranks that divides `num_slots`, also in a run that is resumed with another
    number: with one `num_slots`, on the same kind of hardware, with the same torch and as many
    threads in each process, and where the operations used are deterministic.

    Args:
        num_slots: a power of two. Numbers of ranks that divide it are possible. It decides the bits.

    Returns:
        A transform.

    Raises:
        ValueError: `num_slots` is no power of two. In `build`, on every rank: the number of
            ranks does not divide it; a BatchNorm or InstanceNorm takes running statistics; an
            `nn.Embedding` has sparse gradients or a `max_norm`; `accumulate("auto")` or
            `compiled(scope="step")`. From the step, on every rank: `num_slots` does not divide the
            samples of a batch; the forward of the first one changes a buffer that is saved with the model;
            gradients are sparse.

    Cost: a forward and backward a slot; memory for log2(slots of a rank) gradients more than
    `wrap_ddp` takes. In a world of several, two small collectives on the host before the first
    forward, and after the last backward, overlapped with nothing, as much traffic as an all-reduce of the
    gradients has. It goes by buckets of 32 MB, or of one parameter that is larger, once the
    memory of the slots is free: where one parameter is nearly all of a model, two ranks hold
    1.5 gradients more than with `wrap_ddp`, however few the slots are.

    >>> import accel_fn as af
    >>> af.reproducible(num_slots=8)(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=num_samples, own_parameters=[in_slots(num_slots=8)])
    """
    check_count("reproducible", "num_slots", num_slots)
    if num_slots.bit_count() > 1:
        raise ArgumentError(message("reproducible", "num_slots", "be a power of two", num_slots))
    slotting = Slotting(in_slots, num_slots=num_slots)
    return lambda plan: replace(plan, own_parameters=(*plan.own_parameters, slotting))


class Slotting(Asked):
    """`in_slots` with its settings."""

    given_by = "reproducible"

    def check(self, state: DistState, plan: Plan) -> None:
        """Refuse what would not be the same in another world."""
        num_slots = self.keywords["num_slots"]
        if num_slots % state.world_size:
            raise PlanError(
                f"build: reproducible(num_slots={num_slots}) must have a number of ranks that divides "
                f"num_slots, a power of two, got {state.world_size} ranks"
            )
        check_tracking(tracking_modules(plan.model), "build")
        check_row_norms(plan.model)
        for name, module in plan.model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                rule, repair = "have dense gradients", "use sparse=False"
                raise PlanError(message("build", "reproducible's model", rule, name, repair))
        if any(isinstance(each, Fitting) for each in plan.split):
            raise PlanError(
                'build: accumulate("auto") must not be used with reproducible, whose bits depend on the '
                "number of micro-batches; give a number, or more slots"
            )
        if plan.compile_step:
            raise PlanError(
                'build: compiled(scope="step") must not be used with reproducible, which adds up slots '
                'in an order of its own; use scope="loss"'
            )


def num_slots_of(owner: object) -> int | None:
    """Of what stands where `reproducible` does; it decides the bits."""
    return owner.keywords["num_slots"] if isinstance(owner, Slotting) else None


def in_slots(state: DistState, module: nn.Module, *, num_slots: int) -> nn.Module:
    """`module`, of which a step will run one slot at a time, with rank 0's parameters and buffers."""
    if state.world_size > 1:
        for tensor in [*module.parameters(), *module.buffers()]:
            primitives.broadcast(tensor.detach(), state, 0, "build")
    return Slotted(module, num_slots)
