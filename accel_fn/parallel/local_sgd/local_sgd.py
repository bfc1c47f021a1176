"""local_sgd: ranks train separately; now and then, they average parameters and optimizer state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from accel_fn.core import primitives
from accel_fn.core.grads import Grads
from accel_fn.core.loop import Strategy
from accel_fn.core.loss import Metrics, sparse_tables
from accel_fn.core.mean import GlobalMean
from accel_fn.core.microbatches import Parts, Weights
from accel_fn.core.plan import Plan, SlotFunction, Stateful, describe
from accel_fn.core.plan_checks import leave_out_one
from accel_fn.core.report import Report
from accel_fn.core.state import DistState
from accel_fn.core.transform import Transform, fill, transform
from accel_fn.core.update import Prepared
from accel_fn.core.weights import Weight, shares
from accel_fn.errors import PlanError, StateError, check_count, message
from accel_fn.parallel.local_sgd.average_ranks import average, buckets, flat, plain, write


@transform
def local_sgd(every: int) -> Transform:
    """Train each rank on its own; average parameters and optimizer state after every `every` updates.

    Each rank makes its updates from the mean over its own part of each global batch. After
    `every` of them, parameters, floating-point buffers and the optimizer's floating-point state
    become their mean over the ranks, each weighted by the items that its rank has trained on
    since the last average. Ranks start from rank 0's parameters and buffers. In a world of one
    it does nothing.

    A step's loss is still the mean over the global batch, where each rank computes its part with
    its own parameters. The gradients, their norm, and so the effect of `clip`, are the rank's own.

    Law: between averages, a rank computes a step of a world of one over its own parts, bit for bit.
    After an average, all ranks hold the same bits. With `every=1` and an optimizer that is linear
    in its gradients (SGD, also with momentum), W ranks give the result of one rank, also with
    uneven parts. Tests: `tests/laws/law03_local_sgd.py`.

    Args:
        every: number of updates from one average to the next, >= 1.

    Returns:
        A transform. Adds `own_weight`, the number of items of this rank, to the report.

    Raises:
        ValueError: `every` is not an integer >= 1. From `build`: with `wrap_ddp` or `wrap_fsdp`; a
            loss scale, `accept` functions, `ema` or `check_replicas`, which need equal ranks; a
            `weight_fn` that is a mapping; embeddings with sparse gradients and momentum, which is
            sparse too. From `save`, `evaluate` and, in evaluation mode, `step.forward`: between two
            averages. From the step, a RuntimeError, on every rank: the optimizers of two ranks hold
            state of different parameters.

    Cost: for a step, two small collectives of a number or two, and none of gradients. For an
    average, one broadcast and one all-reduce of parameters and optimizer state (half precision in
    float32) for every dtype and every 16 million numbers of it, and two small collectives on the
    host.

    Source: McMahan et al. 2017, arXiv:1602.05629; Stich 2019, arXiv:1805.09767.

    >>> import accel_fn as af
    >>> af.local_sgd(every=8)(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=count_samples, strategy=[local_sgd(every=8)], \
after_update=[local_sgd(every=8)])
    """
    check_count("local_sgd", "every", every)
    return fill(
        # Average before the other `after_update` functions, wherever local_sgd is listed, so that
        # they see the average.
        first=("after_update",),
        strategy=LocalSlot(make_local),
        after_update=Stateful(RankAverage, every=every),
    )


class LocalSlot(SlotFunction):
    """The slot function of local_sgd: it calls `make_local`, and checks the plan."""

    traits = frozenset({"local_gradients"})

    def validate(self, state: DistState, plan: Plan) -> None:
        """Refuse a plan that needs ranks to be equal after every update."""
        _check_scale(state)
        others = [describe(each) for each in plan.strategy if not isinstance(each, LocalSlot)]
        if others:
            raise PlanError(
                "build: local_sgd must be the only strategy, since every rank needs parameters and "
                f"gradients of its own, got {' and '.join(others)}; {leave_out_one(plan.strategy)}"
            )
        if plan.reduction == "sum" and state.world_size > 1:
            raise PlanError(
                "build: local_sgd must train on a mean, since ranks do not know the weight of the global "
                'batch, got reduction="sum"; return the mean over the batch\'s items'
            )
        if plan.terms and state.world_size > 1:
            raise PlanError(
                "build: local_sgd must train on one mean, by whose items it averages ranks, got "
                f"{' and '.join(plan.terms)}; return one loss, with one weight_fn, or use wrap_ddp"
            )
        groups = [g for each in plan.optimizers.values() for g in each.param_groups]
        if state.world_size > 1 and any(g.get("momentum") for g in groups):
            for name in sparse_tables(plan.model):
                rule, repair = "have dense gradients beside momentum", "use sparse=False"
                raise PlanError(message("build", "local_sgd's model", rule, name, repair))
        if plan.accept:
            raise PlanError(
                "build: local_sgd must apply every update, as gradients differ between ranks, got "
                f"{' and '.join(map(describe, plan.accept))}; leave out one"
            )
        replicas = plan.having("needs_equal_replicas")
        if replicas:
            raise PlanError(
                "build: local_sgd must not be combined with what needs equal parameters on all "
                f"ranks, got {' and '.join(map(describe, replicas))}; leave out one"
            )


def _check_scale(state: DistState) -> None:
    if state.scaler is not None:
        raise PlanError(
            "build: local_sgd must be used without a loss scale, as gradients overflow on single ranks, "
            'got with_amp("fp16"); use "bf16"'
        )


def make_local(state: DistState, module: nn.Module, plan: Plan) -> Strategy:
    """Make a strategy whose ranks keep their gradients; in a world of one, a plain `Strategy`."""
    _check_scale(state)
    kind = Strategy if state.world_size == 1 else LocalGradients
    return kind(state, module, plan)


class OwnMean(GlobalMean):
    """A mean that weighs a micro-batch by its share of this rank's items, not of the global batch.

    So no backward waits for the weights of other ranks.
    """

    is_exact_over_ranks = False

    def share(self, weight: Weight) -> Weight:
        """Return the factor for the backward of a micro-batch of this weight."""
        return shares(weight, self.own_weight)

    def add(self, loss: Tensor, metrics: Metrics, weight: Weight) -> None:
        """Add the losses unscaled, since the weight of the global batch is not known yet."""
        self.add_scaled(loss, metrics, weight)

    def close(self) -> tuple[Tensor, dict[str, Tensor], Weight]:
        """Wait for the sums; return mean loss, mean metrics and weight of the global batch."""
        mean, metrics, total = super().close()
        if not total:
            return mean, metrics, total
        sizes = self.layout.sizes or {}
        metrics = {n: each if sizes[n] == 2 else each / total[0] for n, each in metrics.items()}
        return mean / total[0], metrics, total

    def extras(self, plan: Plan) -> dict[str, Any]:
        """Return the entries that this mean adds to the report of a step."""
        return {**super().extras(plan), "own_weight": sum(self.own_weight)}


class LocalGradients(Strategy):
    """Lets every rank update from its own part of the batch; all start from rank 0's parameters."""

    mean_type = OwnMean

    def __init__(self, state: DistState, module: nn.Module, plan: Plan) -> None:
        tensors = [plain(each) for each in [*module.parameters(), *module.buffers()]]
        for bucket in buckets(tensors):
            first = flat(bucket)
            primitives.broadcast(first, state, 0, "build")
            write(first, bucket)
        super().__init__(state, module, plan)

    def prepare(self, plan: Plan, state: DistState, grads: Grads, report: Report) -> Prepared:
        """Prepare the update; record which parameters have a gradient, for the average."""
        for each in plan.after_update:
            if isinstance(each, RankAverage):
                each.has_gradient = [tensor is not None for tensor in grads.tensors]
        return super().prepare(plan, state, grads, report)

    def compared_ranks(self, state: DistState) -> Sequence[int]:
        """Return this rank only: ranks have different gradients and parameters."""
        return (state.rank,)

    def evaluating(
        self, plan: Plan, state: DistState, function: str
    ) -> AbstractContextManager[None]:
        """Return the context of an evaluation; on every rank, refuse models that differ between ranks."""
        for each in plan.after_update:
            if isinstance(each, RankAverage):
                each.check_averaged(function)
        return super().evaluating(plan, state, function)

    def run(
        self, plan: Plan, state: DistState, mean: GlobalMean, parts: Parts, weights: Weights
    ) -> None:
        """Run the micro-batches; refuse a state with a loss scale."""
        if state.scaler is not None:
            raise StateError(
                "step: state must carry no loss scale under local_sgd, got one; keep a state of its own "
                "for the step that scales"
            )
        super().run(plan, state, mean, parts, weights)


