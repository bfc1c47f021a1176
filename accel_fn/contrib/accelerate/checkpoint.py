"""load_accelerate: resume a run that accelerate's `save_state` saved.

This module compares options, shapes and schedulers with the program's, since torch's
`load_state_dict` compares only the number of parameters.
"""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accel_fn import DistState, Step, load_model
from accel_fn.errors import (
    AccelError,
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    PlanError,
    StateError,
    check_equal,
    check_folder,
    message,
    shown,
)
from accel_fn.extend import (
    LossScale,
    all_or_none,
    check_state,
    check_weights,
    exchange,
    from_plain,
    is_sharded,
    load_optimizer,
    shard_like,
    unlike,
)

_LOG = logging.getLogger(__name__)
_WEIGHTS = re.compile(r"model.*\.safetensors(\.index\.json)?")
_INDEX = "model.safetensors.index.json"
_SCALER = "scaler.pt"
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
"""Options of an optimizer's group that choose an implementation. Loading keeps the program's values."""
_OPTIONAL = {"params", "initial_lr", "maximize", "decoupled_weight_decay", *_IMPLEMENTATION}

_SQUARES = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"}
_LIKE = {"exp_avg", "momentum_buffer", *_SQUARES}
"""Keys of optimizer state whose tensors have the shape and the dtype of their parameter."""
_COUNTS = ("last_epoch", "_step_count")
"""Keys of a scheduler's state that hold counts."""
_LARGEST_COUNT = 2**53


def load_accelerate(
    step: Step,
    state: DistState,
    folder: str | os.PathLike[str],
    *,
    schedulers: Sequence[Any] = (),
) -> DistState:
    """Resume from a folder that accelerate's `save_state` wrote. Called on every rank.

    It reads the weights, the optimizer, the schedulers and the scale of float16. Everything
    is checked against the program before anything is overwritten; nothing in the folder can
    run code. Random generators stay as they are; files that are not read are logged.
    With `wrap_fsdp`, each rank fills its shards.

    Args:
        step: the step as `build` returned it, over the same model and optimizer, or optimizers,
            which are read in the order of the plan: `optimizer.bin`, `optimizer_1.bin`.
        state: the state as `build` returned it.
        folder: a folder of one model, with `model.safetensors`, or its shards and index, and
            `optimizer.bin`.
        schedulers: objects with `load_state_dict` that load `scheduler.bin`, `scheduler_1.bin` and
            so on. By default, accelerate advances them once for each rank at each update.

    Returns:
        The state; its `step` is the number of updates that the optimizer has counted (0 if it
        counts none), so that `epochs(since=state)` continues after them.

    Raises:
        RuntimeError: on every rank: a file is missing, broken, of another optimizer, or a link out of the
            folder, or holds values that no run saves, such as a negative count.
        ValueError: on every rank: the weights are another model's, or an entry is not a scheduler.

    Cost: one read of the files on each rank; a few small collectives.

    Source: the layout of accelerate 1.15, `checkpointing.py`.

    >>> import tempfile, torch, accel_fn as af
    >>> folder = tempfile.mkdtemp()  # as accelerate would fill it
    >>> af.save_model(model, folder)
    >>> torch.save(optimizer.state_dict(), f"{folder}/optimizer.bin")
    >>> state, step = af.build(af.Plan(loss_fn, model, optimizer), af.DistState())
    >>> state = af.checkpoint.load_accelerate(step, state, folder)
    """
    check_state("load_accelerate", state)
    if state.axis:
        raise StateError(
            f"load_accelerate: state must be of all ranks, got one along {state.axis!r}; give the state that "
            "along was called on"
        )
    if isinstance(step, Step) and not step.strategy.leaves_gradients:
        raise PlanError(
            "load_accelerate: step must be of a plan without wrap_deepspeed, whose engine keeps gradients "
            "and parameters, got one with it; load it by wrap_ddp, save that, and load this checkpoint"
        )
    saved = all_or_none(lambda: _read(folder, step, state, schedulers), state, "load_accelerate")
    given = {"folder": str(saved.path), "schedulers": len(schedulers)}
    ranks = exchange(given, state, "load_accelerate")
    for name in given:
        rule = f"load_accelerate: {name} must be the same on every rank"
        check_equal([repr(each[name]) for each in ranks], rule, error=ArgumentError)
    with ExitStack() as undo:
        all_or_none(lambda: _fill(saved, step, schedulers, undo), state, "load_accelerate")
        undo.pop_all()
    all_or_none(lambda: load_model(step.plan.model, saved.path), state, "load_accelerate")
    if state.is_main:
        for line in _unused(saved, state.scaler, schedulers):
            _LOG.warning("load_accelerate: %s", line)
    return replace(state, step=saved.num_updates, call=0, scaler=saved.scaler)


