"""checkpoint_activations: activations of the model's blocks are computed again in the backward, not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from accel_fn.base.blocks import Blocks, check_blocks, find_blocks
from accel_fn.base.state import DistState
from accel_fn.base.swap_forward import with_forwards
from accel_fn.base.torch_compile import compile_inside
from accel_fn.errors import PlanError, check_flag, message
from accel_fn.step.plan import ContextFn, Plan, Stateful, describe
from accel_fn.step.torch_internals import checkpoint_hook
from accel_fn.step.transform import Transform, fill, transform

OURS = "of_checkpoint_activations"
"""Marks a hook that packs tensors as one of a checkpoint of ours: a block may stand in a block."""

Buffers = list[tuple[dict[str, Any], str, Tensor]]
"""Owner, name and tensor of each buffer."""


@transform
def checkpoint_activations(*, blocks: Blocks = None, offload: bool = False) -> Transform:
    """Keep only the inputs of each block, and recompute the block in its backward.

    Memory for activations falls from all of the model's to those of one block; the forward of
    the blocks is computed twice. The second time, torch's global generators and the buffers have
    their first values, so dropout and running statistics are those of the run without it. A block
    that draws from Python's `random` or from NumPy draws other numbers: draw from torch instead.
    With `compiled`, graphs begin and end with a block.

    Law: the identity, bit for bit; with `compiled`, to rounding.

    Args:
        blocks: classes of modules, or names of modules (the name of a list stands for its items).
            Default: the modules that are repeated most in the model's outermost lists and
            sequences.
        offload: keep the inputs of each block in host memory.

    Returns:
        A transform.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: `blocks` are a list of none. In `build`, on all ranks: they match nothing, or
            `compiled` is given `scope="step"` or `fullgraph=True`.

    Cost: one more forward of the blocks, and a copy of their buffers; with `offload`, a copy of their
    inputs to the host and back. No host synchronisation on a CPU; on an accelerator that of
    `save_on_cpu`.

    Source: Chen et al. 2016, arXiv:1604.06174; `torch.utils.checkpoint`.

    >>> import accel_fn as af
    >>> af.checkpoint_activations(blocks="layers")(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=num_samples, \
forward_contexts=[checkpoint_activations(blocks='layers')])
    """
    check_blocks("checkpoint_activations", blocks)
    check_flag("checkpoint_activations", "offload", offload)
    return fill(forward_contexts=CheckpointSlot(recompute, blocks=blocks, offload=offload))


class CheckpointSlot(Stateful):
    """`recompute` with its settings."""

    def validate(self, state: DistState, plan: Plan) -> None:
        """Refuse blocks that match nothing, and graphs that would have to go through them."""
        if not find_blocks(plan.model, self.keywords["blocks"], "checkpoint_activations"):
            raise PlanError(
                "build: checkpoint_activations(blocks) must match modules that are repeated in a list or "
                f"sequence, got none in {type(plan.model).__name__}; name them"
            )
        graphs = [*plan.compile_step, *plan.having("full_graph")]
        if graphs:
            raise PlanError(
                "build: checkpoint_activations must have blocks that are called from outside of a graph, got "
                f'{describe(graphs[0])}; use compiled(scope="blocks") or compiled(), without fullgraph'
            )


def recompute(state: DistState, plan: Plan, *, blocks: Blocks, offload: bool) -> ContextFn:
    """Make the context of forward and loss, for one step."""
    found = find_blocks(plan.model, blocks, "checkpoint_activations")
    for name, block in found.items():
        hooks = block._forward_pre_hooks.values()
        if any(each.__module__.startswith("torch.distributed.tensor") for each in hooks):
            # A recomputation calls the forward without the hooks, which split its input.
            rule, repair = "match modules around split layers", "name blocks that hold the layers"
            raise PlanError(message("build", "checkpoint_activations(blocks)", rule, name, repair))
    inside = compile_inside(
        [each.keywords for each in plan.having("torch_compile")], found.values()
    )
    pinned = state.device.type not in ("cpu", "mps")  # others copy from there without waiting
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    """Forwards of the blocks as they are in a step: another context may have replaced them."""

    def run(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a block's forward so that the backward knows only its inputs."""
        plain = forwards[block]
        forward = partial(inside, block, plain)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        around = checkpoint_hook()
        if around and not hasattr(around, OURS):
            # The model's own checkpoint saves this memory already. It calls the block again outside of
            # our context and of a compiled loss, and must save the same tensors then.
            return (forward if block._compiled_call_impl else plain)(*args, **kwargs)
        with save_on_cpu(pin_memory=pinned) if offload else nullcontext():
            contexts = partial(_contexts, block)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    # The same objects in every step, otherwise a compiler would compile again.
    outside = torch.compiler.disable(run) if plan.compile_loss else run  # type: ignore[no-untyped-call]
    running = {block: partial(outside, block) for block in found.values()}

    def within(state: DistState) -> AbstractContextManager[None]:
        forwards.update({block: block.forward for block in running})
        return with_forwards(running)

    return within


def _contexts(
    block: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for the forward and the recomputation, which begins with the buffers of now."""
    # A backward runs outside of the contexts that have replaced forwards of modules inside.
    inside = [each for each in block.modules() if each is not block and "forward" in vars(each)]
    forwards = {each: each.forward for each in inside}
    buffers: Buffers = [
        (vars(module)["_buffers"], name, buffer.clone())
        for module in block.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    return _marked(), _Entered(partial(_again, buffers, forwards))


class _Entered(AbstractContextManager[None]):
    """A context that can be entered again, for a second backward through one graph."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._open = self._make()
        self._open.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.__exit__(*error)


@contextmanager
def _marked() -> Iterator[None]:
    """Mark the hook of the checkpoint around as ours."""
    setattr(checkpoint_hook(), OURS, True)
    yield


@contextmanager
def _again(buffers: Buffers, forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Restore buffers and forwards for the recomputation; torch restores its generators."""
    setattr(checkpoint_hook(), OURS, True)
    now = [(home, name, home[name]) for home, name, _ in buffers]
    _put(buffers)
    try:
        with with_forwards(forwards):
            yield
    finally:
        _put(now)


def _put(buffers: Buffers) -> None:
    for home, name, buffer in buffers:
        home[name] = buffer
