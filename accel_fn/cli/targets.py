"""Load the plan or model that a command names, such as `train.py:make_plan`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial, reduce
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from accel_fn.errors import ArgumentError, ArgumentTypeError, message

if TYPE_CHECKING:
    from torch import Tensor, nn

    from accel_fn.core.plan import Plan


class _TargetError(Exception):
    """A target breaks a rule. The arguments are the rule, the value and, if there is one, a repair."""


def load_target(target: str, function: str, parameter: str = "target") -> Any:
    """Import a file or a module, and return the attribute NAME of `FILE.py:NAME` or `MODULE:NAME`.

    A file is imported under its own name, not as `__main__`, so that code under `if __name__ ==
    "__main__"` does not run. Errors name `function` and `parameter`.
    """
    place, _, name = target.rpartition(":")
    try:
        if not place or not name:
            raise _TargetError("be FILE.py:NAME or MODULE:NAME", target)
        module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
        return reduce(partial(_attribute, place), name.split("."), module)
    except _TargetError as error:
        raise ArgumentError(message(function, parameter, *error.args)) from None


def call_target(found: Any, target: str, function: str, parameter: str = "target") -> Any:
    """Call the object that a target names, without arguments."""
    try:
        inspect.signature(found).bind()
    except (TypeError, ValueError) as error:
        rule = "name what can be called without arguments"
        raise ArgumentTypeError(message(function, parameter, rule, target, str(error))) from None
    return found()


def read_target(target: str, function: str) -> tuple[Plan | nn.Module, Any]:
    """Load and call a target; return its plan or model, and the batch that came with a model.

    A target returns a plan, a plan and a state, a model, or a model and a batch.
    """
    from torch import nn

    from accel_fn.core.plan import Plan
    from accel_fn.core.state import DistState

    found = load_target(target, function)
    if not isinstance(found, Plan):
        found = call_target(found, target, function)
    first, second = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    is_plan = isinstance(first, Plan) and isinstance(second, DistState | None)
    if not is_plan and not isinstance(first, nn.Module):
        rule = (
            "name a function that gives a plan, a plan and a state, a model, or a model and a batch"
        )
        kinds = [type(each).__name__ for each in (found if isinstance(found, tuple) else [found])]
        raise ArgumentTypeError(message(function, "target", rule, f"{target} ({', '.join(kinds)})"))
    return first, None if is_plan else second


def as_plan(found: Plan | nn.Module) -> Plan:
    """Return a plan unchanged; for a model, make a plan whose loss is the mean of the outputs, with AdamW."""
    import torch

    from accel_fn.core.plan import Plan

    if isinstance(found, Plan):
        return found
    return Plan(mean_of_outputs, found, torch.optim.AdamW(found.parameters()))


def mean_of_outputs(model: nn.Module, batch: Any) -> Tensor:
    """Return the `loss` of the model's outputs for a batch, or the sum of the means of the outputs."""
    import torch

    return loss_of_outputs(model, batch, torch.mean)


def loss_of_outputs(
    model: nn.Module, batch: Any, reduce: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return the `loss` of the model's outputs for a batch, or the sum of `reduce(output)` (their sums)."""
    import torch
    from torch.utils import _pytree as pytree

    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(batch[0] if isinstance(batch, tuple | list) else batch)
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    found = [each for each in pytree.tree_leaves(output) if isinstance(each, torch.Tensor)]
    reduce = reduce or torch.sum
    return torch.stack([reduce(each) for each in found if each.is_floating_point()]).sum()


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise _TargetError("name a file that is there", str(path))
    _search_first(str(path.resolve().parent))
    name = path.stem if path.stem not in sys.modules else f"{path.stem} at {path.resolve()}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Register the module before it runs: dataclasses and pickle look it up by its name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    _search_first(str(Path.cwd()))
    if all(map(str.isidentifier, name.split("."))):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # If the missing module is neither this module nor a parent of it, this module exists,
            # and an import inside of it has failed: raise the error of that import.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
    repair = f"{name}.py is a file: write {name}.py:NAME" if Path(f"{name}.py").is_file() else ""
    raise _TargetError("name a module that can be imported from here", name, repair)


def _attribute(place: str, inner: Any, part: str) -> Any:
    try:
        return getattr(inner, part)
    except AttributeError:
        near = difflib.get_close_matches(part, dir(inner), n=1)
        repair = f"did you mean {near[0]}?" if near else ""
        raise _TargetError(f"name something in {place}", part, repair) from None


def _search_first(folder: str) -> None:
    """Import from a folder first, as Python does for the folder of a script."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
