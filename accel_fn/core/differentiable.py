"""Collectives with gradients, and a check whether a loss may call them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from accel_fn.core import primitives
from accel_fn.core.batch import map_tensors
from accel_fn.core.state import DistState
from accel_fn.errors import BatchError

P = ParamSpec("P")
T = TypeVar("T")


def _is_alone(*arguments: object) -> bool:
    return any(isinstance(each, DistState) and each.world_size == 1 for each in arguments)


def eager(fn: Callable[P, T]) -> Callable[P, T]:
    """Make torch.compile break its graph at this function, so that collectives run outside of graphs."""
    outside: Callable[P, T] = torch._disable_dynamo(fn)  # type: ignore[attr-defined]

    @wraps(fn)
    def call(*args: P.args, **keywords: P.kwargs) -> T:
        # Call `outside` only during a compilation, since the call imports the compiler. With one
        # rank there is no collective, so the call stays in the graph.
        if torch.compiler.is_compiling() and not _is_alone(*args, *keywords.values()):
            return outside(*args, **keywords)
        return fn(*args, **keywords)

    return call


class Running(Protocol):
    """The global batch whose loss is being computed."""

    num_microbatches: int
    is_evenly_split: bool
    """Whether every rank has the same number of micro-batches."""
    is_exact_over_ranks: bool
    """Whether gradients are averaged over all ranks."""
    calls_collectives: bool
    """Whether the loss has called a collective."""


class _Training(threading.local):
    """Holds, for each thread, a function that returns the batch whose loss the thread computes."""

    batch: Callable[[], Running | None] | None = None


TRAINING = _Training()


def _running() -> Running | None:
    return None if TRAINING.batch is None else TRAINING.batch()


def is_training() -> bool:
    """Return whether this thread computes the loss of a step."""
    return _running() is not None


def in_graph(tensor: object) -> bool:
    """Return whether autograd records operations on this tensor."""
    return isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled()


@contextmanager
def loss_of(running: Running) -> Iterator[None]:
    """Record, inside the context, that this thread computes the loss of this batch."""
    TRAINING.batch = lambda: running
    try:
        yield
    finally:
        TRAINING.batch = None


def inexact(
    function: str, leaves: Sequence[Any], state: DistState, *, joins_rows: bool = False
) -> str:
    """Return why a loss that calls this collective would differ from the loss on one process.

    Return "" if it would not differ, or if this is not a loss under training. If the reason holds
    on all ranks, raise it at once. `joins_rows` is True for `gather`, whose rows matter even
    without a gradient.
    """
    running = _running()
    if running is None:
        return ""
    running.calls_collectives = True
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    has_graph = any(map(in_graph, tensors))
    if (joins_rows or has_graph) and running.num_microbatches > 1:
        problem = (
            f"be of the whole batch where a loss is computed, got one of {running.num_microbatches} "
            "parts of it, whose loss leaves the rows of the others out; leave out accumulate or "
            "reproducible"
        )
        if running.is_evenly_split:
            raise BatchError(f"{function}: tree must {problem}")
        return problem
    if state.world_size == 1:
        return ""
    if has_graph and not running.is_exact_over_ranks:
        return (
            "hold no tensor with a graph where ranks train separately, got one in a loss under local_sgd; "
            "use wrap_ddp or wrap_fsdp, or detach it"
        )
    # The usual recipe gathers under no_grad() and then inserts the rank's own rows. Refuse it: on
    # several ranks, its gradients differ from those on one rank. Accept a tensor that was detached
    # earlier: it looks like a tensor that never had a graph, such as the keys of a momentum
    # encoder.
    if joins_rows and not torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        return (
            "hold tensors with their graph where a loss is computed, got one under no_grad(), for "
            "which rows put back by hand train otherwise on several ranks; gather is differentiable: "
            "call it outside of no_grad(), or pass a detach() of what needs no gradient"
        )
    return ""


def detached_in_no_grad(tree: Any) -> Any:
    """Return a tree unchanged; under no_grad, detach its tensors, as a collective does."""
    return tree if torch.is_grad_enabled() else map_tensors(_without_graph, tree)


def refuse_inexact(function: str, problem: str) -> None:
    """Raise the problem that `inexact` returned, if there is one."""
    if problem:
        raise BatchError(f"{function}: tree must {problem}")


def _without_graph(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def with_gradients(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    own_part: Callable[[int, Tensor], Tensor | None],
    state: DistState,
    function: str,
) -> list[Tensor]:
    """Connect the outputs of a collective to the autograd graph of its inputs.

    Every rank's outputs depend on every rank's inputs. So the backward sums the gradient of each
    output over the ranks, then `own_part(place, gradient)` selects the gradient of this rank's
    input. All ranks must run the backward; if one rank runs another collective instead, all raise.

    Args:
        outputs: equal on all ranks, without a graph.
        inputs: one of this rank's inputs per output. A rank without inputs passes any tensors with
            a graph, since torch runs a backward only if it leads to trained parameters.
        own_part: maps the place and the summed gradient of an output to the gradient of its input,
            or None.
        state: this rank's state.
        function: the name of the public function.

    Returns:
        The outputs, which require a gradient on every rank.

    Cost: in the backward, one small collective, and one all-reduce per output.
    """
    if not outputs:
        return []
    # The anchor requires a gradient. So a rank whose inputs have no graph runs the backward too.
    # Otherwise the other ranks would hang in the collective of the backward.
    anchor = torch.zeros((), requires_grad=True)
    call = _Call(list(outputs), own_part, state, f"{function} grad")
    return list(_SummedBackward.apply(call, anchor, *inputs))  # type: ignore[no-untyped-call]


class _Call:
    """The data that the backward of one collective call needs."""

    def __init__(
        self,
        outputs: list[Tensor],
        own_part: Callable[[int, Tensor], Tensor | None],
        state: DistState,
        function: str,
    ) -> None:
        self.outputs, self.own_part, self.state, self.function = outputs, own_part, state, function

    def gradients(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Sum the gradients of the outputs over the ranks; return this rank's part of each sum."""
        # If a rank is in the backward of another call, the function names differ and all ranks
        # raise. Without this check, the ranks would add up gradients of different calls without an
        # error.
        primitives.exchange_number(len(gradients), self.state, self.function)
        found = []
        for place, gradient in enumerate(gradients):
            # On some ranks, the leaf may be on the host, and so its gradient too. Move the gradient
            # to the device of the state, on which all ranks sum.
            there = gradient.to(self.state.device)
            total = there.resolve_conj().clone(memory_format=torch.contiguous_format)
            real = torch.view_as_real(total) if total.is_complex() else total
            primitives.start_sum(real, self.state, self.function).wait()
            found.append(self.own_part(place, total))
        return found


class _SummedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, _anchor: Tensor, *_inputs: Tensor) -> tuple[Tensor, ...]:
        outputs, call.outputs = call.outputs, []
        ctx.call = call
        # Autograd does not treat detached outputs as views, so the caller may write to them.
        return tuple([each.detach() for each in outputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        num_inputs = len(ctx.needs_input_grad) - 2
        found = [*ctx.call.gradients(gradients), *[None] * num_inputs]
        return (None, None, *found[:num_inputs])
