"""Checks of a step: the graph of its loss, and that its parameters are still those of `build`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from accel_fn.errors import LossError, PlanError
from accel_fn.step.plan import Plan

_REPAIR = "build again, or train all from the start and freeze(names, until=...) those"


class TrainedParameters:
    """The optimizers' parameters as `build` found them: a step gives gradients for no others."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._optimizers = [*plan.optimizers.values()]
        lists = [group["params"] for each in self._optimizers for group in each.param_groups]
        self._lists = [(each, len(each)) for each in lists]
        self._given = [p for each in lists for p in each]
        self._frozen = [p for p in self._given if not p.requires_grad]

    def check(self) -> None:
        """Refuse parameters that were added since `build`, which would not be trained.

        Cost: a look at each group, and at each parameter that was frozen.
        """
        lists = [group["params"] for each in self._optimizers for group in each.param_groups]
        if len(lists) != len(self._lists):
            self._compare(lists)
        for now, (then, length) in zip(lists, self._lists, strict=False):
            if now is not then or len(now) != length:
                self._compare(lists)
        for parameter in self._frozen:
            if parameter.requires_grad:
                named = self._plan.model.named_parameters()
                name = next((name for name, each in named if each is parameter), "one")
                raise PlanError(
                    "step: parameters that required no gradient in build must not require one, got "
                    f"{name}; {_REPAIR}"
                )

    def _compare(self, lists: Sequence[Sequence[nn.Parameter]]) -> None:
        now = [p for each in lists for p in each]
        if [*map(id, now)] != [*map(id, self._given)]:
            got = "others" if len(now) == len(self._given) else len(now)
            raise PlanError(
                f"step: optimizer must hold the {len(self._given)} parameters that build found in it, "
                f"got {got}; {_REPAIR}"
            )

    def explain(self, error: BaseException) -> None:
        """Raise a clearer error if a backward failed because parameters were frozen since `build`."""
        if not isinstance(error, RuntimeError):
            return
        frozen_before = {id(each) for each in self._frozen}
        trained = {id(each) for each in self._given} - frozen_before
        for name, parameter in self._plan.model.named_parameters():
            if not parameter.requires_grad and id(parameter) in trained:
                raise PlanError(
                    "step: parameters that required a gradient in build must still do so, got "
                    f"{name}; build again, or freeze those"
                ) from error


class GraphChecks:
    """Refuses losses whose backward would miss parameters without an error."""

    def __init__(
        self, plan: Plan, trainable: Sequence[nn.Parameter], *, finds_unused: bool
    ) -> None:
        self._plan = plan
        self._trainable = trainable
        self._trained = plan.trained()
        self._finds_unused = finds_unused
        """May the loss miss parameters?"""
        self._is_new = True
        """Is the graph of the next loss to be searched for reentrant checkpoints?"""
        self._missing: list[bool] = []
        """For each trained parameter: did the last backward that missed some miss it?"""

    def before_backward(self, loss: Tensor, part: Any) -> None:
        """Check the first micro-batch of a step: its loss, and that no gradient is there yet."""
        if not loss.requires_grad:
            raise LossError(
                "step: loss_fn must return a loss with a graph, got one that requires no gradient; "
                "leave out detach() and no_grad()"
            )
        for parameter in self._trainable:
            if parameter.grad is not None:
                raise LossError(
                    "step: loss_fn must leave .grad of the model's parameters alone, got one that writes "
                    "it (backward, or autograd.grad by hand), which no other rank would see; return the loss"
                )
        if self._is_new and part is not None:
            check_recomputed(loss)
            self._is_new = False

    def after_backward(self, grads: Sequence[Tensor | None], weight: float) -> None:
        """Check the gradients of a step: parameters without one may be hidden by a checkpoint."""
        if not weight or all(grad is not None for grad in grads):
            return
        self.check_reached()
        missing = [grad is None for grad in grads]
        if missing != self._missing:
            self._missing, self._is_new = missing, True

    def check_reached(self) -> None:
        """Refuse a loss that misses the model, or misses parameters that DDP waits for."""
        named = self._plan.model.named_parameters()
        names = [name for name, p in named if p.requires_grad and p.grad is None]
        nothing = all(parameter.grad is None for parameter in self._trained)
        if nothing or (names and not self._finds_unused):
            some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise LossError(
                f"step: loss_fn must reach the model's parameters by the model given to it, got no gradient "
                f"for {some}; no functional_call on copies, freeze what is not used, or "
                "wrap_ddp(find_unused_parameters=True)"
            )


def check_recomputed(loss: Tensor) -> None:
    """Refuse activation checkpoints with `use_reentrant=True`.

    The graph of what is computed again begins within the backward, so the engine does not
    know that a backward to these parameters passes here: it leaves them out, or fails.

    Cost: a walk over the graph.
    """
    seen: set[Node] = set()
    ahead = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        if node.name().endswith("CheckpointFunctionBackward"):
            raise LossError(
                "step: loss_fn must not use torch.utils.checkpoint with use_reentrant=True, which hides "
                "parameters from the step's backward, got a graph with it; use use_reentrant=False, or "
                "checkpoint_activations()"
            )
        seen.add(node)
        ahead += [each for each, _ in node.next_functions]
