"""checkpointed: activations of the model's blocks are computed again in the backward, not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from accel_fn._blocks import Blocks, check_blocks, find_blocks
from accel_fn._errors import ArgumentTypeError, PlanError, message
from accel_fn._plan import Asked, ContextFn, Kept, Plan, Transform
from accel_fn._replacing import with_forwards
from accel_fn._state import DistState

Buffers = list[tuple[dict[str, Any], str, Tensor]]
"""Where each is held, under what name, and it."""


def checkpointed(*, blocks: Blocks = None, offload: bool = False) -> Transform:
    """Keep only what goes into each block, and compute the block again in its backward.

    Memory for activations falls from all of the model's to those of one block; the forward of
    the blocks is computed twice. The second time, random numbers and buffers are what they
    were, so dropout and running statistics are those of the run without it.

    Law: the identity, bit for bit.

    Args:
        blocks: classes of modules, or names of modules (the name of a list stands for its items).
            Default: the modules that are repeated most in the model's outermost lists and
            sequences.
        offload: keep what goes into each block in host memory.

    Returns:
        A transform.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: in `build`, on all ranks: `blocks` match nothing.

    Cost: one more forward of the blocks; with `offload`, a copy of their inputs to the host and
    back. No host synchronisation on a CPU; on an accelerator that of `save_on_cpu`.

    Source: Chen et al. 2016, arXiv:1604.06174; `torch.utils.checkpoint`.

    >>> import accel_fn as af
    >>> af.checkpointed(blocks="layers")(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=num_samples, contexts=[computed_again(blocks='layers', \
offload=False)])
    """
    check_blocks("checkpointed", blocks)
    if not isinstance(offload, bool):
        raise ArgumentTypeError(message("checkpointed", "offload", "be True or False", offload))
    context = Checkpointing(computed_again, blocks=blocks, offload=offload)
    return lambda plan: replace(plan, contexts=(*plan.contexts, context))


class Checkpointing(Kept, Asked):
    """`computed_again` with its settings."""

    def check(self, state: DistState, plan: Plan) -> None:  # noqa: ARG002
        """Refuse blocks that match nothing."""
        if not find_blocks(plan.model, self.keywords["blocks"], "checkpointed"):
            raise PlanError(
                "build: checkpointed(blocks) must match modules that are repeated in a list or sequence, "
                f"got none in {type(plan.model).__name__}; name them"
            )


def computed_again(state: DistState, plan: Plan, *, blocks: Blocks, offload: bool) -> ContextFn:
    """The context of forward and loss, of one step."""
    found = list(find_blocks(plan.model, blocks, "checkpointed").values())

    def within(state: DistState) -> AbstractContextManager[None]:
        elsewhere = state.device.type == "cuda"
        return with_forwards(
            {block: partial(_run, block, block.forward, offload, elsewhere) for block in found}
        )

    return within


def _run(
    block: nn.Module,
    forward: Callable[..., Any],
    offload: bool,
    pinned: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A block's forward, of which the backward will know the inputs alone."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    with save_on_cpu(pin_memory=pinned) if offload else nullcontext():
        return checkpoint(
            forward, *args, use_reentrant=False, context_fn=partial(_contexts, block), **kwargs
        )


def _contexts(
    block: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For the forward, and for doing it again: with buffers and forwards as they are now.

    Buffers in tensors of their own; forwards are those that other contexts have given to modules inside.
    """
    inside = [each for each in block.modules() if each is not block and "forward" in vars(each)]
    forwards = {each: each.forward for each in inside}
    buffers: Buffers = [
        (vars(module)["_buffers"], name, buffer)
        for module in block.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    were = [buffer.clone() for _, _, buffer in buffers]
    return nullcontext(), _again(buffers, were, forwards)


@contextmanager
def _again(
    buffers: Buffers, values: list[Tensor], forwards: dict[nn.Module, Callable[..., Any]]
) -> Iterator[None]:
    """Other buffers and forwards in their places."""
    for (home, name, _), value in zip(buffers, values, strict=True):
        home[name] = value
    try:
        with with_forwards(forwards):
            yield
    finally:
        for home, name, buffer in buffers:
            home[name] = buffer
