"""Load public names on first use; for a name that was replaced, raise an error with the new name.

The tables `CALLS` and `NAMES` list what has changed before the first release. Version 1.0 drops
them.
"""

from __future__ import annotations

import importlib
import sys

# Defined here, since importing `typing` would take most of the time of `import accel_fn`.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

CALLS = {
    "build": "build(plan, state)",
    "draw": "draw(fn, state)",
    "evaluate": "evaluate(step, state, loader)",
    "load": "load(step, state, folder)",
    "load_accelerate": "load_accelerate(step, state, folder)",
    "log_values": "log_values(step, state, values)",
    "predict": "predict(step, state, loader, fn)",
    "resume": "resume(step, state, folder)",
    "save": "save(step, state, folder)",
}
"""The correct calls of functions whose order of arguments has changed, for error messages."""

NAMES = {
    "Checkpoint": "accel_fn.checkpoint.Checkpoint",
    "GradFn": "accel_fn.extend.GradFn",
    "LaunchOptions": "accel_fn.launcher.LaunchOptions",
    "LossScale": "accel_fn.extend.LossScale",
    "MemoryEstimate": "accel_fn.contrib.estimate.MemoryEstimate",
    "SlotFunction": "accel_fn.extend.SlotFunction",
    "Stateful": "accel_fn.extend.Stateful",
    "Strategy": "accel_fn.extend.Strategy",
    "average": "ema(decay) or swa()",
    "compute_dtype": "accel_fn.extend.compute_dtype",
    "estimate_memory": "accel_fn.contrib.estimate.estimate_memory",
    "launch_options": "accel_fn.launcher.launch_options",
    "list_checkpoints": "accel_fn.checkpoint.list_checkpoints",
    "load_accelerate": "accel_fn.checkpoint.load_accelerate",
    "num_labels": "count_labels",
    "num_samples": "count_samples",
    "on_main_only": "main_logger",
    "part": "shard_batch",
    "plan_batches": "accel_fn.data.plan_batches",
    "sample_seed": "accel_fn.data.sample_seed",
    "seed_samples": "accel_fn.data.seed_samples",
    "to_device": "accel_fn.extend.to_device",
    "use_average": "averaged",
    "whole_state_dict": "accel_fn.checkpoint.whole_state_dict",
    "window": "group_batches",
    "wrap": "wrap_as_launched",
}

_PLUG_INS = "accel_fn.contrib."


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]], modules: Sequence[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Make `__getattr__`, `__dir__` and `__all__` of a package, so that its names load on first use.

    `homes` lists the names that each module defines. `modules` are public submodules of the
    package.
    """
    home_of = {name: module for module, names in homes.items() for name in names}
    own = vars(sys.modules[package])

    def load(name: str) -> object:
        if name in modules:
            return _loaded(f"{package}.{name}", name)
        if name not in home_of:
            new = f"; it is {NAMES[name]} now" if name in NAMES and package == "accel_fn" else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{new}")
        value = getattr(_loaded(f"accel_fn.{home_of[name]}", name), name)
        own[name] = value
        return value

    def names() -> list[str]:
        return sorted({*home_of, *modules, *own})

    return load, names, sorted(home_of)


def _loaded(module: str, name: str) -> ModuleType:
    """Import the module of a public name; for a missing plug-in, raise an error that names its extra."""
    if module.startswith(_PLUG_INS):
        plug_ins = importlib.import_module("accel_fn.plug_ins")
        found: ModuleType = plug_ins.plug_in(module.removeprefix(_PLUG_INS), name)
        return found
    return importlib.import_module(module)
