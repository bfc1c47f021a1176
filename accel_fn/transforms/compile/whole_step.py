"""Run the whole step, from the split of the batch to the optimizers, as one compiled function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accel_fn.core.grads import HALF, Grads
from accel_fn.core.loss import LossModule, in_contexts, loss_module_of, placed
from accel_fn.core.mean import Layout, MetricSums, sizes_of
from accel_fn.core.microbatches import Parts, Weights, microbatches
from accel_fn.core.plan import Plan, trained_by
from accel_fn.core.report import Report
from accel_fn.core.state import DistState, LossScale
from accel_fn.core.step import Stages
from accel_fn.core.torch_compile import reason_of, without_clock
from accel_fn.core.weights import Weight, shares, total_weight
from accel_fn.errors import LossError
from accel_fn.transforms.compile.optimizer_in_graph import (
    Captured,
    Group,
    Memory,
    gradients_of,
    keeps_tensors,
)
from accel_fn.transforms.compile.plan_guards import PlanGuards

GraphFn = Callable[..., Any]
_SCALE_FIELDS = ("scale", "good_steps", "skipped")


class CompiledStep:
    """Runs a step as one compiled function.

    It runs the stages uncompiled until the optimizers have their state, and for a batch with
    micro-batches of weight 0.
    """

    def __init__(
        self, state: DistState, stages: Stages, compile_graph: Callable[[GraphFn], GraphFn]
    ) -> None:
        # Call this here and not at import, since the call imports the compiler.
        torch.compiler.allow_in_graph(gradients_of)  # type: ignore[no-untyped-call]
        plan = stages.plan
        self._plan = plan
        self._stages = stages
        self._parameters = stages.strategy.parameters
        self._guards = PlanGuards(plan)
        optimizers = list(plan.optimizers.values())
        self._captured = [Captured(each, trained_by(each), state.device) for each in optimizers]
        module = loss_module_of(stages.strategy.module)
        self._layout = stages.strategy.layout
        self._run = compile_graph(_graph_function(plan, module, self._captured, self._layout))
        self._always = torch.ones((), dtype=torch.bool, device=state.device)
        """The value of `applied` if no loss scale decides whether an update is applied."""
        self._stateful = [each for each in optimizers if keeps_tensors(each, state.device)]
        """The optimizers that keep tensors between updates."""
        self._has_added_parameters = any(
            0 < len(each.state) < len(trained_by(each)) for each in optimizers
        )
        """Whether the next update makes state for parameters that were added later than others."""
        self._shares_before: tuple[tuple[float, ...], Tensor] = ((), self._always)
        """The micro-batches' shares in the last step, as numbers and as a tensor on the device."""
        self._is_new = True
        """Whether there is no graph yet."""

    def __call__(self, state: DistState, batch: Any) -> tuple[DistState, Report]:
        """Run a step without `after_update`."""
        plan = self._plan
        self._guards.check()
        if not self._is_ready():
            return self._stages(state, batch)
        stops = [should_stop() for should_stop in plan.should_stop]
        self._parameters.check()
        parts, weights, rows = microbatches(plan, batch, with_weightless=True)
        # If a micro-batch has weight 0, run the stages without the graph: they zero its gradients,
        # and the graph does not.
        if () in weights:
            return self._stages(state, batch)
        of_parts = self._shares(state, weights) if len(weights) != 1 else None
        if plan.place_batch:
            parts = [placed(state, plan, part) for part in parts]
        if not parts:
            # Without micro-batches, run the loss of None: its value is 0, and its gradients are
            # zeros.
            parts = (None,)
        loss, norm, accepted, scale, found = self._call_graph(state, parts, of_parts)
        weight = total_weight(weights)
        metrics = self._metric_means(state, found, weight, loss)
        report = self._layout.report(
            loss,
            weight,
            samples=rows,
            metrics=metrics,
            grad_norm=norm,
            applied=self._always if accepted is None else accepted,
            extras={"stop": any(stops)} if stops else {},
        )
        scaler = state.scaler
        if scaler is not None and scale is not None:
            scaler = replace(scaler, **dict(zip(_SCALE_FIELDS, scale, strict=True)))
        return state.advanced(scaler, rows, report.weight), report

    def _shares(self, state: DistState, weights: Weights) -> Tensor:
        """Return each micro-batch's share of the global mean; a single 0 if there are no micro-batches."""
        total = total_weight(weights)
        every = tuple([shares(weight, total)[0] for weight in weights]) or (0.0,)
        # If the shares are equal to the last ones, reuse their tensor: a copy of new shares to a
        # device would wait for the previous step.
        if every != self._shares_before[0]:
            dtype = torch.float32 if state.device.type == "mps" else torch.float64
            self._shares_before = every, torch.tensor(every, dtype=dtype, device=state.device)
        return self._shares_before[1]

    def _metric_means(
        self, state: DistState, found: Mapping[str, Tensor] | None, weight: Weight, loss: Tensor
    ) -> Mapping[str, Tensor]:
        if not found and self._layout.sizes == {}:
            return {}
        sums = MetricSums(None if found is None else sizes_of(found))
        self._layout.settle(state, [sums])
        return self._layout.means(found or {}, weight, loss)

    def _is_ready(self) -> bool:
        """Return whether the optimizers already have the state that they make in their first update."""
        if self._has_added_parameters:
            self._has_added_parameters = False
            return False
        return all(each.state for each in self._stateful)

    def _call_graph(self, state: DistState, parts: Parts, shares: Tensor | None) -> Any:
        held = self._captured
        optimizers = [(each.memory(), each.settings(), each.rates) for each in held]
        inputs = state, parts, shares, optimizers
        try:
            if not self._is_new:
                return self._run(*inputs)
            self._is_new = False
            for each in held:
                each.settle()
            with without_clock():
                return self._run(*inputs)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise LossError(
                f'step: compiled(scope="step") must fit into the {torch._dynamo.config.recompile_limit} '
                "graphs that torch keeps of a function, got a step that needs one more: another batch "
                "size, or another setting of the optimizer or the model; use dynamic=True, batches of "
                'one size, or scope="loss"'
            ) from error
        except torch._dynamo.exc.TorchDynamoException as error:
            reason, repair = reason_of(error), 'use scope="loss"'
            if "torch.autograd.grad" in reason:
                repair = "call torch.func.grad, or leave out compiled"
            raise LossError(
                f'step: compiled(scope="step") must hold the step in one graph, got {reason}; {repair}'
            ) from error