@dataclass(frozen=True, slots=True)
class _Saved:
    """The checked content of all files except the weights."""

    path: Path
    optimizers: Sequence[Mapping[str, Any]]
    num_updates: int
    schedulers: Sequence[Any]
    has_scale: bool
    scaler: LossScale | None
    """The program's loss scale, with the saved values if there are any; None without `fp16`."""


def _files(kind: str, count: int) -> list[str]:
    """Return accelerate's names of `count` files of a kind, such as `optimizer.bin`, `optimizer_1.bin`."""
    return [f"{kind}_{index}.bin" if index else f"{kind}.bin" for index in range(count)]


def _read(
    folder: str | os.PathLike[str], step: Step, state: DistState, schedulers: Sequence[Any]
) -> _Saved:
    path = check_folder("load_accelerate", folder)
    if not isinstance(step, Step):
        raise ArgumentTypeError(message("load_accelerate", "step", "be a Step", step))
    for function in step.plan.entries():
        # `check_loaded` raises if the function cannot load state now, as inside `averaged(step)`.
        getattr(function, "check_loaded", lambda: None)()
    if not isinstance(schedulers, Sequence) or not all(
        hasattr(each, "load_state_dict") for each in schedulers
    ):
        rule = "be a list of schedulers with load_state_dict"
        raise ArgumentTypeError(message("load_accelerate", "schedulers", rule, schedulers))
    optimizers = [*step.plan.optimizers.values()]
    names = _files("optimizer", len(optimizers)), _files("scheduler", len(schedulers))
    _check_folder(path, [*names[0], *names[1]], len(optimizers))
    saved, schedules = (
        [from_plain(path / each, "load_accelerate") for each in files] for files in names
    )
    for name, scheduler, each in zip(names[1], schedulers, schedules, strict=True):
        _check_scheduler(path / name, scheduler, each)
    num_updates = 0
    for name, optimizer, each in zip(names[0], optimizers, saved, strict=True):
        with _expecting(path / name, "an optimizer's state_dict"):
            differences = list(_differences(each, optimizer))
            num_updates = max(num_updates, _num_updates(each))
        if differences:
            raise CheckpointError(
                f"load_accelerate: {path / name} must be of this program, got differences:\n"
                + "\n".join(f"  {line}" for line in differences)
            )
    has_scale = (path / _SCALER).exists()
    scale = from_plain(path / _SCALER, "load_accelerate") if has_scale else {}
    with _expecting(path / _SCALER, "a scaler's state_dict"):
        scaler = _scale(scale, state.scaler) if state.scaler and scale else state.scaler
    return _Saved(path, saved, num_updates, schedules, bool(scale), scaler)


def _check_folder(path: Path, names: Sequence[str], num_optimizers: int) -> None:
    model = _INDEX if (path / _INDEX).exists() else "model.safetensors"
    for name in (model, *names):
        if not (path / name).exists():
            raise CheckpointError(
                f"load_accelerate: folder must be one that save_state wrote, got {path} without {name}"
            )
    weights = [each.name for each in path.iterdir() if _WEIGHTS.fullmatch(each.name)]
    for name in (*names, *weights, _SCALER):
        target = (path / name).resolve()
        if not target.is_relative_to(path.resolve()):
            raise CheckpointError(
                f"load_accelerate: folder must hold its files itself, got {path / name}, which is a link to "
                f"{target}; copy the file"
            )
    for other in ("model_1.safetensors", f"optimizer_{num_optimizers}.bin"):
        if (path / other).exists():
            raise CheckpointError(
                "load_accelerate: folder must be of one model and as many optimizers as the plan has, "
                f"got {other} in {path}"
            )


