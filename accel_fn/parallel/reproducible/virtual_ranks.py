"""VirtualRanks: cut the global batch into fixed slices, and add them up in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from os import sep
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, nn

from accel_fn.core import primitives
from accel_fn.core.batch import count_samples, map_tensors
from accel_fn.core.collectives import exchange_failures
from accel_fn.core.differentiable import loss_of
from accel_fn.core.given_batches import check_same_place, number_of, place_of
from accel_fn.core.grads import Grads, wide_backward
from accel_fn.core.loop import Strategy, take_gradients
from accel_fn.core.loss import by_count, counted_in, loss_module_of
from accel_fn.core.mean import MetricSums, checked_total, differing_elsewhere, seed_of, weighed
from accel_fn.core.microbatches import Parts, Weights, microbatches
from accel_fn.core.observers import FailedBatch
from accel_fn.core.plan import Plan
from accel_fn.core.report import Report
from accel_fn.core.restored import exclusive_random, key_random
from accel_fn.core.split_batch import part_sizes, split_rows
from accel_fn.core.state import DistState, step_name
from accel_fn.core.weights import Weight, shares, total_weight
from accel_fn.errors import BatchError, LossError, PeerError, PlanError, WorldError, message
from accel_fn.parallel.reproducible.tree_sum import Tensors, Tree, sum_over_ranks

_TRACKING = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
Slice = tuple[Parts, Weights]
"""The micro-batches of one virtual rank, and their weights."""


class VirtualRanks(Strategy):
    """Runs each virtual rank's forward and backward with separate random numbers.

    The terms of each sum, and their order, do not depend on the number of ranks.
    """

    is_exact_over_ranks = is_evenly_split = True
    calls_collectives = False

    def __init__(
        self,
        state: DistState,
        module: nn.Module,
        plan: Plan,
        *,
        num_virtual_ranks: int,
    ) -> None:
        if state.world_size > 1:
            for tensor in [*module.parameters(), *module.buffers()]:
                primitives.broadcast(tensor.detach(), state, 0, "build")
        self.num_virtual_ranks = self.num_microbatches = num_virtual_ranks
        self._tracking = tracking_modules(loss_module_of(module).model)
        self._differing: LossError | None = None
        """The error that this rank has found in the metrics of this step."""
        super().__init__(state, module, plan)

    def gradients(
        self, plan: Plan, state: DistState, batch: Any
    ) -> tuple[DistState, Grads, Report]:
        """Add up the gradients of all virtual ranks, as a binary tree over slices and ranks."""
        for parameter in self.reachable:
            parameter.grad = None
        try:
            slices, total, samples, stop = self._exchange_slices(plan, state, batch)
            loss, metrics, tensors = self._sum(plan, state, slices, total)
        except BaseException as error:
            self.parameters.explain(error)
            raise
        for parameter, tensor in zip(self.trained, tensors, strict=True):
            parameter.grad = tensor
        extras = {"stop": stop} if plan.should_stop else {}
        report = self.layout.report(loss, total, samples=samples, metrics=metrics, extras=extras)
        grads = take_gradients(self, state, total)
        for pair in counted_in(metrics).values():
            grads = grads.scaled(by_count(pair[1]))
        return state, grads, report

    def evaluating(
        self, plan: Plan, state: DistState, function: str
    ) -> AbstractContextManager[None]:
        """Return an empty context: all ranks have the same saved buffers already."""
        return nullcontext()

    def signature(self) -> Mapping[str, Any]:
        """Return the settings that determine the exact result together with the plan."""
        return {"num_virtual_ranks": self.num_virtual_ranks}

    def _sum(
        self, plan: Plan, state: DistState, slices: Sequence[Slice], total: Weight
    ) -> tuple[Tensor, Mapping[str, Tensor], Tensors]:
        """Compute the mean loss, the metrics and the gradients of the global batch."""
        zero = self.layout.zero(state)
        if not total:
            none = self.layout.means({}, total, zero)
            return zero, none, [torch.zeros_like(each) for each in self.trained]
        tree, first = Tree(), state.rank * len(slices)
        metrics = [MetricSums() for _ in slices]

        def run() -> None:
            with exclusive_random(state.device), loss_of(self):
                for number, ((parts, weights), sums) in enumerate(
                    zip(slices, metrics, strict=True)
                ):
                    key_random(state, first + number)
                    tree.add(self._summed(plan, state, parts, weights, total, sums))

        run_or_raise_on_all(run, state)
        vector = self._metric_vector(state, metrics, zero)
        mean, *tensors = sum_over_ranks(
            [*tree.total(), *vector], [zero, *self.trained, *vector], state
        )
        assert mean is not None
        if not vector:
            return mean, {}, tensors
        *tensors, summed = tensors
        return mean, self._metric_means(summed, total), tensors

    def _metric_vector(
        self, state: DistState, metrics: Sequence[MetricSums], like: Tensor
    ) -> list[Tensor]:
        """Sum the metrics of this rank's slices; the first element is not 0 if slices differ in metrics.

        Without metrics, return an empty list.
        """
        layout = self.layout
        self._differing = layout.settle(state, metrics)
        if not layout.sizes and not layout.terms:
            # Without metrics, the ranks exchange no sums in which the other ranks could see this
            # error. Keep it until the next step, in which all ranks raise.
            layout.pending_error = self._differing
            return []
        tree, is_wrong = Tree(), self._differing is not None
        for each in metrics:
            terms = layout.vector(each.found or {}, like, is_wrong=is_wrong)
            tree.add([torch.cat([like.new_full((1,), float(is_wrong)), *terms])])
        (vector,) = tree.total()
        assert vector is not None
        return [vector]

    def _metric_means(self, summed: Tensor | None, total: Weight) -> Mapping[str, Tensor]:
        """Return the metrics of the global batch; raise on all ranks if metrics differ on one."""
        assert summed is not None
        if summed[0]:
            raise self._differing or differing_elsewhere(self.layout)
        return self.layout.means(self.layout.unpacked(summed[1:]), total, summed)

    def _summed(
        self,
        plan: Plan,
        state: DistState,
        parts: Parts,
        weights: Weights,
        total: Weight,
        metrics: MetricSums,
    ) -> Tensors:
        """Return a virtual rank's part of the global batch's mean loss and gradients."""
        mean: Tensor | None = None
        backward = wide_backward(self.backward, self.halves, len(parts))
        for part, weight in zip(parts, weights, strict=True):
            part = _in_own_memory(state, part)
            loss, found = outcome = self.outputs(plan, state, part, weight)
            if self.observers.of_outcomes:
                self.observers.on_outcome(part, outcome)
            part_of_all = shares(weight, total)
            counted = counted_in(found)
            if len(counted) > 1:
                raise LossError(
                    "step: loss_fn must return one (sum, count) under reproducible with virtual ranks, got "
                    f"{len(counted)} terms; give weight_fn a mapping, and return means"
                )
            share = (1.0,) if self.layout.is_sum or counted else part_of_all
            backward(loss, seed_of(loss, share, state.scaler))
            if not weight:
                self.zero_gradients()
                continue
            self._check_dense(plan)
            term = weighed(loss.detach().to(self.layout.dtype), share)
            mean = term if mean is None else mean + term
            metrics.add(found, part_of_all[0], term)
        tensors = [mean, *[parameter.grad for parameter in self.trained]]
        for parameter in self.reachable:
            parameter.grad = None
        return tensors

    def _exchange_slices(
        self, plan: Plan, state: DistState, batch: Any
    ) -> tuple[Sequence[Slice], Weight, int, bool]:
        """Return this rank's slices, the weight and rows of all slices, and whether to stop."""
        failure: Exception | None = self.layout.pending_error
        rows, slices, stop = -1, list[Slice](), False
        try:
            stop = any(should_stop() for should_stop in plan.should_stop)
            rows, slices = self._slice(plan, state, batch)
        except Exception as error:
            failure = error
        weights = [total_weight(each) for _, each in slices]
        if failure:
            weights = [(math.nan,) * (len(plan.terms) or 1)]
        name = step_name(state.step + 1, state.call)
        place = number_of(place_of(batch))
        ranks = primitives.exchange((rows, weights, stop, name, place), state, "step")
        check_same_step([each for _, _, _, each, _ in ranks])
        check_same_place([each for *_, each in ranks])
        whole = total_weight([each for _, of_slices, *_ in ranks for each in of_slices])
        total = checked_total(whole, failure)
        self._check_rows([each for each, *_ in ranks])
        samples = sum(each for each, *_ in ranks)
        return slices, total, samples, any(each for _, _, each, *_ in ranks)

    def _slice(self, plan: Plan, state: DistState, batch: Any) -> tuple[int, list[Slice]]:
        """Return this rank's number of samples and its slices; no slices if they would differ in size."""
        self.parameters.check()
        check_tracking(self._tracking, "step")
        if type(batch) is FailedBatch:
            raise batch.error
        rows, num_own = count_samples(batch), self.num_virtual_ranks // state.world_size
        if rows % num_own:
            return rows, []
        return rows, [
            microbatches(plan, each, with_weightless=True)[:2]
            for each in split_rows(batch, part_sizes(rows, num_own))
        ]

    def _check_rows(self, rows: Sequence[int]) -> None:
        """Refuse, on all ranks, slices that would depend on the number of ranks."""
        if sum(rows) % self.num_virtual_ranks or min(rows) != max(rows):
            got = " + ".join(map(str, rows))
            raise BatchError(
                "step: batch must have a number of samples that "
                f"num_virtual_ranks={self.num_virtual_ranks} of reproducible "
                f"divides, as many on every rank, got {got}; let it divide batch_size, and use "
                "drop_last=True"
            )

    def _check_dense(self, plan: Plan) -> None:
        """Refuse sparse gradients: the sum over virtual ranks supports only dense ones."""
        for parameter in self.reachable:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                named = plan.model.named_parameters()
                name = next(name for name, each in named if each is parameter)
                rule, repair = "have dense gradients", "use sparse=False"
                raise PlanError(message("step", "reproducible's model", rule, name, repair))


