"""Checks of the graph of a loss: what its backward would miss, and whether it is linear."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from accel_fn.base.out_of_memory import is_memory
from accel_fn.errors import LossError


def check_left_out(loss: Tensor, trainable: Sequence[nn.Parameter] | None = None) -> bool:
    """Refuse reentrant checkpoints; if trainable is given, custom Functions that lead to none of it.

    Returns whether there are custom Functions.

    The graph of what a Function computes in its backward begins there, so the engine does not
    know that a backward to these parameters passes here: it leaves them out, or fails.

    Cost: a walk over the graph.
    """
    order = _nodes(loss)
    if any(node.name().endswith("CheckpointFunctionBackward") for node in order):
        raise LossError(
            "step: loss_fn must not use torch.utils.checkpoint with use_reentrant=True, which "
            "hides parameters from the step's backward, got a graph with it; use "
            "use_reentrant=False, or checkpoint_activations()"
        )
    if trainable is not None:
        _check_functions(order, {id(each) for each in trainable})
    # Collectives in it must run as often on all ranks, of which some may have no custom Function.
    kinds = [str(getattr(getattr(node, "_forward_cls", None), "__module__", "")) for node in order]
    return any(map(_custom, order)) and not any(kind.startswith("accel_fn.") for kind in kinds)


def _nodes(loss: Tensor) -> list[Node]:
    """The graph of a loss: the inputs of a node come before it."""
    order: list[Node] = []
    seen: set[Node] = set()
    ahead = [] if loss.grad_fn is None else [(loss.grad_fn, False)]
    while ahead:
        node, is_done = ahead.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            ahead += [(node, True), *((n, False) for n, _ in node.next_functions if n is not None)]
    return order


def leaves(loss: Tensor) -> list[Tensor]:
    """The parameters, and other leaves, that a loss reaches. Cost: a walk over its graph."""
    found = [getattr(node, "variable", None) for node in _nodes(loss)]
    return [each for each in found if each is not None]


def check_own_backwards(loss: Tensor, trainable: Sequence[nn.Parameter]) -> None:
    """Refuse Functions that write gradients of parameters where the step's backward leaves them out.

    The engine runs what leads to the trained parameters; `loss.backward()` runs all of the graph.

    Cost: a walk over the graph, and a backward if it has other leaves.
    """
    trained = {id(each) for each in trainable}
    others = [each for each in leaves(loss) if id(each) not in trained]
    if not others:
        return
    kept = [each.grad for each in trainable]
    for parameter in trainable:
        parameter.grad = None
    try:
        torch.autograd.grad(
            loss, others, torch.ones_like(loss), retain_graph=True, allow_unused=True
        )
    except RuntimeError as error:
        if is_memory(error):
            raise
    is_written = any(each.grad is not None for each in trainable)
    for parameter, grad in zip(trainable, kept, strict=True):
        parameter.grad = grad
    if is_written:
        _check_functions(_nodes(loss), trained)


def _check_functions(order: Sequence[Node], trainable: Collection[int]) -> None:
    """Refuse custom Functions that no parameter lies behind, of nodes whose inputs come first."""
    leading: set[Node] = set()
    for node in order:
        leads = any(each in leading for each, _ in node.next_functions)
        if leads or id(getattr(node, "variable", None)) in trainable:
            leading.add(node)
        else:
            kind = _custom(node)
            if kind is not None:
                raise LossError(
                    "step: loss_fn must give parameters to custom autograd.Functions as tensors, got "
                    f"{kind.__name__}, behind which no parameter lies: a "
                    "backward of its own is left out; give it the parameters, or detach() its inputs"
                )


def _custom(node: Node) -> type | None:
    """The custom Function of a node, if it is the user's."""
    kind: type | None = getattr(node, "_forward_cls", None)
    return None if kind is None or kind.__module__.startswith(("torch.", "accel_fn.")) else kind


_FAR, _NEAR = -(2.0**20), -0.5
"""Factors of a backward that is compared with another one: powers of two, which round nothing."""


def check_linear(loss: Tensor, trainable: Sequence[nn.Parameter]) -> bool:
    """Refuse a backward that does not scale with the loss; return whether it could be compared.

    Ranks and micro-batches start their backwards from shares of the loss. A Function that clips,
    or adds a gradient of its own, makes of these another gradient than one rank has.

    Cost: two backwards.
    """
    try:
        once, scaled = _sums(loss, 1.0, trainable), _sums(loss, _FAR, trainable)
        if not scaled.isfinite().all():  # float16
            scaled = _sums(loss, _NEAR, trainable)
    except RuntimeError as error:
        if is_memory(error):
            raise
        return True  # a compiled graph, for example, runs only once
    if not (once.isfinite().all() and scaled.isfinite().all()):
        return False
    tolerance = max(torch.finfo(each.dtype).eps for each in trainable) ** 0.5
    sizes = once[:, :1] + scaled[:, :1].abs()
    if ((once - scaled).abs() > tolerance * sizes).any():
        raise LossError(
            "step: loss_fn must have a backward that is linear in the loss, with several ranks or "
            "micro-batches, which each run it for their share, got one that is not: an autograd.Function "
            "adds a gradient of its own, say, or clips; add what it adds to the loss, and clip by clip() "
            "or a hook on parameters"
        )
    return True


def _sums(loss: Tensor, factor: float, trainable: Sequence[nn.Parameter]) -> Tensor:
    """Compute norm and sum of each gradient of `factor * loss`, divided by `factor`: [parameters, 2]."""
    seed = loss.new_full((), factor)
    grads = torch.autograd.grad(loss, trainable, seed, retain_graph=True, allow_unused=True)
    rows = [torch.zeros(2, dtype=torch.float64)]
    for grad in grads:
        if grad is not None:
            dense = grad.coalesce().values() if grad.is_sparse else grad
            dense = torch.view_as_real(dense) if dense.is_complex() else dense
            dtype = torch.float64 if dense.dtype == torch.float64 else torch.float32
            norm = torch.linalg.vector_norm(dense, dtype=dtype) / abs(factor)
            # Over the root of the number of elements, the sum is at most the norm.
            total = dense.sum(dtype=dtype) / factor / max(dense.numel(), 1) ** 0.5
            rows.append(torch.stack([norm, total]).cpu().double())
    return torch.stack(rows)