def _check_scheduler(path: Path, scheduler: Any, saved: object) -> None:
    """Refuse another scheduler's state. Do not compare private names, which depend on torch's version."""
    if not hasattr(scheduler, "state_dict"):
        return
    here = scheduler.state_dict()
    names = [
        sorted({str(key) for key in each if not str(key).startswith("_")} - {"verbose"})
        if isinstance(each, Mapping)
        else type(each).__name__
        for each in (saved, here)
    ]
    found = [f"{names[0]} where it has {names[1]}"] if names[0] != names[1] else []
    if isinstance(saved, Mapping) and not found:
        odd = [key for key in _COUNTS if key in saved and not _is_count(saved[key])]
        found = [f"{key} {saved[key]!r}, which is no count" for key in odd]
    if found := found or list(unlike(saved, here, "values", is_free=True)):
        raise CheckpointError(
            f"load_accelerate: {path} must hold the state_dict of a {type(scheduler).__name__}, "
            f"got {'; '.join(found)}"
        )


@contextmanager
def _expecting(path: Path, content: str) -> Iterator[None]:
    """A context that replaces errors, except accel_fn's, by one that names the file and expected content."""
    try:
        yield
    except AccelError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"load_accelerate: {path} must hold {content}, got something else; {error!r}"
        ) from error


def _differences(saved: Mapping[str, Any], optimizer: Optimizer) -> Iterator[str]:
    theirs, ours = saved["param_groups"], optimizer.state_dict()["param_groups"]
    sizes = [[len(group["params"]) for group in groups] for groups in (theirs, ours)]
    if sizes[0] != sizes[1]:
        yield f"parameters in each group: {sizes[0]} saved, {sizes[1]} here"
        return
    numbers = [number for group in theirs for number in group["params"]]
    known, given = [*range(len(numbers))], {*numbers, *saved["state"]}
    if sorted(numbers) != known or not given <= {*known}:
        both = shown({"groups": numbers, "state": [*saved["state"]]})
        yield f"numbers of parameters: {both} saved, 0 to {len(known) - 1} here"
        return
    for number, groups in enumerate(zip(theirs, ours, strict=True)):
        names = [sorted(set(group) - _OPTIONAL) for group in groups]
        if names[0] != names[1]:
            yield f"options of group {number}: {names[0]} saved, {names[1]} here"
        both = groups[0].keys() & groups[1].keys() - {"params", *_IMPLEMENTATION}
        options, options_here = ({key: group[key] for key in both} for group in groups)
        yield from unlike(options, options_here, f"options of group {number}")
        for key in sorted(both):
            if _is_negative(options[key]) and not _is_negative(options_here[key]):
                yield f"options of group {number}/{key}: {options[key]} saved, {options_here[key]} here"
    yield from _odd_state(saved, optimizer)


def _odd_state(saved: Mapping[str, Any], optimizer: Optimizer) -> Iterator[str]:
    """Describe each state entry that is invalid for its parameter, such as one of another shape."""
    keys = {key for values in saved["state"].values() for key in values} & {*_LIKE, "step"}
    for number, parameter, values in _by_parameter(saved, optimizer):
        for key in sorted(keys) if values else ():
            if found := _odd(key, values.get(key), parameter):
                yield f"{key} of parameter {number}: {found}"


def _odd(key: str, value: Any, parameter: Tensor) -> str:
    if key == "step":
        return "" if _is_count(value) else f"{value} saved, a count here"
    if value is None and key == "momentum_buffer":
        return ""
    kinds = _kind(value), _kind(parameter)
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} saved, {kinds[1]} here"
    is_wrong = not value.isfinite().all() or (key in _SQUARES and (value < 0).any())
    return "numbers that no optimizer writes, negative or not finite" if is_wrong else ""


