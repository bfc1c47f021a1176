"""checkpoint_activations: recompute the activations of blocks in the backward, to save memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from accel_fn.core.batch import tensors_of
from accel_fn.core.plan import ContextFn, Plan, Stateful, describe
from accel_fn.core.restored import with_forwards
from accel_fn.core.state import DistState
from accel_fn.core.torch_compile import compile_inside
from accel_fn.core.torch_internals import checkpoint_hook
from accel_fn.core.transform import Transform, fill, transform
from accel_fn.errors import LossError, PlanError, check_flag, message
from accel_fn.parallel.blocks import Blocks, check_blocks, find_blocks

OURS = "of_checkpoint_activations"
"""The attribute that marks the hooks of checkpoints made here. A block inside another one is
checkpointed again, but a block inside a checkpoint of the model's own is not."""

Buffers = list[tuple[dict[str, Any], str, Tensor]]
"""For each buffer: the `_buffers` dict of its module, its name in this dict, and its tensor."""
Contents = list[tuple[dict[str, Any], dict[str, Any]]]
"""For each module: the dict of its attributes or of its child modules, and a copy of the dict."""
Flags = list[tuple[nn.Parameter, bool]]
"""Parameters, and whether each requires a gradient."""
_LOOKS = (1, 2, 10, 100)
"""The numbers of the steps that compare the outputs of forward and recomputation."""
_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4}
"""The difference allowed between forward and recomputation, relative to the largest value. For
other dtypes, it is 0.02."""


@transform
def checkpoint_activations(*, blocks: Blocks = None, offload: bool = False) -> Transform:
    """Keep only the inputs of each block, and recompute the block in its backward.

    Memory for activations falls from the whole model's to one block's; the forward of the blocks is
    computed twice. The second time, torch's global generators, and the buffers, modes and
    attributes of the block's modules have the values of the first time. So dropout, running
    statistics, and adapters that are switched in between are the same as without this transform.
    Other values that a block reads may have changed: an object that an attribute holds, an
    attribute of the model around it, Python's `random`. So steps 1, 2, 10 and 100 compare the
    outputs. With `compiled`, graphs begin and end with a block.

    Law: the identity, bit for bit; with `compiled`, to rounding.
    Tests: `tests/laws/law02_checkpoint_activations.py`.

    Args:
        blocks: classes of modules, or names of modules (the name of a list means its items).
            Default: the modules that are repeated most in the model's outermost lists and
            sequences.
        offload: keep the inputs of each block in host memory.

    Returns:
        A transform.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: `blocks` is an empty list. In `build`, on all ranks: they match nothing, or
            `compiled` has `scope="step"` or `fullgraph=True`. In steps 1, 2, 10 and 100, on each
            rank: a block has another output when it is computed again.

    Cost: one more forward of the blocks, and a copy of their buffers and, on the host, of the dicts
    of their modules (a few microseconds per module). In the steps that compare, the outputs of the
    blocks are kept until their backward, and the host waits for each comparison. With `offload`, a
    copy of their inputs to the host and back. No host synchronisation on a CPU; on an accelerator,
    the synchronisation of `save_on_cpu`.

    Source: Chen et al. 2016, arXiv:1604.06174; `torch.utils.checkpoint`.

    >>> import accel_fn as af
    >>> af.checkpoint_activations(blocks="layers")(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=count_samples, \
forward_contexts=[checkpoint_activations(blocks='layers')])
    """
    check_blocks("checkpoint_activations", blocks)
    check_flag("checkpoint_activations", "offload", offload)
    return fill(forward_contexts=CheckpointSlot(recompute, blocks=blocks, offload=offload))


