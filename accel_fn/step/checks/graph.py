"""Checks of the graph of a loss: what its backward would miss without an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet, ref

from torch import Tensor, nn
from torch.autograd.graph import Node

from accel_fn.base.batch import tensors_of
from accel_fn.base.warn import warn_user
from accel_fn.base.weights import Weight
from accel_fn.comm.dtensor import is_sharded
from accel_fn.errors import LossError, PlanError
from accel_fn.step.checks.parameters import mixed, no_graph, replaced
from accel_fn.step.loss_module import Outcome
from accel_fn.step.plan import Plan

Forward = Callable[[Any, Weight], Outcome]
"""The forward of a micro-batch of this weight."""
_BUILT: WeakSet[GraphChecks] = WeakSet()
"""The checks of every step in this process: the loss of one half of a GAN reaches the other half."""


class GraphChecks:
    """Looks at the graphs of a few steps. Every other step looks only at which gradients are missing."""

    def __init__(
        self, plan: Plan, reachable: Sequence[nn.Parameter], *, finds_unused: bool, is_main: bool
    ) -> None:
        self.is_due = True
        """Does the next step look at the graphs of its losses?"""
        self._is_first = True
        """Has no micro-batch of that step had its backward yet?"""
        self._plan = plan
        self._reachable = reachable
        self._trained = plan.trained()
        self._known = {*map(id, reachable), *map(id, plan.model.parameters())}
        self._finds_unused = finds_unused
        """May a loss miss parameters?"""
        self._is_main = is_main
        self.unused: list[str] = []
        """Parameters that a loss on one process has missed, and that several ranks would wait for."""
        self._looks_for_unused = finds_unused and bool(plan.having("needs_every_parameter"))
        self._outside: list[ref[Tensor]] = []
        """Leaves of the graphs so far that were in no model of a plan, and in no batch."""
        self._warned: list[ref[Tensor]] = []
        self._seen: set[tuple[bool, ...]] = set()
        """Which gradients were missing in steps that were right."""
        _BUILT.add(self)

    def _parameters(self) -> list[nn.Parameter]:
        return [*self._reachable, *self._plan.model.parameters()]

    def watched(self, outputs: Forward) -> Forward:
        """Return the forward of a micro-batch; if a look is due, with a look at the graph of its loss."""
        if not self.is_due:
            return outputs
        self.is_due, self._is_first = False, True

        def looked(part: Any, weight: Weight) -> Outcome:
            loss, metrics = outputs(part, weight)
            if part is not None:
                self._check_graph(loss, part)
                self._is_first = False
            return loss, metrics

        return looked

    def _check_graph(self, loss: Tensor, part: Any) -> None:
        if not loss.requires_grad:
            raise no_graph()
        if is_sharded(loss):
            raise mixed()
        # Before the first backward of a step, only the loss itself can have written gradients.
        if self._is_first and any(parameter.grad is not None for parameter in self._reachable):
            raise LossError(
                "step: loss_fn must leave .grad of the model's parameters alone, got one that writes "
                "it (backward, or autograd.grad by hand), which no other rank would see; return the loss"
            )
        nodes = nodes_of(loss)
        if hides_parameters(loss):
            raise LossError(
                "step: loss_fn must not use torch.utils.checkpoint with use_reentrant=True, which "
                "hides parameters from the step's backward, got a graph with it; use "
                "use_reentrant=False, or checkpoint_activations()"
            )
        leaves = [each for each in map(_leaf, nodes) if each is not None]
        unknown = [each for each in leaves if id(each) not in self._known]
        if unknown:
            for name, parameter in self._plan.model.named_parameters():
                if any(parameter is each for each in unknown):
                    raise replaced(name)
            if self._is_main:
                self._warn_of_outside(unknown, part)

    def _warn_of_outside(self, leaves: Sequence[Tensor], part: Any) -> None:
        """Warn once of leaves that get no gradient from this step, nor from that of another plan."""
        # Of objects that are alive, since the id of a dead one may be that of a new one.
        known = [*tensors_of(part), *(each for checks in _BUILT for each in checks._parameters())]
        known += [each for each in (warned() for warned in self._warned) if each is not None]
        ids = {*map(id, known)}
        outside = [each for each in leaves if id(each) not in ids]
        before = {id(each) for each in (leaf() for leaf in self._outside) if each is not None}
        # A tensor that the loss makes anew for every batch, such as the points of a penalty, is not
        # trained: only a parameter, or a tensor that is still there at the next look, may be.
        wrong = [each for each in outside if isinstance(each, nn.Parameter) or id(each) in before]
        self._outside += map(ref, outside)
        if wrong:
            self._warned += map(ref, wrong)
            shapes = [list(each.shape) for each in wrong[:3]]
            warn_user(
                "step: loss_fn should reach what is trained by the model given to it, got "
                f"{len(wrong)} other tensors that require a gradient and get none, of shapes {shapes}; "
                "join the modules in one nn.ModuleDict, or call requires_grad_(False) on what is not "
                "trained, such as a teacher"
            )

    def check_gradients(self, grads: Sequence[Tensor | None], weighs: bool) -> None:
        """Check the gradients of a step: the loss may miss some parameters, not all."""
        if not weighs:
            return
        missing = tuple([grad is None for grad in grads])
        if True in missing and missing not in self._seen:
            self.check_reached()
            self._seen.add(missing)
            if self._looks_for_unused and not self.unused:
                self._note_unused()

    def _note_unused(self) -> None:
        """Warn once of what one process trains and several ranks refuse."""
        named = self._plan.model.named_parameters()
        self.unused = [n for n, p in named if p.requires_grad and p.grad is None]
        if self._is_main:
            warn_user(
                "step: loss_fn should reach all parameters that require a gradient, got none for "
                f"{_some(self.unused)}, which wrap_ddp refuses on several ranks; freeze what is not used, or "
                "wrap_ddp(find_unused_parameters=True)"
            )

    def check_reached(self) -> None:
        """Refuse a loss that misses the model, or misses parameters that DDP waits for."""
        named = self._plan.model.named_parameters()
        missed = {n: p for n, p in named if p.requires_grad and p.grad is None}
        for name, parameter in missed.items():
            if id(parameter) not in self._known:
                raise replaced(name)
        nothing = all(parameter.grad is None for parameter in self._trained)
        if nothing or (missed and not self._finds_unused):
            for name, parameter in missed.items():
                if parameter._post_accumulate_grad_hooks:
                    raise PlanError(
                        "step: model must have no post-accumulate-grad hooks that clear all gradients, "
                        f"got one on {name}; let the optimizer step after the backward"
                    )
            raise not_reached([*missed])


def not_reached(names: Sequence[str]) -> LossError:
    """The error for a loss whose backward leaves these parameters out."""
    some = _some(names)
    return LossError(
        f"step: loss_fn must reach the model's parameters by the model given to it, got no gradient "
        f"for {some or 'some in the last micro-batch'}; no functional_call on copies, freeze what is not "
        "used, or wrap_ddp(find_unused_parameters=True)"
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def nodes_of(loss: Tensor) -> list[Node]:
    """The nodes of the graph of a loss."""
    ahead = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = {*ahead}
    while ahead:
        following = {node for node, _ in ahead.pop().next_functions if node is not None}
        ahead += following - seen
        seen |= following
    return [*seen]


def hides_parameters(loss: Tensor) -> bool:
    """Does a reentrant checkpoint hide parameters from a backward into given ones?"""
    return any(each.name().endswith("CheckpointFunctionBackward") for each in nodes_of(loss))


def leaves_of(loss: Tensor) -> list[Tensor]:
    """The leaves of the graph of a loss that get a gradient."""
    return [each for each in map(_leaf, nodes_of(loss)) if each is not None]


def _leaf(node: Node) -> Tensor | None:
    """The leaf whose gradient a node accumulates, if it does."""
    variable: Tensor | None = getattr(node, "variable", None)
    return variable
