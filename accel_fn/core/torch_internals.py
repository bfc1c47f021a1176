"""Private parts of torch that the library uses, each behind one function."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.optim import Optimizer
from torch.optim import optimizer as _hooks

from accel_fn.core.state import DistState

_PHRASES = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    # RuntimeErrors of libraries that allocate memory outside of torch. The second one means that
    # cuBLAS had no memory to start.
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)


def is_memory(error: Exception) -> bool:
    """Return whether an error means out of memory; torch has no error class for host memory."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        phrase in str(error) for phrase in _PHRASES
    )


def free_memory(state: DistState) -> None:
    """Collect garbage and empty the device's cache."""
    gc.collect()
    if state.device.type != "cpu":
        torch.accelerator.empty_cache()


_TORCH = torch.__path__[0]
_WRAPPER = Optimizer.profile_hook_step(Optimizer.step).__code__
is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler of torch records this thread."""


def run_backward(loss: Tensor, seed: Tensor | None, inputs: Sequence[nn.Parameter]) -> None:
    """Call `torch.autograd.backward(loss, seed, inputs=inputs)` for a 0-dim loss."""
    # Call the engine directly: `torch.autograd.backward` is a torch function, so function modes
    # would be off inside it.
    seed = torch.ones_like(loss) if seed is None else seed
    _engine_run_backward(
        (loss,),
        (seed,),
        False,  # the argument keep_graph
        False,  # the argument create_graph
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def gradients_of(
    output: Tensor, inputs: Sequence[Tensor], seed: Tensor
) -> tuple[Tensor | None, ...]:
    """Call `torch.autograd.grad(output, inputs, seed, allow_unused=True)`, with function modes still on."""
    found: tuple[Tensor | None, ...] = _engine_run_backward(
        (output,),
        (seed,),
        False,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found


def run_optimizer(optimizer: Optimizer) -> None:
    """Call `optimizer.step()`, without torch's wrapper if there is no profiler and no hook."""
    bare = unwrapped_step(type(optimizer))
    if bare is None:
        optimizer.step()
        return
    listened = (
        # Schedulers replace `step` on the instance, to see its calls.
        "step" in vars(optimizer) or has_hooks(optimizer) or is_profiling()
    )
    if listened:
        optimizer.step()
    else:
        bare(optimizer)


def has_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks run before or after an optimizer's step."""
    # Some optimizers never call `Optimizer.__init__`, so the attributes may be missing.
    own = vars(optimizer)
    return bool(
        own.get("_optimizer_step_pre_hooks")
        or own.get("_optimizer_step_post_hooks")
        or _hooks._global_optimizer_pre_hooks
        or _hooks._global_optimizer_post_hooks
    )


def has_loading_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks run before or after `load_state_dict`."""
    own = vars(optimizer)
    return bool(
        own.get("_optimizer_load_state_dict_pre_hooks")
        or own.get("_optimizer_load_state_dict_post_hooks")
    )


def is_listened_to(optimizer: Optimizer) -> bool:
    """Return whether code other than torch's sees gradients in `step`: hooks, or another `step`."""
    step: Any = optimizer.step
    while step is not None:
        # Not every callable is a function with a `__code__`.
        code = getattr(step, "__code__", None)
        if code is None or not code.co_filename.startswith(_TORCH):
            return True
        step = getattr(step, "__wrapped__", None)
    return has_hooks(optimizer)


def checkpoint_hook() -> Callable[..., Any] | None:
    """Return the saved-tensors hook of the surrounding activation checkpoint, if there is one.

    torch sets the hook in the forward and in the recomputation. It is one object throughout a
    forward. A reentrant checkpoint sets none.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or getattr(hooks[0], "__module__", None) != "torch.utils.checkpoint":
        return None
    return hooks[0]


class CheckpointFrame(NamedTuple):
    """torch's record of one call of the surrounding activation checkpoint."""

    frame: object
    key: object
    """A value that stays the same during one forward or one recomputation, and differs between
    these."""
    is_recomputed: bool


def checkpoint_frame() -> CheckpointFrame | None:
    """Return the activation checkpoint call that runs here, in its forward or recomputation."""
    hook = checkpoint_hook()
    if hook is None:
        return None
    hook = getattr(hook, "_torchdynamo_orig_callable", hook)
    cells = {
        name: cell.cell_contents
        for name, cell in zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True)
    }
    if "frame" in cells:
        return CheckpointFrame(cells["frame"], cells["frame"], False)
    frame = cells["target_frame_ref"]()
    return CheckpointFrame(frame, (frame, cells["gid"]), True)


def unwrapped_step(kind: type[Optimizer]) -> Callable[[Optimizer], Any] | None:
    """Return the step function inside torch's wrapper; None if a class's `step` is not wrapped by torch."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "__code__", None) is _WRAPPER else None