def tracking_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Find, by name, the modules that track running statistics of batches, and each SyncBatchNorm."""
    return {
        name or "the model": module
        for name, module in model.named_modules()
        if isinstance(module, nn.SyncBatchNorm)
        or (isinstance(module, _TRACKING) and module.track_running_stats)
    }


def check_tracking(tracking: Mapping[str, nn.Module], function: str) -> None:
    """Refuse running statistics, which each rank would compute from its own samples."""
    for name, module in tracking.items():
        if module.training:
            raise PlanError(
                f"{function}: reproducible's model must take no running statistics of batches, got {name}, "
                f"a {type(module).__name__} in training mode; use GroupNorm or track_running_stats=False, "
                "or freeze it by eval()"
            )


def _in_own_memory(state: DistState, part: Any) -> Any:
    """Copy a part of a batch into new memory.

    The address of a tensor changes how some kernels round, and a part of a batch may begin at any
    address.
    """

    def own(tensor: Tensor) -> Tensor:
        # Do not copy a tensor on another device: moving the tensor to this device copies it anyway.
        return tensor.clone() if tensor.device == state.device else tensor

    return map_tensors(own, part)


def run_or_raise_on_all(run: Callable[[], None], state: DistState) -> None:
    """Run this rank's work; if a rank raises, raise its error there and a PeerError on other ranks.

    Cost: in a world of several, one small collective on the host, and two more if a rank failed.
    """
    failure: Exception | None = None
    try:
        run()
    except Exception as error:
        failure = error
    failures = exchange_failures(state, "" if failure is None else f"{failure!r}{_place(failure)}")
    try:
        if failure is not None:
            raise failure
    finally:
        # Delete the local reference: otherwise the error and this frame keep each other alive.
        del failure
    for rank, text in enumerate(failures):
        if text:
            raise PeerError(f"step: failed on rank {rank}: {text}")


def check_same_step(steps: Sequence[str]) -> None:
    """Raise on all ranks if steps differ, for example if a rank repeats a step after an error."""
    rank, step = next(
        ((r, each) for r, each in enumerate(steps) if each != steps[0]), (0, steps[0])
    )
    if rank:
        raise WorldError(
            f"step: every rank must be in the same step, got step {steps[0]} on rank 0 and "
            f"{step} on rank {rank}; a rank that catches an error of a step must not go on alone"
        )


def _place(error: Exception) -> str:
    """Return the line of the user's code that raised an error, if known."""
    others = (f"{Path(__file__).parents[2]}{sep}", *(f"{each}{sep}" for each in torch.__path__))
    frames = [
        each for each in extract_tb(error.__traceback__) if not each.filename.startswith(others)
    ]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
