"""The keys in the sections of accelerate's files, and their counterparts in a script."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from accel_fn.errors import shown

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
"""The keys of each section: those of accelerate 1.15 and of older versions."""

_PREFIXES = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}
"""Accelerate reads the keys of these with and without the prefix."""

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
        "zero_stage=2": _NOT_RESHARDED,
        "zero_stage=3": "wrap_fsdp()",
        "offload_param_device=cpu": "wrap_fsdp(offload=True)",
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
"""The counterpart of a key, or of one value of it; empty: it happens anyway."""


def named(section: str, key: str) -> str:
    """Spell a key as accelerate writes it today; leave unknown ones as they are."""
    prefix = _PREFIXES.get(section, "")
    spellings = (key, prefix + key, key.removeprefix(prefix))
    return next((each for each in spellings if each in SECTIONS[section]), key)


def in_script(key: str, value: object) -> str | None:
    """Line to write in the script; empty if the key changes nothing, None without a counterpart."""
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
    """Is it more than an empty value?"""
    if isinstance(value, list):
        return any(map(is_set, value))
    if isinstance(value, str):
        return value.strip().lower() not in ("", "no", "none", "false", "auto")
    return bool(value)
