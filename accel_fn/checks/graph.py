"""Check the graph of a loss for tensors that its backward would silently miss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet, ref

from torch import Tensor, nn
from torch.autograd.graph import Node

from accel_fn.core.batch import tensors_of
from accel_fn.core.dtensor import is_sharded
from accel_fn.core.loop import Strategy
from accel_fn.core.parameters import mixed, no_graph, replaced
from accel_fn.core.plan import Plan
from accel_fn.core.state import DistState
from accel_fn.core.warn import warn_user
from accel_fn.errors import LossError

_BUILT: WeakSet[GraphCheck] = WeakSet()
"""The checks of all steps in this process: the loss of one half of a GAN reaches the other half."""


class GraphCheck:
    """Checks the autograd graphs of the losses of a step's micro-batches."""

    def __init__(self, plan: Plan, strategy: Strategy, state: DistState) -> None:
        self._plan = plan
        self._reachable = strategy.reachable
        self._in_graph = strategy.in_graph
        self._known = {*map(id, self._in_graph), *map(id, plan.model.parameters())}
        self._is_main = state.is_main
        self._is_first = True
        """Whether the next micro-batch is the first one of the step."""
        self._outside: list[ref[Tensor]] = []
        """Leaves of earlier graphs that were in no model of a plan, and in no batch."""
        self._warned: list[ref[Tensor]] = []
        _BUILT.add(self)

    def _parameters(self) -> list[nn.Parameter]:
        return [*self._in_graph, *self._plan.model.parameters()]

    def begin(self) -> None:
        """Record that a step begins, so the next micro-batch is its first."""
        self._is_first = True

    def look(self, loss: Tensor, part: Any) -> None:
        """Check the graph of a micro-batch's loss; skip a `part` of None, which has no items."""
        if part is not None:
            self._check_graph(loss, part)
            self._is_first = False

    def _check_graph(self, loss: Tensor, part: Any) -> None:
        if not loss.requires_grad:
            raise no_graph()
        if is_sharded(loss):
            raise mixed()
        # Before the first backward of a step, `.grad` is None unless the loss itself has written to
        # it.
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
        """Warn once about leaves that get no gradient from this step or from another plan."""
        # Compare only the ids of tensors that still exist: a new object may get the id of a deleted
        # one.
        known = [*tensors_of(part), *(each for checks in _BUILT for each in checks._parameters())]
        known += [each for each in (warned() for warned in self._warned) if each is not None]
        ids = {*map(id, known)}
        outside = [each for each in leaves if id(each) not in ids]
        before = {id(each) for each in (leaf() for leaf in self._outside) if each is not None}
        # A tensor that the loss makes for each batch is not trained, such as the points of a
        # gradient penalty. So warn only about parameters, and about tensors that still exist at the
        # next check.
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


def nodes_of(loss: Tensor) -> list[Node]:
    """Return the nodes of the graph of a loss."""
    ahead = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = {*ahead}
    while ahead:
        following = {node for node, _ in ahead.pop().next_functions if node is not None}
        ahead += following - seen
        seen |= following
    return [*seen]


def hides_parameters(loss: Tensor) -> bool:
    """Return whether a reentrant checkpoint hides parameters from a backward with given inputs."""
    return any(each.name().endswith("CheckpointFunctionBackward") for each in nodes_of(loss))


def leaves_of(loss: Tensor) -> list[Tensor]:
    """Return the leaf tensors in a loss's graph that get a gradient from its backward."""
    return [each for each in map(_leaf, nodes_of(loss)) if each is not None]


def _leaf(node: Node) -> Tensor | None:
    """Return the leaf tensor to whose `.grad` a node adds; None for other nodes."""
    variable: Tensor | None = getattr(node, "variable", None)
    return variable