class RankAverage:
    """Counts updates and this rank's items, and averages the ranks after every `every` updates."""

    def __init__(self, state: DistState, plan: Plan, *, every: int) -> None:
        self._plan = plan
        self._every = every
        # Do not use `state.step`: two steps may share a state, and one of them may never average.
        self._num_updates = 0
        self._num_items = 0.0
        self._has_diverged = False
        self.has_gradient: Sequence[bool] = ()
        """Whether each trained parameter had a gradient in the last update of this rank."""

    def __call__(self, state: DistState, report: Report) -> DistState:
        self._num_updates += 1
        if state.world_size == 1:
            return state
        if "own_weight" not in report.extras:
            raise StateError(
                'step: report must have extras["own_weight"] for local_sgd, got none; give the one of '
                "step.grads, or of the inner gradient function"
            )
        self._has_diverged = True
        self._num_items += report.extras["own_weight"]
        if self._num_updates % self._every == 0:
            average(_tensors(self._plan), self._num_items, state, also=self._updated())
            self._start_anew()
        return state

    def _updated(self) -> list[str]:
        """Return the names of the parameters that this rank has updated, for the ranks to compare.

        If `every` is more than 1, ranks may differ, so return an empty list. Without optimizer
        state and weight decay, return an empty list too: a missing gradient then acts like a
        gradient of zeros.
        """
        groups = [g for each in self._plan.optimizers.values() for g in each.param_groups]
        has_state = any(each.state for each in self._plan.optimizers.values())
        if self._every > 1 or not (has_state or any(g.get("weight_decay") for g in groups)):
            return []
        name_of = {id(each): name for name, each in self._plan.model.named_parameters()}
        trained = zip(self._plan.trained(), self.has_gradient, strict=True)
        return [f"{name_of[id(each)]} updated" for each, has_gradient in trained if has_gradient]

    def _start_anew(self) -> None:
        self._num_items = 0.0
        self._has_diverged = False

    def check_saved(self) -> None:
        """On every rank, refuse to save a state that differs between ranks."""
        # Averaging here would make the run depend on when it is saved. Saving every rank's
        # parameters would tie the run to this number of ranks.
        self.check_averaged("save")

    def check_followed(self) -> None:
        """On every rank, refuse to build a next step, which would assume one model on all ranks."""
        self.check_averaged("build")

    def check_averaged(self, function: str) -> None:
        """Refuse, on every rank, a function that assumes that all ranks hold one model."""
        if self._has_diverged:
            raise StateError(
                f"{function}: state must be one at which local_sgd has averaged the ranks, got "
                f"{self._num_updates % self._every} of {self._every} updates after it; {function} where "
                f"their number is a multiple of {self._every}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state that checkpoints hold."""
        return {"num_updates": self._num_updates}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._num_updates = saved["num_updates"]
        self._start_anew()


def _tensors(plan: Plan) -> dict[str, Tensor]:
    """Return the tensors to average: trained parameters, their optimizer state, and buffers."""
    name_of = {id(each): name for name, each in plan.model.named_parameters()}
    found: dict[str, Any] = {name_of[id(each)]: each for each in plan.trained()}
    for parameter in plan.trained():
        for key, value in _state_of(plan, parameter).items():
            for number, leaf in enumerate(pytree.tree_leaves(value)):
                found[f"{name_of[id(parameter)]} {key} {number}"] = leaf
    found |= dict(plan.model.named_buffers())
    return {
        name: each
        for name, each in sorted(found.items())
        if isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex())
    }


def _state_of(plan: Plan, parameter: nn.Parameter) -> Mapping[str, Any]:
    """Return the state that an optimizer keeps for a parameter."""
    held = [each.state[parameter] for each in plan.optimizers.values() if parameter in each.state]
    return held[0] if held else {}
