"""Make the configuration of DeepSpeed's engine from the arguments of the call and the plan."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from accel_fn import Plan
from accel_fn.errors import ArgumentError, ArgumentTypeError, PlanError, message

_FUNCTION = "wrap_deepspeed"
_DEFAULT_STAGE = 2
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")
_OWNED = (
    *("gradient_accumulation_steps", "gradient_clipping", "optimizer"),
    *("bf16", "fp16", "amp", "torch_autocast"),
)
"""The settings whose values come from the plan."""
_REPAIRS = {
    **dict.fromkeys(_SIZES, "the loader decides how many samples a rank has"),
    "scheduler": "add schedule(scheduler) to the plan",
    "tensor_parallel": "use wrap_tp",
    "sequence_parallel_size": "DeepSpeed would train without it",
    "gradient_allreduce_op": "the step averages over the global batch",
    "managed_gradient_accumulation": "use accumulate",
    **dict.fromkeys(("tensorboard", "wandb", "comet", "csv_monitor"), "use log_to"),
}
"""A repair, or the reason, for each setting that a user must not give."""
_OTHERS = (
    *("activation_checkpointing", "aio", "autotuning", "checkpoint", "comms_logger", "compile"),
    *("communication_data_type", "data_efficiency", "data_types", "dataloader_drop_last"),
    *("datastates_ckpt", "disable_allgather", "disable_python_gc", "dump_state", "expert_parallel"),
    *("flops_profiler", "gradient_predivide_factor", "hybrid_engine", "log_level", "nebula"),
    *("memory_breakdown", "pipeline", "prescale_gradients", "sparse_gradients", "steps_per_print"),
    *("seq_parallel_communication_data_type", "timers", "use_data_before_expert_parallelism"),
    *("use_node_local_storage", "wall_clock_breakdown", "weight_quantization"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization"),
)
"""The other settings that DeepSpeed 0.19 knows. `_check_spelling` accepts them."""
_OF_ZERO = (
    *("offload_optimizer", "offload_param", "sub_group_size", "overlap_comm", "reduce_scatter"),
    *("reduce_bucket_size", "allgather_bucket_size", "allgather_partitions"),
    *("contiguous_gradients", "round_robin_gradients", "leaf_module"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size"),
    *("stage3_param_persistence_threshold", "stage3_gather_16bit_weights_on_model_save"),
)
"""Settings that DeepSpeed reads in zero_optimization, and ignores outside of it."""
_OF_HIDDEN_SIZE: Mapping[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda size: size * size,
    "stage3_prefetch_bucket_size": lambda size: int(0.9 * size * size),
    "stage3_param_persistence_threshold": lambda size: 10 * size,
}
"""Settings of zero_optimization whose "auto" is computed from the model's hidden size.
transformers computes them in the same way."""


def read_settings(
    config: str | os.PathLike[str] | Mapping[str, Any] | None,
    stage: int | None,
    offload: str | None,
    nvme_path: str | os.PathLike[str] | None,
    others: Mapping[str, Any],
) -> dict[str, Any]:
    """Join a configuration with the arguments of the call; refuse wrong or contradictory settings."""
    found = _read(config)
    for key, value in others.items():
        if found.setdefault(key, value) != value:
            raise _differs(key, found[key], value)
    found = _decided(found)
    _check_sections(
        found, ("zero_optimization", "optimizer", "bf16", "fp16", "amp", "torch_autocast")
    )
    zero = found.setdefault("zero_optimization", {})
    _check_sections(zero, ("offload_optimizer", "offload_param"))
    _set_stage(zero, stage)
    _set_offload(zero, offload, nvme_path)
    for key in _REPAIRS.keys() & found.keys():
        if not (isinstance(found[key], Mapping) and found[key].get("enabled") is False):
            raise ArgumentError(message(_FUNCTION, key, "be left out", found[key], _REPAIRS[key]))
    for key in set(_OF_ZERO) & found.keys():
        rule, repair = "be in zero_optimization", f'give zero_optimization={{"{key}": ...}}'
        raise ArgumentError(message(_FUNCTION, key, rule, found[key], repair))
    _check_spelling(found)
    return found


def _check_spelling(found: Mapping[str, Any]) -> None:
    """Refuse unknown names that resemble a known setting, since DeepSpeed would ignore them."""
    known = [*_OWNED, *_REPAIRS, *_OTHERS, *_OF_ZERO, "stage", "offload", "nvme_path"]
    for key in [each for each in found if each not in known]:
        near = get_close_matches(key, known, n=1, cutoff=0.66)
        if near:
            rule, repair = "be a setting of DeepSpeed, which ignores others", f"use {near[0]}"
            raise ArgumentError(message(_FUNCTION, key, rule, found[key], repair))


def _check_sections(found: Mapping[str, Any], keys: Sequence[str]) -> None:
    for key in keys:
        if not isinstance(found.get(key, {}), Mapping):
            rule = "be a mapping of settings"
            raise ArgumentTypeError(message(_FUNCTION, key, rule, found[key]))


def _set_stage(zero: dict[str, Any], stage: int | None) -> None:
    if stage is not None and zero.setdefault("stage", stage) != stage:
        raise _differs("stage", zero["stage"], stage)
    stage = zero.setdefault("stage", _DEFAULT_STAGE)
    rule = "be 0, 1, 2 or 3"
    if isinstance(stage, bool) or not isinstance(stage, int):
        raise ArgumentTypeError(message(_FUNCTION, "stage", rule, stage))
    if stage not in range(4):
        raise ArgumentError(message(_FUNCTION, "stage", rule, stage))


def _read(config: str | os.PathLike[str] | Mapping[str, Any] | None) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, str | os.PathLike):
        return _read_file(os.fspath(config))
    if not isinstance(config, Mapping):
        rule = "be a mapping, or the path of a JSON file"
        raise ArgumentTypeError(message(_FUNCTION, "config", rule, config))
    return copy.deepcopy(dict(config))


def _read_file(path: str) -> dict[str, Any]:
    rule = "be the path of a file with a JSON object"
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as error:
        raise ArgumentError(message(_FUNCTION, "config", rule, path, str(error))) from error
    if not isinstance(found, dict):
        raise ArgumentError(message(_FUNCTION, "config", rule, found))
    return found


def _differs(key: str, first: Any, second: Any) -> ArgumentError:
    got = f"{first!r} in config and {second!r} as an argument"
    return ArgumentError(f"{_FUNCTION}: {key} must be given once, got {got}; leave out one")


def _decided(section: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out settings that are None or "auto": the plan or a default gives their values.

    An "auto" that depends on the model's hidden size stays, and `build` replaces it.
    """
    found = {
        key: value
        for key, value in section.items()
        if value is not None and (value != "auto" or key in _OF_HIDDEN_SIZE)
    }
    return {
        key: _decided(value) if isinstance(value, Mapping) else value
        for key, value in found.items()
    }


