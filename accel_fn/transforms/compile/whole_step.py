"""The whole step as one function for a compiler: micro-batches, transforms, loss scale, optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from accel_fn.base.state import DistState, LossScale
from accel_fn.base.torch_compile import reason_of, without_clock
from accel_fn.errors import LossError
from accel_fn.step.grads import Grads
from accel_fn.step.loss_module import LossModule, in_contexts, placed
from accel_fn.step.microbatches import Parts, Weights, cut
from accel_fn.step.plan import Plan, Report, WholeFn
from accel_fn.step.trained_parameters import Settled
from accel_fn.transforms.compile.optimizer_in_graph import (
    Captured,
    Group,
    Memory,
    gradients_of,
    keeps_tensors,
)

_MOVING = ("scale", "good_steps", "skipped")


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """A step of one rank that is one call of a compiled function."""

    plan: Plan
    settled: Settled
    captured: Captured
    run: WholeFn
    always: Tensor
    """What `applied` says where nothing is checked."""
    stateless: bool
    """Does the optimizer remember nothing between two updates?"""
    fresh: list[bool]
    """Holds an entry until there is a graph."""
    late: list[bool]
    """Holds an entry until parameters that came to the optimizer after others could be updated."""

    def is_ready(self) -> bool:
        """Does the optimizer have the state that its first update makes?"""
        if self.late:
            self.late.clear()
            return False
        return self.stateless or bool(self.plan.optimizer.state)

    def __call__(self, state: DistState, batch: Any) -> tuple[DistState, Report]:
        plan = self.plan
        extras = {"stop": any(ask() for ask in plan.stops)} if plan.stops else {}
        self.settled.check()
        parts, weights = cut(plan, batch)
        total = sum(weights)
        shares = _shares(state, weights) if len(weights) != 1 else None
        if plan.place_batch:
            parts = [placed(state, plan, part) for part in parts]
        if not parts:
            parts = (None,)  # nothing that counts: a gradient of zero
        loss, norm, ok, scale = self._compiled(state, parts, shares)
        report = Report(
            loss=loss,
            weight=total,
            grad_norm=norm,
            applied=self.always if ok is None else ok,
            extras=extras,
        )
        scaler = state.scaler
        if scaler is not None and scale is not None:
            scaler = replace(scaler, **dict(zip(_MOVING, scale, strict=True)))
        state = state.advanced(scaler)
        for after in plan.after:
            state = after(state, report)
        return state, report

    def _compiled(self, state: DistState, parts: Parts, shares: Tensor | None) -> Any:
        held = self.captured
        inputs = state, parts, shares, held.memory(), held.settings(), held.rates
        try:
            if not self.fresh:
                return self.run(*inputs)
            self.fresh.clear()
            held.settle()
            with without_clock():
                return self.run(*inputs)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise LossError(
                'step: compiled(scope="step") must make do with the '
                f"{torch._dynamo.config.recompile_limit} graphs that torch keeps of a function, got what "
                "needs one more: another batch size, or another setting of the optimizer or of the "
                'model; use dynamic=True, batches of one size, or scope="loss"'
            ) from error
        except torch._dynamo.exc.TorchDynamoException as error:
            raise LossError(
                'step: compiled(scope="step") must hold the step in one graph, got '
                f'{reason_of(error)}; use scope="loss"'
            ) from error


def _shares(state: DistState, weights: Weights) -> Tensor:
    """What each micro-batch counts for; zero where there is none."""
    total = sum(weights)
    shares = [weight / total for weight in weights] or [0.0]
    dtype = torch.float32 if state.device.type == "mps" else torch.float64
    return torch.tensor(shares, dtype=dtype, device=state.device)


def whole_step(state: DistState, plan: Plan, module: LossModule) -> Whole:
    """The step of a plan that has something in `compile_step`."""
    # Here and not above the function, as it imports the compiler.
    torch.compiler.allow_in_graph(gradients_of)  # type: ignore[no-untyped-call]
    captured = Captured(plan.optimizer, plan.trained(), state.device)
    stateless = not keeps_tensors(plan.optimizer, state.device)
    run = plan.compile_step[0](state, _function(plan, module, captured))
    always = torch.ones((), dtype=torch.bool, device=state.device)
    is_late = 0 < len(plan.optimizer.state) < len(plan.trained())
    return Whole(plan, Settled.of(plan), captured, run, always, stateless, [True], [True] * is_late)


def _function(plan: Plan, module: LossModule, captured: Captured) -> WholeFn:
    """All of a step that is arithmetic."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    trained = [names[each] for each in plan.trained()]

    def whole(
        state: DistState,
        parts: Parts,
        shares: Tensor | None,
        memory: Sequence[Memory],
        groups: Sequence[Group],
        rates: Tensor,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, tuple[Tensor, ...] | None]:
        scaler = state.scaler
        parameters = [module.get_parameter(name) for name in trained]
        tensors: list[Tensor | None] = []
        losses: list[Tensor] = []
        for index, part in enumerate(parts):
            loss = in_contexts(state, plan.contexts, module.forward, part)
            share = None if shares is None else shares[index]
            found = gradients_of(loss, _seed(loss, share, scaler), parameters)
            tensors = (
                [_sum(*pair) for pair in zip(tensors, found, strict=True)] if index else list(found)
            )
            losses.append(_times(loss.detach().float(), share))
        with torch.no_grad():
            grads = Grads(tuple(tensors), _factor(tensors, scaler))
            ok = None if scaler is None else torch.isfinite(grads.norm())
            for transform in plan.gradients:
                grads = transform(state, grads)
            captured.update(groups, rates, memory, parameters, grads.values(), ok)
            norm = grads.norm_read
            scale = None
            if scaler is not None and ok is not None:
                moved = scaler.adjust(ok)
                scale = tuple(getattr(moved, name) for name in _MOVING)
            mean = torch.stack(losses).sum().float()
            return mean, None if norm is None else norm.float(), ok, scale

    return whole


def _seed(loss: Tensor, share: Tensor | None, scaler: LossScale | None) -> Tensor | None:
    """What the backward starts from in place of one."""
    factor = share if scaler is None else _times(scaler.scale, share)
    return None if factor is None else factor.to(loss.dtype)


def _factor(tensors: Sequence[Tensor | None], scaler: LossScale | None) -> Tensor | None:
    """What gradients of a scaled loss lack as a factor."""
    if scaler is None:
        return None
    double = any(each is not None and each.dtype == torch.float64 for each in tensors)
    return (scaler.scale.double() if double else scaler.scale).reciprocal()


def _times(tensor: Tensor, factor: Tensor | None) -> Tensor:
    return tensor if factor is None else tensor * factor


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Of what is there."""
    if first is None or second is None:
        return second if first is None else first
    return first + second
