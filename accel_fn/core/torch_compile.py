"""Compile functions and modules by torch.compile; detect changes that torch's guards miss."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from inspect import signature
from itertools import chain, compress, count
from operator import itemgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _everywhere
from torch.utils._pytree import tree_map_only

from accel_fn.errors import PlanError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_METHODS = (FunctionType, staticmethod, classmethod, property)
_CALLED = ("forward", "__call__")
"""The only methods of torch's own classes that `ModuleGuards` compares."""
_OF_ALL = [getattr(_everywhere, f"_global{name}") for name in _HOOKS]
"""The hooks that torch runs for every module of a process."""
_hooks_of = itemgetter(*_HOOKS)
_modules_of = itemgetter("_modules")


class ModuleGuards:
    """Makes a key of the hooks of a module and its submodules, and the methods of their classes.

    By default, torch sets `skip_nnmodule_hook_guards`: if a module was compiled without hooks, and
    hooks are added later, its graph still runs and does not call them. torch's guards notice only
    changes of hooks that existed at compile time.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._look()

    def refresh(self) -> bool:
        """Record the modules and their classes again if any has changed; return whether one has."""
        is_new = (
            [*map(_modules_of, self._owners)] != self._inside
            or [*map(type, self._modules)] != self._types
            or [*map(len, self._contents)] != self._sizes
        )
        if is_new:
            self._look()
        return is_new

    def hooks(self) -> tuple[object, ...]:
        """Return which modules have hooks, and the hooks that torch runs for every module.

        Cost: one pass over the modules.
        """
        dicts = chain.from_iterable(map(_hooks_of, self._owners))
        return tuple(compress(count(), dicts)), *map(tuple, _OF_ALL)

    def methods(self) -> tuple[object, ...]:
        """Return the methods of the modules' classes.

        Cost: one dictionary look-up per method.
        """
        return tuple([of_kind(name) for of_kind, name in self._methods])

    def key(self) -> tuple[object, ...]:
        """Return a key that changes if a compiled graph no longer fits the module."""
        self.refresh()
        return self.hooks(), self.methods()

    def _look(self) -> None:
        self._modules = [*self._module.modules()]
        self._owners: list[dict[str, Any]] = [*map(vars, self._modules)]
        self._inside = [dict(each) for each in map(_modules_of, self._owners)]
        self._types = [*map(type, self._modules)]
        kinds = dict.fromkeys(chain.from_iterable(each.__mro__[:-1] for each in self._types))
        self._contents = [*map(vars, kinds)]
        self._sizes = [*map(len, self._contents)]
        self._methods = [
            (vars(kind).get, name)
            for kind in kinds
            for name, value in vars(kind).items()
            if isinstance(value, _METHODS)
            and (name in _CALLED or not kind.__module__.startswith("torch."))
        ]


MODES = ("default", "lite", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes whose CUDA graphs write to the same memory at every run."""
_NAMES = {"MODULE_MATCH", "CLASS_MATCH", "CLOSURE_MATCH", "BUILTIN_MATCH", "DUPLICATE_INPUT"}
"""Types of guards that check that a name still refers to the same module, class or function."""
_OURS = re.compile(r"G\['(?!__import_(?!(torch|accel_fn)(_dot_|')))")
"""Matches the start of a guard on a global that is not in one of the user's modules."""
_is_uncompiled = ContextVar("_is_uncompiled", default=False)
"""Whether this thread runs compiled modules uncompiled."""