def _graph_function(
    plan: Plan, module: LossModule, captured: Sequence[Captured], layout: Layout
) -> GraphFn:
    """Make a function that holds all arithmetic of a step, for the compiler."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    trained = [names[each] for each in plan.trained()]

    def whole(
        state: DistState,
        parts: Parts,
        shares: Tensor | None,
        optimizers: Sequence[tuple[Sequence[Memory], Sequence[Group], Tensor]],
    ) -> tuple[
        Tensor, Tensor | None, Tensor | None, tuple[Tensor, ...] | None, dict[str, Tensor] | None
    ]:
        scaler = state.scaler
        sums = MetricSums()
        parameters = [module.get_parameter(name) for name in trained]
        owners = [*zip(trained, parameters, strict=True)]
        tensors: list[Tensor | None] = []
        losses: list[Tensor] = []
        for index, part in enumerate(parts):
            loss, metrics = in_contexts(state, plan.forward_contexts, module.forward, part)
            share = None if shares is None else shares[index]
            of_loss = None if layout.is_sum else share
            found = gradients_of(loss, _seed(loss, of_loss, scaler), parameters)
            added = [_widened(each) for each in found] if len(parts) > 1 else list(found)
            tensors = [_sum(*pair) for pair in zip(tensors, added, strict=True)] if index else added
            losses.append(_times(loss.detach().to(layout.dtype), of_loss))
            if part is not None:
                sums.add(metrics, 1.0 if share is None else share, losses[-1])
        tensors = [
            each if each is None else each.to(parameter.dtype)
            for each, parameter in zip(tensors, parameters, strict=True)
        ]
        # Read the layout only if there are metrics. The first step fixes the layout, and a graph
        # that had read the layout before would be compiled again.
        if sums.wrong or (sums.sizes and sums.differ_from(layout)):
            raise LossError(sums.wrong or "loss_fn returns other metrics than for the first batch")
        with torch.no_grad():
            grads = Grads(tuple(tensors), _factor(tensors, scaler), owners=owners)
            ok = None if scaler is None else torch.isfinite(grads.norm())
            for transform in plan.gradients:
                grads = transform(state, grads)
            values, start = grads.values(), 0
            for each, (memory, groups, rates) in zip(captured, optimizers, strict=True):
                own = slice(start, start + len(memory))
                each.update(groups, rates, memory, parameters[own], values[own], ok)
                start += len(memory)
            norm = grads.norm_read
            scale = None
            if scaler is not None and ok is not None:
                moved = scaler.adjust(ok)
                scale = tuple(getattr(moved, name) for name in _SCALE_FIELDS)
            mean = torch.stack(losses).sum().to(layout.dtype)
            return mean, None if norm is None else norm.float(), ok, scale, sums.found

    return whole


def _seed(loss: Tensor, share: Tensor | None, scaler: LossScale | None) -> Tensor | None:
    """Return the seed of the backward; None means 1."""
    factor = share if scaler is None else _times(scaler.scale, share)
    return None if factor is None else factor.to(loss.dtype)


def _factor(tensors: Sequence[Tensor | None], scaler: LossScale | None) -> Tensor | None:
    """Return the factor that undoes the loss scale in the gradients; None without a loss scale."""
    if scaler is None:
        return None
    double = any(each is not None and each.dtype == torch.float64 for each in tensors)
    return (scaler.scale.double() if double else scaler.scale).reciprocal()


def _times(tensor: Tensor, factor: Tensor | None) -> Tensor:
    return tensor if factor is None else tensor * factor


def _widened(tensor: Tensor | None) -> Tensor | None:
    """Widen a half-precision gradient, so that gradients of other micro-batches can be added in float32."""
    return tensor.float() if tensor is not None and tensor.dtype in HALF else tensor


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Add two gradients; None counts as zero."""
    if first is None or second is None:
        return second if first is None else first
    return first + second