def _kind(value: object) -> str:
    """Return the dtype and shape of a tensor, or any other value, as text."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"{value}"


def _is_count(value: object) -> bool:
    """Return whether a value is a whole number >= 0, as a number or in a tensor."""
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex():
        value = value.item()
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 <= value < _LARGEST_COUNT
        and value == int(value)
    )


def _is_negative(value: object) -> bool:
    """Return whether a number, or any number in a list or tuple, is negative or not finite."""
    if isinstance(value, list | tuple):
        return any(map(_is_negative, value))
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    return isinstance(value, int | float) and not 0 <= value < float("inf")


def _by_parameter(
    saved: Mapping[str, Any], optimizer: Optimizer
) -> Iterator[tuple[int, Tensor, Mapping[str, Any]]]:
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        yield number, parameter, saved["state"].get(number, {})


def _fill(saved: _Saved, step: Step, schedulers: Sequence[Any], undo: ExitStack) -> None:
    """Load optimizers and schedulers; check the weights. `undo` gets callbacks that restore old values."""
    for optimizer, each in zip(step.plan.optimizers.values(), saved.optimizers, strict=True):
        undo.callback(vars(optimizer).update, dict(vars(optimizer)))
        state = {
            number: {key: _shard(value, parameter) for key, value in values.items()}
            for number, parameter, values in _by_parameter(each, optimizer)
            if values
        }
        with _expecting(saved.path, "optimizers' state_dict"):
            load_optimizer(optimizer, {**each, "state": state})
    for number, scheduler in enumerate(schedulers):
        if hasattr(scheduler, "state_dict"):
            undo.callback(scheduler.load_state_dict, copy.deepcopy(scheduler.state_dict()))
        with _expecting(saved.path, "schedulers' state_dict"):
            scheduler.load_state_dict(saved.schedulers[number])
    check_weights(step.plan.model, saved.path)


def _shard(value: Any, parameter: Tensor) -> Any:
    has_shape = isinstance(value, Tensor) and value.shape == parameter.shape
    return shard_like(value, parameter) if has_shape and is_sharded(parameter) else value


def _scale(saved: Mapping[str, Any], scaler: LossScale) -> LossScale:
    factors = [saved[key] for key in ("scale", "growth_factor", "backoff_factor")]
    counts = [saved[key] for key in ("_growth_tracker", "growth_interval")]
    if not (all(0 < each < float("inf") for each in factors) and all(map(_is_count, counts))):
        raise CheckpointError(
            f"load_accelerate: {_SCALER} must hold positive factors and counts, got {factors} and {counts}"
        )
    return replace(
        scaler,
        scale=torch.full_like(scaler.scale, saved["scale"]),
        good_steps=torch.full_like(scaler.good_steps, saved["_growth_tracker"]),
        growth_factor=saved["growth_factor"],
        backoff_factor=saved["backoff_factor"],
        growth_interval=saved["growth_interval"],
    )


def _num_updates(saved: Mapping[str, Any]) -> int:
    return max((int(each["step"]) for each in saved["state"].values() if "step" in each), default=0)


def _unused(saved: _Saved, scaler: LossScale | None, schedulers: Sequence[Any]) -> list[str]:
    read = {_SCALER, *_files("optimizer", len(saved.optimizers))}
    read |= {*_files("scheduler", len(schedulers))}
    names = {path.name for path in saved.path.iterdir() if not _WEIGHTS.fullmatch(path.name)}
    rest = sorted(names - read)
    lines = [f"left out: {', '.join(rest)}"] if rest else []
    if _files("scheduler", len(schedulers) + 1)[-1] in rest:
        lines.append("give schedulers=[...] to have them filled")
    if scaler is None and saved.has_scale:
        lines.append(f'{_SCALER} is left out; the plan has no with_amp("fp16")')
    if scaler is not None and not saved.has_scale:
        lines.append(f"{_SCALER} is not there; the loss scale starts fresh")
    return lines
