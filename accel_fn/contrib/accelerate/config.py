"""Translate the file that `accelerate config` writes; warn about keys without a counterpart."""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from accel_fn.errors import SettingsError, shown
from accel_fn.launcher import Given, Layer, check_names

_KEYS = {
    "fsdp_config": """
        fsdp_version fsdp_offload_params fsdp_min_num_params fsdp_sharding_strategy
        fsdp_reshard_after_forward fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap
        fsdp_backward_prefetch fsdp_backward_prefetch_policy fsdp_state_dict_type
        fsdp_forward_prefetch fsdp_use_orig_params fsdp_cpu_ram_efficient_loading
        fsdp_sync_module_states fsdp_activation_checkpointing
        fsdp_activation_checkpointing_offload""",
    "deepspeed_config": """
        deepspeed_config_file zero_stage offload_optimizer_device offload_param_device
        offload_optimizer_nvme_path offload_param_nvme_path gradient_accumulation_steps
        gradient_clipping zero3_init_flag zero3_save_16bit_model deepspeed_hostfile
        deepspeed_exclusion_filter deepspeed_inclusion_filter deepspeed_multinode_launcher
        deepspeed_moe_layer_cls_names""",
    "megatron_lm_config": """
        megatron_lm_tp_degree megatron_lm_use_custom_fsdp megatron_lm_no_load_optim
        megatron_lm_eod_mask_loss megatron_lm_overlap_cpu_optimizer_d2h_h2d
        megatron_lm_no_save_optim megatron_lm_optimizer_cpu_offload
        megatron_lm_use_precision_aware_optimizer
        megatron_lm_decoder_last_pipeline_num_layers megatron_lm_pp_degree
        megatron_lm_num_micro_batches megatron_lm_sequence_parallelism
        megatron_lm_recompute_activations megatron_lm_use_distributed_optimizer
        megatron_lm_gradient_clipping megatron_lm_recompute_granularity
        megatron_lm_recompute_method megatron_lm_recompute_num_layers
        megatron_lm_attention_backend megatron_lm_expert_model_parallel_size
        megatron_lm_context_parallel_size megatron_lm_attention_dropout
        megatron_lm_hidden_dropout megatron_lm_attention_softmax_in_fp32
        megatron_lm_expert_tensor_parallel_size megatron_lm_calculate_per_token_loss
        megatron_lm_use_rotary_position_embeddings""",
    "parallelism_config": """
        parallelism_config_dp_replicate_size parallelism_config_dp_shard_size
        parallelism_config_tp_size parallelism_config_cp_size parallelism_config_cp_backend
        parallelism_config_cp_comm_strategy parallelism_config_sp_size
        parallelism_config_sp_backend parallelism_config_sp_seq_length
        parallelism_config_sp_seq_length_is_variable
        parallelism_config_sp_attn_implementation""",
    "fp8_config": """
        backend use_autocast_during_eval margin interval fp8_format amax_history_length
        amax_history_len amax_compute_algorithm amax_compute_algo override_linear_precision
        optimization_level opt_level enable_fsdp_float8_all_gather pad_inner_dim""",
    "dynamo_config": """
        dynamo_backend dynamo_mode dynamo_use_fullgraph dynamo_use_dynamic
        dynamo_use_regional_compilation""",
    "mpirun_config": "mpirun_hostfile mpirun_ccl",
    "tp_config": "tp_size",
    "ipex_config": "ipex use_xpu",
}
SECTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {section: tuple(keys.split()) for section, keys in _KEYS.items()}
)
"""The keys of each section, in accelerate 1.15 and in older versions."""

_PREFIXES = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}
"""Prefixes of keys, by section; accelerate reads these keys with and without the prefix."""

