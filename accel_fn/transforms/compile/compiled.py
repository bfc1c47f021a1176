"""compiled: run the loss, the repeated blocks or the whole step through torch's compiler."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from accel_fn.core.collectives import all_or_none
from accel_fn.core.microbatches import splits_of
from accel_fn.core.plan import Plan, SlotFunction, describe
from accel_fn.core.state import DistState
from accel_fn.core.step import Stages
from accel_fn.core.torch_compile import (
    CUDA_GRAPHS,
    MODES,
    check_compiler,
    compile_function,
    compile_in_place,
    keep_outputs,
    moving_guards,
    options_of,
)
from accel_fn.core.transform import Transform, fill, transform
from accel_fn.errors import ArgumentError, ArgumentTypeError, PlanError, check_flag, message
from accel_fn.parallel.blocks import repeated
from accel_fn.transforms.compile.compiler_warnings import warn_once_from_rank_0
from accel_fn.transforms.compile.plan_guards import hooked
from accel_fn.transforms.compile.whole_step import CompiledStep, GraphFn

_IN_CPP = ("default", "max-autotune-no-cudagraphs")
"""Modes whose kernels torch can call from C++."""


@transform
def compiled(
    *,
    scope: str = "loss",
    mode: str = "default",
    fullgraph: bool = False,
    dynamic: bool | None = None,
) -> Transform:
    """Compile with `torch.compile`.

    Args:
        scope: "loss" compiles forward and loss. "blocks" compiles each of the model's
            repeated blocks, in place: they share one graph, so it takes a fraction of the
            time. "step" compiles micro-batches, loss scale, gradient transforms and
            optimizer into one graph, in a world of one.
        mode: torch.compile's: "default", "reduce-overhead" (CUDA graphs), "max-autotune", ...
        fullgraph: refuse a graph break, which "step" always does. The hooks of `wrap_fsdp` break graphs.
        dynamic: as for torch.compile: None compiles for the first shape, and for any shape after a
            second one; True for any shape from the start; False for each shape.

    Returns:
        A transform.

    Raises:
        ValueError: an argument is unknown (TypeError too where it is of another type). In
            `build`: no compiler on this machine, no repeated blocks, an optimizer or a plan that
            does not fit into a graph; on CUDA, a mode of CUDA graphs with micro-batches or
            `reproducible`, unless the scope is "step".

    Law: the identity, to rounding. The loss draws other random numbers.
    Tests: `tests/laws/law02_compilation.py`.

    Cost: compiling, in the first steps. No host synchronisation. Torch's compiler prints each of its warnings
    once, on rank 0, unless the variable TORCH_LOGS is set.

    >>> import accel_fn as af
    >>> af.compiled()(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=count_samples, compile_loss=[compiled()])
    """
    if mode not in MODES:
        raise ArgumentError(message("compiled", "mode", f"be one of {', '.join(MODES)}", mode))
    check_flag("compiled", "fullgraph", fullgraph)
    if dynamic is not None and not isinstance(dynamic, bool):
        raise ArgumentTypeError(message("compiled", "dynamic", "be True, False or None", dynamic))
    settings: dict[str, Any] = {"mode": mode, "fullgraph": fullgraph, "dynamic": dynamic}
    slots: dict[str, tuple[str, Any]] = {
        "loss": ("compile_loss", CompileSlot(compile_loss, **settings)),
        "blocks": ("compile_loss", CompileSlot(compile_blocks, **settings)),
        "step": ("compile_step", CompileStepSlot(compile_step, mode=mode, dynamic=dynamic)),
    }
    if scope not in slots:
        raise ArgumentError(message("compiled", "scope", f"be one of {', '.join(slots)}", scope))
    slot, function = slots[scope]
    return fill(**{slot: function})


class CompileSlot(SlotFunction):
    """A function for `compile_loss` whose settings are those of `torch.compile`."""

    @property
    def traits(self) -> frozenset[str]:  # type: ignore[override]
        """Return traits that other transforms check, such as "full_graph"."""
        full = {"full_graph"} if self.keywords["fullgraph"] else set[str]()
        in_place = {"cuda_graphs"} if self.keywords["mode"] in CUDA_GRAPHS else set[str]()
        whole = {"compiles_loss"} if self.func is compile_loss else set[str]()
        return frozenset({"torch_compile", *full, *in_place, *whole})

    def validate(self, state: DistState, plan: Plan) -> None:
        """Refuse CUDA graphs if gradients outlive a run: the next run would overwrite them."""
        if state.device.type != "cuda" or "cuda_graphs" not in self.traits:
            return
        adding = [*splits_of(plan), *plan.having("virtual_ranks")]
        if adding:
            raise PlanError(
                f"build: compiled(mode={self.keywords['mode']!r}) must have one backward a step, since the "
                f"next run of a CUDA graph overwrites gradients, got {describe(adding[0])}; use "
                'mode="max-autotune-no-cudagraphs", or scope="step"'
            )


class CompileStepSlot(SlotFunction):
    """The slot function of compiled(scope="step"): it calls `compile_step` with its settings."""

    def validate(self, state: DistState, plan: Plan) -> None:
        """Refuse a plan that does not fit into one graph."""
        if state.world_size > 1:
            raise PlanError(
                f'build: compiled(scope="step") must have a world of one, got {state.world_size} ranks, '
                'whose gradients no graph can average; use scope="loss"'
            )
        if plan.terms:
            raise PlanError(
                'build: compiled(scope="step") must have one mean loss, since its graph can leave out no '
                f'term, got {" and ".join(plan.terms)}; use scope="loss"'
            )
        retrying = plan.having("retries")
        others = [each for each in plan.wrap_grad_fn if each not in retrying]
        outside = [*plan.compile_loss, *retrying, *others, *plan.accept]
        if outside:
            names = ", ".join(dict.fromkeys(map(describe, outside)))
            raise PlanError(
                'build: compiled(scope="step") must hold all from micro-batches to the update, got '
                f'{names}; leave it out, or use scope="loss"'
            )
        found = hooked(plan)
        if found:
            raise PlanError(
                'build: compiled(scope="step") must have an optimizer and parameters without hooks, which '
                f'no graph calls, got those of {found}; remove them, or use scope="loss"'
            )


def compile_loss(state: DistState, module: nn.Module, **settings: Any) -> nn.Module:
    """Compile the module of the loss in place, and return it."""
    _check_machine(state)
    compile_in_place([module], outermost=True, **settings)
    return module


def compile_blocks(state: DistState, module: nn.Module, **settings: Any) -> nn.Module:
    """Compile the repeated blocks of a module in place, and return the module."""
    blocks = repeated(module)
    if not blocks:
        raise PlanError(
            'build: compiled(scope="blocks") must find modules of one class repeated in an '
            'nn.ModuleList or nn.Sequential, got none; use scope="loss"'
        )
    _check_machine(state)
    for group in _by_kind(blocks.values()):
        compile_in_place(group, outermost=False, **settings)
    return module


def _by_kind(blocks: Iterable[nn.Module]) -> Iterable[list[nn.Module]]:
    """Group blocks that may share a graph, by class and shapes.

    torch keeps only a few graphs per function, and needs a graph for each shape.
    """
    kinds: dict[Any, list[nn.Module]] = defaultdict(list)
    for each in blocks:
        shapes = tuple((name, p.shape, p.dtype) for name, p in each.named_parameters())
        kinds[type(each), shapes].append(each)
    return kinds.values()


def compile_step(
    state: DistState, stages: Stages, *, mode: str, dynamic: bool | None
) -> CompiledStep:
    """Make a step that runs as one compiled function, except for `after_update`."""
    return CompiledStep(state, stages, partial(_compile_graph, state, mode=mode, dynamic=dynamic))


def _compile_graph(state: DistState, whole: GraphFn, *, mode: str, dynamic: bool | None) -> GraphFn:
    """Compile a function into one graph, without size checks, which torch's guards make anyway."""
    _check_machine(state)
    options = {**options_of(mode), "size_asserts": False, "guard_filter_fn": moving_guards}
    if state.device.type == "cpu":
        options |= _for_cpu(mode)
    run = compile_function(whole, fullgraph=True, dynamic=dynamic, options=options)
    return keep_outputs(run, mode)


def _for_cpu(mode: str) -> dict[str, Any]:
    """Choose compiler options for a CPU: call kernels from C++, and compute each scalar only once."""
    settings = torch._inductor.config
    in_cpp = sys.platform == "linux" and mode in _IN_CPP
    own: dict[str, Any] = {"cpp_wrapper": settings.cpp_wrapper or in_cpp}
    # If the user has set a pass, keep it.
    if settings.post_grad_custom_post_pass is None:
        # Import the pass only here, since the module of the pass imports the compiler.
        from accel_fn.transforms.compile.pass_hoist_scalars import Hoisting

        own["post_grad_custom_post_pass"] = Hoisting()
    return own


def _check_machine(state: DistState) -> None:
    all_or_none(lambda: check_compiler(state.device), state, "build")
    warn_once_from_rank_0()
