"""What the graph of a loss must be, for a backward to chosen parameters to reach them."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import Node

from accel_fn.errors import LossError


def check_recomputed(loss: Tensor) -> None:
    """Refuse what is checkpointed with `use_reentrant=True`.

    The graph of what is computed again then begins within the backward, so the engine does not
    know that a backward to these parameters passes here: it leaves them out without a word, or fails.

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
                "checkpointed()"
            )
        seen.add(node)
        ahead += [each for each, _ in node.next_functions]