_NOT_RESHARDED = "wrap_fsdp(reshard_after_forward=False)"
_SHARDING = {
    **dict.fromkeys(("true", "full_shard", "1"), ""),
    **dict.fromkeys(("false", "shard_grad_op", "2"), _NOT_RESHARDED),
    **dict.fromkeys(("no_shard", "3"), "wrap_ddp()"),
    **dict.fromkeys(("hybrid_shard", "4"), "wrap_fsdp(replicate=...)"),
    **dict.fromkeys(
        ("hybrid_shard_zero2", "5"), "wrap_fsdp(replicate=..., reshard_after_forward=False)"
    ),
}
_IN_SCRIPT: Mapping[str, str] = MappingProxyType(
    {
        **{f"fsdp_reshard_after_forward={value}": text for value, text in _SHARDING.items()},
        **{f"fsdp_sharding_strategy={value}": text for value, text in _SHARDING.items()},
        "fsdp_version=2": "",
        "fsdp_auto_wrap_policy=transformer_based_wrap": "",
        "fsdp_backward_prefetch=backward_pre": "",
        "fsdp_backward_prefetch_policy=backward_pre": "",
        "fsdp_sync_module_states=true": "",
        "fsdp_use_orig_params=true": "",
        "fsdp_offload_params": "wrap_fsdp(offload=True)",
        "fsdp_transformer_layer_cls_to_wrap": "wrap_fsdp(blocks=[{}])",
        "fsdp_activation_checkpointing": "checkpoint_activations()",
        "fsdp_activation_checkpointing_offload": "checkpoint_activations(offload=True)",
        "parallelism_config_dp_replicate_size": "wrap_fsdp(replicate={})",
        "deepspeed_config_file": 'wrap_deepspeed("{}")',
        "zero_stage=0": "wrap_deepspeed(stage=0)",
        "zero_stage=2": "",
        "zero_stage": "wrap_deepspeed(stage={})",
        "offload_optimizer_device=cpu": 'wrap_deepspeed(offload="cpu")',
        "offload_param_device=cpu": 'wrap_deepspeed(offload="cpu")',
        "offload_optimizer_device=nvme": 'wrap_deepspeed(offload="nvme")',
        "offload_param_device=nvme": (
            'wrap_deepspeed(zero_optimization={"offload_param": {"device": "nvme"}})'
        ),
        "offload_optimizer_nvme_path": 'wrap_deepspeed(nvme_path="{}")',
        "offload_param_nvme_path": (
            'wrap_deepspeed(zero_optimization={{"offload_param": {{"nvme_path": "{}"}}}})'
        ),
        "deepspeed_multinode_launcher=standard": "",
        "deepspeed_multinode_launcher=nossh": "",
        "zero3_save_16bit_model": "save_model",
        "gradient_clipping": "clip({})",
        "megatron_lm_gradient_clipping": "clip({})",
        "megatron_lm_recompute_activations": "checkpoint_activations()",
        "backend=ao": "",
        "interval=1": "",
        "dynamo_backend=inductor": "compiled()",
        "dynamo_mode=default": "",
        "dynamo_mode": 'compiled(mode="{}")',
        "dynamo_use_fullgraph": "compiled(fullgraph=True)",
        "dynamo_use_dynamic": "compiled(dynamic=True)",
        "dynamo_use_regional_compilation": 'compiled(scope="blocks")',
        "main_training_function=main": "",
    }
)
"""The code in the script that replaces a key, or a key with one value; empty if none is needed."""

_SAME = (
    *("num_machines", "machine_rank", "main_process_ip", "main_process_port"),
    *("rdzv_backend", "gpu_ids"),
)
"""Keys with the same name and meaning in accel_fn."""

_BOOLEANS = ("same_network", "debug", "enable_cpu_affinity")
"""Keys whose values are true or false. The first two change nothing in accel_fn: machines connect by
address on any network, and collectives are always checked."""

_DEVICES = ("GPU", "XPU", "NPU", "MLU", "SDAA", "MUSA", "HPU", "NEURON")
_PLAIN = ("NO", "MULTI_CPU", *(f"MULTI_{device}" for device in _DEVICES))
_WRAPPED = MappingProxyType({"FSDP": "fsdp", "DEEPSPEED": "deepspeed"})
"""Values of `distributed_type`, and the names that `wrap_as_launched` has for them."""

_OTHER_TYPES = ("MEGATRON_LM", "TP", "XLA")
"""Values of `distributed_type` without a counterpart in accel_fn's settings."""