def _set_offload(
    zero: dict[str, Any], offload: str | None, nvme_path: str | os.PathLike[str] | None
) -> None:
    """Add the sections that offload optimizer state, and at stage 3 also parameters; check them."""
    if offload not in (None, "cpu", "nvme"):
        rule = 'be None, "cpu" or "nvme"'
        raise ArgumentError(message(_FUNCTION, "offload", rule, offload))
    if nvme_path is not None and offload != "nvme":
        rule = 'be left out unless offload is "nvme"'
        raise ArgumentError(message(_FUNCTION, "nvme_path", rule, nvme_path))
    if offload is not None:
        path = {} if nvme_path is None else {"nvme_path": os.fspath(nvme_path)}
        given = zero.get("offload_optimizer", {})
        if path and given.get("nvme_path", path["nvme_path"]) != path["nvme_path"]:
            raise _differs("nvme_path", given["nvme_path"], path["nvme_path"])
        zero["offload_optimizer"] = {"device": offload, **path, **given}
        if zero["stage"] == 3:
            zero["offload_param"] = {"device": "cpu", **path, **zero.get("offload_param", {})}
    _check_offload(zero, offload)


def _check_offload(zero: Mapping[str, Any], offload: str | None) -> None:
    for key, others in {"offload_optimizer": (), "offload_param": ("cpu",)}.items():
        device = device_of(zero, key)
        if device not in ("cpu", "nvme", "none"):
            rule = 'be "cpu", "nvme" or "none"'
            raise ArgumentError(message(_FUNCTION, f"{key}.device", rule, device))
        if offload is not None and device not in (offload, *others) and key in zero:
            raise _differs(f"offload ({key})", device, offload)
        if device != "none" and zero["stage"] == 0:
            rule, repair = "be None at stage 0, which shards nothing", "use stage=1, 2 or 3"
            raise ArgumentError(message(_FUNCTION, "offload", rule, device, repair))
        if device == "nvme":
            _check_nvme(zero["stage"], key, zero[key].get("nvme_path"))


def _check_nvme(stage: int, key: str, path: Any) -> None:
    # Below stage 3, DeepSpeed would use host memory instead.
    if stage != 3:
        rule, repair = 'be None or "cpu" below stage 3', "use stage=3"
        raise ArgumentError(message(_FUNCTION, "offload", rule, "nvme", repair))
    if not path:
        rule = f'be the path of a folder if {key}.device is "nvme"'
        raise ArgumentError(message(_FUNCTION, "nvme_path", rule, path))


def offloads(settings: Mapping[str, Any]) -> set[str]:
    """Return the devices to which the engine offloads."""
    zero = settings["zero_optimization"]
    return {device_of(zero, key) for key in ("offload_optimizer", "offload_param")} - {"none"}


