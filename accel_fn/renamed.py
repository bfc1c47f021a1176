"""Calls and names that changed before anything was released: an old one is refused with the new one.

This file goes with version 1.0.
"""

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
"""The subject comes first, then the state, then the rest."""

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