class CheckpointSlot(Stateful):
    """The slot function of checkpoint_activations: it calls `recompute` with its settings."""

    def validate(self, state: DistState, plan: Plan) -> None:
        """Refuse `blocks` that match nothing, and compiled graphs that would contain whole blocks."""
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
    """Return, for one step, the context of forward and loss in which blocks are checkpointed."""
    found = find_blocks(plan.model, blocks, "checkpoint_activations")
    for name, block in found.items():
        hooks = block._forward_pre_hooks.values()
        if any(each.__module__.startswith("torch.distributed.tensor") for each in hooks):
            # Refuse a block with these hooks. The hooks split the input, and a recomputation calls
            # the forward without hooks.
            rule, repair = "match modules around split layers", "name blocks that hold the layers"
            raise PlanError(message("build", "checkpoint_activations(blocks)", rule, name, repair))
    inside = compile_inside(
        [each.keywords for each in plan.having("torch_compile")], found.values()
    )
    # Accelerators other than MPS copy from and to pinned memory without a wait.
    pinned = state.device.type not in ("cpu", "mps")
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    """The blocks' forwards in the current step: another context may have replaced them."""
    names = {block: name for name, block in found.items()}
    homes = {block: [*map(vars, block.modules())] for block in names}
    """The attributes of the modules in each block."""
    looks = _Looks()

    def run(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a block's forward, and keep only the inputs of the block for the backward."""
        plain = forwards[block]
        forward = partial(inside, block, plain)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        around = checkpoint_hook()
        if around and not hasattr(around, OURS):
            # Do not checkpoint again: the model's own checkpoint around this block saves the memory
            # already. Its recomputation calls the block after our context has ended, so it runs the
            # plain forward, or a compiled block. It must save the same tensors as the forward
            # here, so call the same function.
            return (forward if block._compiled_call_impl else plain)(*args, **kwargs)
        # By default, torch stops a recomputation at the last tensor that the backward needs, which
        # comes before the output. To compare outputs, a recomputation must run to the end.
        options: dict[str, Any] = {
            "context_fn": lambda: (_Marked(), _Again(homes[block])),
            "early_stop": not looks.are_due,
        }
        called = _Compared(forward, names[block]) if looks.are_due else forward
        with save_on_cpu(pin_memory=pinned) if offload else nullcontext():
            return checkpoint(called, *args, use_reentrant=False, **options, **kwargs)

    # Make these objects once for all steps: for new objects, torch.compile would compile again.
    outside = torch.compiler.disable(run) if plan.compile_loss else run  # type: ignore[no-untyped-call]
    running = {block: partial(outside, block) for block in found.values()}

    def within(state: DistState) -> AbstractContextManager[None]:
        looks.begin(state)
        forwards.update({block: block.forward for block in running})
        return with_forwards(running)

    return within


class _Marked(AbstractContextManager[None]):
    """Marks the hook of the surrounding checkpoint as ours."""

    def __enter__(self) -> None:
        setattr(checkpoint_hook(), OURS, True)

    def __exit__(self, *error: object) -> None:
        """Keep the mark: torch removes the hook at the end of the context."""


class _Again(_Marked):
    """Gives a block, in its recomputation, the buffers, attributes and `requires_grad` of its forward.

    torch itself restores the generators. A second backward through the same graph enters this
    context again.
    """

    def __init__(self, homes: Sequence[dict[str, Any]]) -> None:
        self._buffers: Buffers = [
            (home["_buffers"], name, buffer.clone())
            for home in homes
            for name, buffer in home["_buffers"].items()
            if buffer is not None
        ]
        # Copy replaced forwards too: contexts of the step replace some, and a backward runs outside
        # of these contexts.
        self._contents = _contents([*homes, *(home["_modules"] for home in homes)])
        self._flags = _flags(homes)
        self._now: tuple[Buffers, Contents, Flags] = ([], [], [])

    def __enter__(self) -> None:
        super().__enter__()
        buffers = [(home, name, home[name]) for home, name, _ in self._buffers]
        contents = [(home, home.copy()) for home, _ in self._contents]
        flags = [(each, each.requires_grad) for each, _ in self._flags]
        self._now = buffers, contents, flags
        _restore(self._buffers, self._contents, self._flags)

    def __exit__(self, *error: object) -> None:
        _restore(*self._now)


def _restore(buffers: Buffers, contents: Contents, flags: Flags) -> None:
    for parameter, flag in flags:
        if parameter.requires_grad != flag:
            parameter.requires_grad_(flag)
    _fill(contents)
    _put(buffers)


def _flags(homes: Sequence[dict[str, Any]]) -> Flags:
    return [
        (each, each.requires_grad)
        for home in homes
        for each in home["_parameters"].values()
        if each is not None
    ]


def _put(buffers: Buffers) -> None:
    for home, name, buffer in buffers:
        home[name] = buffer


def _contents(homes: Sequence[dict[str, Any]]) -> Contents:
    return [(home, home.copy()) for home in homes]


def _fill(contents: Contents) -> None:
    """Restore the dicts whose contents have changed since they were copied."""
    for home, copied in contents:
        if not (
            home.keys() == copied.keys() and all(map(is_, map(home.get, copied), copied.values()))
        ):
            home.clear()
            home.update(copied)


class _Looks:
    """Counts steps, and selects the few steps in which outputs are compared."""

    are_due = False
    """Whether the outputs of this step are compared."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._newest: tuple[int, int] | None = None

    def begin(self, state: DistState) -> None:
        """Count a step at its first micro-batch, and decide whether to compare its outputs."""
        position = state.step, state.call
        if position != self._newest:
            self._newest = position
            self._num_steps += 1
            self.are_due = self._num_steps in _LOOKS


class _Compared:
    """The forward of a block; raises if a later call returns other outputs than the first call."""

    def __init__(self, forward: Callable[..., Any], name: str) -> None:
        self._forward, self._name = forward, name
        self._first: list[tuple[Tensor, int]] | None = None
        """The outputs of the first call without their graph, and their versions."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._forward(*args, **kwargs)
        tensors = [each.detach() for each in tensors_of(outputs)]
        if self._first is None:
            self._first = [(each, each._version) for each in tensors]
        elif not self._is_same(tensors):
            raise LossError(
                "step: checkpoint_activations must have blocks that compute the same again in the backward, "
                f"got another output of {self._name}; give it what changes as an argument or as an attribute "
                "of a module inside, draw random numbers from torch, or leave the block out by blocks="
            )
        return outputs

    def _is_same(self, tensors: Sequence[Tensor]) -> bool:
        assert self._first is not None
        if len(tensors) != len(self._first):
            return False
        # Leave out an output that was written to after the forward: its first value is lost.
        return all(
            _is_close(each, first)
            for each, (first, version) in zip(tensors, self._first, strict=True)
            if first._version == version
        )


def _is_close(tensor: Tensor, first: Tensor) -> bool:
    if tensor.shape != first.shape or tensor.dtype != first.dtype:
        return False
    if not (tensor.is_floating_point() and tensor.numel()):
        return torch.equal(tensor, first)
    part = _ROUNDING.get(first.dtype, 2e-2)
    bound = part * float(first.abs().nan_to_num(0.0, 0.0).max())
    return torch.allclose(tensor, first, rtol=part, atol=bound, equal_nan=True)
