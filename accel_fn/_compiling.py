"""torch.compile as the library calls it, and whether this machine has what it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from accel_fn._errors import PlanError

MODES = ("default", "lite", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")


def compile_function(fn: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """`torch.compile(fn, **settings)`, whose graphs are counted apart from those of any other."""
    compiled: Callable[..., Any] = torch.compile(_with_own_code(fn), **settings)
    return compiled


def without_clock() -> AbstractContextManager[Any]:
    """Graphs that are made in it do not measure, whenever they are run, how long finding them took."""
    settings = torch._dynamo.config
    return (
        settings.patch(record_runtime_overhead=False)
        if hasattr(settings, "record_runtime_overhead")
        else nullcontext()
    )


def compile_in_place(modules: Sequence[nn.Module], **settings: Any) -> None:
    """`module.compile(**settings)` for modules of one class, which share their graphs with no other.

    torch keeps graphs by the code that they were made of, which is the same for all
    modules of a process, and stops compiling at a small number of them.
    """

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    compiled = compile_function(call, **settings)
    for module in modules:
        module._compiled_call_impl = partial(compiled, module)


def _with_own_code(fn: Callable[..., Any]) -> Callable[..., Any]:
    assert isinstance(fn, FunctionType)
    code = fn.__code__.replace()
    return FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


def check_compiler(device: torch.device) -> None:
    """Compile next to nothing, and refuse a machine that cannot."""
    start = torch.zeros(2, device=device)
    try:
        torch.compile(_increment, fullgraph=True, options={"fx_graph_cache": False})(start)
    except Exception as error:
        text = str(error).strip().split("\n")
        raise PlanError(
            f"build: compiled must have a compiler for {device.type} on this machine, got "
            f"{text[0]}; install one (a C++ compiler for a CPU, Triton for a GPU), or leave out compiled"
        ) from error


def _increment(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1