def compile_function(fn: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Call `torch.compile`, with a cache and a recompile limit of this function alone.

    The functions that torch compiles separately after a graph break get their own caches too.
    Otherwise torch could run code that it compiled for one model on another model of the same
    class, without the hooks of that model. torch before 2.13 cannot separate these caches.
    """
    if "isolate_recompiles" in signature(torch.compile).parameters:
        settings["isolate_recompiles"] = True
    compiled: Callable[..., Any] = torch.compile(_with_own_code(fn), **settings)
    return compiled


def options_of(mode: str) -> dict[str, Any]:
    """Return a mode of `torch.compile` as options, with the pass of `Addends`."""
    # Import `Addends` here, since its module imports torch's compiler.
    from accel_fn.core.add_alpha import Addends

    options: dict[str, Any] = dict(torch._inductor.list_mode_options(mode))
    # Keep a pass that the user has set.
    if torch._inductor.config.post_grad_custom_pre_pass is None:
        options["post_grad_custom_pre_pass"] = Addends()
    return options


def moving_guards(guards: Sequence[Any]) -> list[bool]:
    """Return, for each guard, whether to keep it: all but guards on names in torch and accel_fn.

    torch evaluates guards before every run, which takes a large part of a small step. Guards on the
    user's names stay.
    """
    return [
        each.guard_type not in _NAMES or not _OURS.match(each.orig_guard.name) for each in guards
    ]


def without_clock() -> AbstractContextManager[Any]:
    """Compile graphs in this context without torch's timer around each look-up of a graph."""
    settings = torch._dynamo.config
    return (
        settings.patch(record_runtime_overhead=False)
        if hasattr(settings, "record_runtime_overhead")
        else nullcontext()
    )


def compile_in_place(
    modules: Sequence[nn.Module], *, mode: str, outermost: bool, **settings: Any
) -> None:
    """Compile modules of one kind in place, with graphs that no other module shares.

    torch stores graphs per code object, which all modules of a process would share, and stops
    compiling after a small number of graphs.
    """

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    def make() -> Callable[..., Any]:
        compiled = compile_function(call, **_settings(mode, **settings))
        return keep_outputs(compiled, mode) if outermost else compiled

    run = _by_key(make, call)
    for module in modules:
        module._compiled_call_impl = partial(run, ModuleGuards(module), module)


def compile_inside(
    settings: Sequence[Mapping[str, Any]], modules: Iterable[nn.Module]
) -> Callable[..., Any]:
    """Return a function `(module, function, ...)` that calls a function of one of these modules.

    That function runs compiled with the first of these settings, if there are any. It is for parts
    of a model that the model's own graphs do not contain.
    """

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def call_alone(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    if not settings:
        return call_alone
    run = _by_key(partial(compile_function, call, **_settings(**settings[0])), call)
    guards = {module: ModuleGuards(module) for module in modules}

    def call_compiled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(guards[module], *args, **kwargs)

    return call_compiled


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled modules uncompiled in this thread; torch's `set_stance` would affect all threads."""
    token = _is_uncompiled.set(True)
    try:
        yield
    finally:
        _is_uncompiled.reset(token)


def _by_key(
    make: Callable[[], Callable[..., Any]], plain: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that takes `ModuleGuards` first, and has a separate graph for each of their keys."""
    graphs = defaultdict[Any, Callable[..., Any]](make)

    def run(guards: ModuleGuards, *args: Any, **kwargs: Any) -> Any:
        if _is_uncompiled.get():
            return plain(*args, **kwargs)
        return graphs[guards.key()](*args, **kwargs)

    return run


def _settings(mode: str, **others: Any) -> dict[str, Any]:
    """Return the keyword arguments of `torch.compile`."""
    return {"options": options_of(mode), **others}


def _with_own_code(fn: Callable[..., Any]) -> Callable[..., Any]:
    assert isinstance(fn, FunctionType)
    code = fn.__code__.replace()
    return FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


def keep_outputs(call: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """Make `call` return copies if the mode uses CUDA graphs, whose next run overwrites the outputs."""
    if mode not in CUDA_GRAPHS:
        return call

    def kept(*inputs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return tree_map_only(Tensor, Tensor.clone, call(*inputs))

    return kept


def check_compiler(device: torch.device) -> None:
    """Compile a tiny function; refuse a machine on which that fails."""
    # torch splits the compiler's command at spaces, so a space in its path breaks the command.
    if device.type == "cpu" and " " in torch.__file__:
        raise PlanError(
            "build: compiled must have torch installed below a path without a space, got "
            f"{torch.__file__}; make the environment elsewhere, or leave out compiled"
        )
    start = torch.zeros(2, device=device)
    try:
        torch.compile(_increment, fullgraph=True, options={"fx_graph_cache": False})(start)
    except Exception as error:
        cause = error.__cause__ or error
        raise PlanError(
            f"build: compiled must have a compiler for {device.type} on this machine, got "
            f"{reason_of(cause)}; install one (for a CPU a C++ compiler, for a GPU Triton), or "
            "leave out compiled"
        ) from error


def reason_of(error: BaseException) -> str:
    """Return the cause of a compiler's error in one line, without its pages of hints."""
    text = str(error)
    raised = re.search(r"raised exception (.*)", text)
    if raised:
        return raised.group(1)
    lines = [line for line in text.split("\n") if line and not line.endswith("raised:")]
    return lines[0] if lines else type(error).__name__


def _increment(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1