def device_of(zero: Mapping[str, Any], key: str) -> str:
    """Return the device to which a section of `zero_optimization` offloads, or "none"."""
    device: str = zero.get(key, {}).get("device", "none")
    return device


def autocast_dtype(plan: Plan) -> torch.dtype | None:
    """Return the dtype in which the plan's forwards compute, if they run under autocast."""
    contexts = [getattr(each, "keywords", {}) for each in plan.forward_contexts]
    return next((each["dtype"] for each in contexts if "dtype" in each), None)


def check_agrees(settings: Mapping[str, Any], plan: Plan, max_norm: float | None) -> None:
    """Refuse a configuration that differs from the plan; show both values."""
    for key, theirs, ours, repair in _both(settings, plan, max_norm):
        if theirs != ours:
            raise PlanError(
                f"build: wrap_deepspeed's {key} must be that of the plan, {ours!r}, got {theirs!r}; {repair}"
            )


def _both(
    settings: Mapping[str, Any], plan: Plan, max_norm: float | None
) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield (key, value in the configuration, value in the plan, repair) for each setting that both have."""
    if "gradient_accumulation_steps" in settings:
        num = [getattr(each, "keywords", {}).get("num_parts") for each in plan.split] or [1]
        theirs = settings["gradient_accumulation_steps"]
        yield "gradient_accumulation_steps", theirs, num[0], "leave it out, or use accumulate"
    if "gradient_clipping" in settings:
        theirs = settings["gradient_clipping"]
        yield "gradient_clipping", theirs, max_norm or 0.0, "leave it out, or use clip"
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "amp": None, "torch_autocast": None}
    for key, dtype in dtypes.items():
        if "enabled" in settings.get(key, {}):
            is_ours = dtype is not None and autocast_dtype(plan) == dtype
            theirs = bool(settings[key]["enabled"])
            yield f"{key}.enabled", theirs, is_ours, "leave it out, or use with_amp"
    (optimizer,) = plan.optimizers.values()
    section = settings.get("optimizer", {})
    if "type" in section:
        ours = type(optimizer).__name__
        yield "optimizer.type", section["type"], ours, "leave it out, or make this optimizer"
    for key, theirs in section.get("params", {}).items():
        for group in optimizer.param_groups:
            ours = _plain(group.get(key))
            yield (
                f"optimizer.params.{key}",
                _plain(theirs),
                ours,
                "leave it out, or give it to yours",
            )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def engine_config(
    settings: Mapping[str, Any], max_norm: float | None, model: nn.Module
) -> dict[str, Any]:
    """Return the engine's configuration. The step, not the engine, handles micro-batches and precision."""
    given = {key: value for key, value in settings.items() if key not in _OWNED}
    return {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        **given,
        "zero_optimization": _filled(settings["zero_optimization"], _hidden_size(model)),
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_norm or 0.0,
    }


def _filled(zero: Mapping[str, Any], size: int | None) -> dict[str, Any]:
    """Replace each "auto" by its value, and add the settings that offloading to files needs.

    If the model's hidden size is unknown, leave out each "auto", so that DeepSpeed's defaults apply.
    """
    found = {key: value for key, value in zero.items() if value != "auto"}
    if size is not None:
        found |= {key: _OF_HIDDEN_SIZE[key](size) for key in zero.keys() - found.keys()}
    if device_of(zero, "offload_optimizer") == "nvme":
        # Put each parameter into a sub-group alone: DeepSpeed reads a gradient incorrectly if the
        # gradient begins inside a block of the file.
        found["sub_group_size"] = 1
        # The buffers hold a parameter, its gradient, and three tensors of state, as many as AdamW
        # has with amsgrad.
        found["offload_optimizer"] = {"buffer_count": 5, **zero["offload_optimizer"]}
    if device_of(zero, "offload_param") == "nvme":
        # Switch off DeepSpeed's prefetch. If forward and backward both need a parameter, it requests
        # the parameter twice and fails.
        found["stage3_prefetch_bucket_size"] = 0
    return found


def _hidden_size(model: nn.Module) -> int | None:
    """Return the hidden size in a model's `config`: the largest if there are several, None without one."""
    config = getattr(model, "config", None)
    for each in (config, getattr(config, "text_config", None)):
        sizes = getattr(each, "hidden_sizes", None) or ()
        found = getattr(each, "hidden_size", None) or max(sizes, default=None)
        if isinstance(found, int):
            return found
    return None


def bound_of(clips: Sequence[Any]) -> float | None:
    """Return the smallest bound of the functions that clip by norm; None without such functions."""
    return min((each.keywords["max_norm"] for each in clips), default=None)


def signature_of(clips: Sequence[Any]) -> dict[str, Any]:
    """Return the clips in the form that a checkpoint compares: the names of functions by their slot."""
    return {"gradients": ["clip"] * len(clips)} if clips else {}