_TYPES = (*_PLAIN, *_WRAPPED, *_OTHER_TYPES)
_SAGEMAKER = "AMAZON_SAGEMAKER"
_SAGEMAKER_TYPES = ("NO", "DATA_PARALLEL")
_SAGEMAKER_JOB = (
    *("ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "base_job_name"),
    *("pytorch_version", "transformers_version", "py_version", "additional_args"),
    *("sagemaker_inputs_file", "sagemaker_metrics_file"),
)
"""Keys with which accelerate starts a job; the processes of the job do not use them."""

_OTHERS = (
    *("main_training_function", "downcast_bf16", "dynamo_backend", "command_file", "commands"),
    *("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env"),
)
"""Keys that stand in no section, and that have no counterpart in accel_fn's settings."""

_KNOWN = (
    *("compute_environment", "distributed_type", "num_processes", "use_cpu"),
    *("mixed_precision", "fp16", *_SAME, *_BOOLEANS, *_OTHERS, *SECTIONS),
)
_MICROBATCHES = (
    ("deepspeed_config", "gradient_accumulation_steps"),
    ("megatron_lm_config", "megatron_lm_num_micro_batches"),
)

_AXES = {"cp": "parallelism_config_cp_size", "tp": "parallelism_config_tp_size"}
"""Axes of the mesh other than `dp`, and the keys of their sizes."""

_SPLIT_BY = {
    "cp": "in the script, wrap_cp(dims) cuts sequences along it",
    "tp": "in the script, wrap_tp() splits the model along it",
}

_Entry = tuple[str, str, object]
"""The section of a key (empty outside of sections), the key, and its value."""


class UnusedSettingsWarning(UserWarning):
    """A file sets something that accel_fn does not read from it."""


def translate(given: Mapping[str, Given]) -> Layer:
    """Translate settings of accelerate to those of accel_fn; refuse unknown keys.

    One warning names the settings that a launch does not read from this file.

    Keys whose value is null are left out, even unknown ones: accelerate's dialogue writes null for
    a question without an answer, and a later version may have new questions.
    """
    environment = given.get("compute_environment")
    sagemaker = environment if environment and environment.value == _SAGEMAKER else None
    kind = _distributed_type(given, _SAGEMAKER_TYPES if sagemaker else _TYPES)
    given = {name: each for name, each in given.items() if each.value is not None}
    if environment and environment.value not in (None, "LOCAL_MACHINE", _SAGEMAKER):
        environment.refuse("compute_environment", f"be LOCAL_MACHINE or {_SAGEMAKER}")
    known = (*_KNOWN, *_SAGEMAKER_JOB) if sagemaker else _KNOWN
    check_names({name: each.where for name, each in given.items()}, known)
    for name in _BOOLEANS:
        each = given.get(name)
        if each is not None and str(each.value).lower() not in ("true", "false", "yes", "no"):
            each.refuse(name, "be true or false")
    sections = {name: _section(name, given[name]) for name in SECTIONS if name in given}
    translated = {
        **{name: given.get(name) for name in _SAME},
        "num_processes": _processes(given.get("num_processes"), kind),
        "cpu": _use_cpu(given, kind),
        "mixed_precision": _precision(given),
        "num_microbatches": _microbatches(given, sections),
        "wrap": kind.becomes(_WRAPPED[str(kind.value)]) if kind.value in _WRAPPED else None,
        "mesh": _mesh(given, sections),
    }
    values = {name: each for name, each in translated.items() if each is not None}
    on_cpu = "cpu" in values and bool(values["cpu"].value)
    others = [*_outside(given, kind, on_cpu=on_cpu), *_in_sections(sections, values)]
    _warn(kind.source, others, _sizes(sections))

    def check(settings: Any, num_devices: int, environment: Mapping[str, str]) -> None:
        if sagemaker is not None and not environment.get("SM_HOSTS"):
            sagemaker.refuse(
                "compute_environment",
                "be LOCAL_MACHINE outside of a job of SageMaker",
                "accel_fn starts no job: give its estimator an entry point that calls accel-fn "
                "launch, which reads this file there",
            )
        # Do not check `gpu_ids` here: a later check names the devices that do not exist.
        uses_cpu = on_cpu or settings.cpu
        if kind.value != "NO" and not (uses_cpu or settings.gpu_ids or num_devices):
            rule, repair = (
                "fit a machine without accelerators",
                "launch with --cpu to train on the CPU",
            )
            kind.refuse("distributed_type", rule, repair)

    return Layer(values, check)


def _section(name: str, each: Given) -> Mapping[str, object]:
    """Read a section; rename its keys to those of the newest accelerate; refuse unknown keys."""
    if not isinstance(each.value, dict):
        each.refuse(name, "be a section")
    keys = {key: value for key, value in each.value.items() if value is not None}
    section = {spelled_today(name, str(key)): value for key, value in keys.items()}
    check_names(dict.fromkeys(section, f"{each.where}: {name}"), SECTIONS[name])
    return section


def _distributed_type(given: Mapping[str, Given], types: tuple[str, ...]) -> Given:
    """Read `distributed_type`. False means NO, since YAML reads an unquoted NO as false."""
    if "distributed_type" not in given:
        source = next(iter(given.values())).source
        raise SettingsError(f"{source}: distributed_type must be given, as accelerate does")
    kind = given["distributed_type"]
    if kind.value is False:
        kind = kind.becomes("NO")
    if kind.value not in types:
        known = [each.lower() for each in types]
        near = difflib.get_close_matches(str(kind.value).lower(), known, n=1, cutoff=0.7)
        meant = "".join(near).upper()
        # Accelerate's dialogue calls this type TPU, but its file has XLA.
        meant = "XLA" if kind.value == "TPU" else meant
        repair = f"did you mean {meant}?" if meant else ""
        kind.refuse("distributed_type", f"be one of {', '.join(types)}", repair)
    return kind


def _processes(count: Given | None, kind: Given) -> Given | None:
    """Read the number of processes. -1 selects the default, and the type NO means one process."""
    if kind.value != "NO":
        return None if count is not None and count.value == -1 else count
    if count is not None and count.value != 1:
        repair = "set distributed_type to MULTI_CPU or MULTI_GPU for more"
        count.refuse("num_processes", "be 1 where distributed_type is NO", repair)
    return count or kind.becomes(1)


def _use_cpu(given: Mapping[str, Given], kind: Given) -> Given | None:
    """Read whether to use the CPU. The type MULTI_CPU uses it even without `use_cpu`."""
    if kind.value == "MULTI_CPU":
        ids = given.get("gpu_ids")
        if ids is not None and ids.value not in (None, "all"):
            ids.refuse("gpu_ids", "be left out where distributed_type is MULTI_CPU")
        return kind.becomes(True)
    use_cpu = given.get("use_cpu")
    if use_cpu and use_cpu.value is True and str(kind.value).startswith("MULTI_"):
        rule = f"be false where distributed_type is {kind.value}"
        use_cpu.refuse("use_cpu", rule, "or set MULTI_CPU")
    return use_cpu


def _precision(given: Mapping[str, Given]) -> Given | None:
    """Read mixed_precision, or the older key fp16."""
    found, old = given.get("mixed_precision"), given.get("fp16")
    if found is None and old is not None:
        return old.becomes("fp16" if old.value else "no")
    return found


def _microbatches(
    given: Mapping[str, Given], sections: Mapping[str, Mapping[str, object]]
) -> Given | None:
    """Read the number of micro-batches from the section of Megatron-LM or of DeepSpeed."""
    for section, key in reversed(_MICROBATCHES):
        count = sections.get(section, {}).get(key, "auto")
        if count != "auto":
            return given[section].becomes(count)
    return None


def _mesh(given: Mapping[str, Given], sections: Mapping[str, Mapping[str, object]]) -> Given | None:
    """Make a mesh if `cp` or `tp` has several ranks. Replicas and shards are both ranks along `dp`."""
    sizes = _sizes(sections)
    if not sizes:
        return None
    section = given["parallelism_config"]
    for axis, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            section.becomes(size).refuse(_AXES[axis], "be an integer >= 1")
    return section.becomes(",".join(["dp=-1", *(f"{axis}={size}" for axis, size in sizes.items())]))


def _sizes(sections: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """Return the sizes of axes other than `dp` that have several ranks."""
    section = sections.get("parallelism_config", {})
    return {axis: section[key] for axis, key in _AXES.items() if section.get(key, 1) != 1}


def _outside(given: Mapping[str, Given], kind: Given, *, on_cpu: bool) -> Iterator[_Entry]:
    """Yield the entries that stand in no section, and that accel_fn's settings lack."""
    if kind.value in _OTHER_TYPES:
        yield "", f"distributed_type {kind.value}", True
    if "enable_cpu_affinity" in given and not on_cpu:
        yield "", "enable_cpu_affinity", given["enable_cpu_affinity"].value
    for name in _OTHERS:
        if name in given:
            yield "", name, given[name].value


def _in_sections(
    sections: Mapping[str, Mapping[str, object]], values: Mapping[str, Given]
) -> Iterator[_Entry]:
    """Yield the entries that stand in sections, and that accel_fn's settings lack."""
    taken = [key for _, key in _MICROBATCHES] if "num_microbatches" in values else []
    for name, section in sections.items():
        if not is_set(section.get("dynamo_backend", True)):
            continue
        if name == "parallelism_config" and _shards_fill_replicas(section, values):
            taken = [*taken, "parallelism_config_dp_shard_size"]
        taken = [*taken, *_AXES.values()]
        yield from ((name, key, value) for key, value in section.items() if key not in taken)


def _shards_fill_replicas(section: Mapping[str, object], values: Mapping[str, Given]) -> bool:
    """Return whether each replica is sharded over all of its ranks, as `wrap_fsdp` shards it."""
    keys = "parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size"
    given = [section.get(key, 1) for key in (*keys, *_AXES.values())]
    sizes = [size for size in given if isinstance(size, int)]
    if len(sizes) < len(given) or "num_processes" not in values:
        return False
    return values["num_processes"].value == math.prod(sizes)


def _warn(source: str, entries: Iterable[_Entry], axes: Collection[str]) -> None:
    """Warn once about keys that belong in the script, keys without a counterpart, and axes of the mesh."""
    written: list[str] = []
    missing: dict[str, list[str]] = {}
    for section, key, value in entries:
        text = in_script(key, value)
        if text:
            written.append(f"{key} is {text}")
        elif text is None:
            missing.setdefault(section or key, []).extend([key] if section else [])
    lines = []
    if written:
        lines.append(f"not read from this file: in the script, {', '.join(written)}")
    if missing:
        left = [f"{name} ({', '.join(keys)})" if keys else name for name, keys in missing.items()]
        lines.append(f"accel_fn has no counterpart yet for {', '.join(left)}; left out")
    lines += [f"the mesh has the axis {axis}: {_SPLIT_BY[axis]}" for axis in axes]
    if lines:
        warnings.warn(f"{source}: {'; '.join(lines)}", UnusedSettingsWarning, stacklevel=3)


def spelled_today(section: str, key: str) -> str:
    """Return the name of a key in the newest accelerate; return an unknown key unchanged."""
    prefix = _PREFIXES.get(section, "")
    spellings = (key, prefix + key, key.removeprefix(prefix))
    return next((each for each in spellings if each in SECTIONS[section]), key)


def in_script(key: str, value: object) -> str | None:
    """Return the code for the script: empty if none is needed, None if accel_fn has no counterpart."""
    exact = f"{key}={value}".lower()
    if exact in _IN_SCRIPT:
        return _IN_SCRIPT[exact]
    if not is_set(value) or (value == 1 and key.endswith(("_size", "_degree"))):
        return ""
    text = _IN_SCRIPT.get(key)
    if text is None:
        return None
    return text.format(", ".join(map(_plain, value if isinstance(value, list) else [value])))


def _plain(value: object) -> str:
    return value if isinstance(value, str) else shown(value)


def is_set(value: object) -> bool:
    """Return whether a value has an effect: it is not empty, false, "none" or "auto"."""
    if isinstance(value, list):
        return any(map(is_set, value))
    if isinstance(value, str):
        return value.strip().lower() not in ("", "no", "none", "false", "auto")
    return bool(value)
