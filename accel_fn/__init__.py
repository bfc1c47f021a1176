"""Training steps out of small pure transforms: one script on a CPU, on many GPUs, on many machines.

Names load on first use, so `import accel_fn` does not import torch.
"""

from __future__ import annotations

from accel_fn.names import lazy_names

__version__ = "0.1.0"

MODULES = ("checkpoint", "contrib", "data", "errors", "extend", "launcher", "testing")
__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "base.batch": ("count_samples",),
        "base.rng": ("seed_all",),
        "base.samples": ("samples",),
        "base.state": ("DistState",),
        "base.weights": ("count_labels",),
        "checkpoint.build": ("build",),
        "checkpoint.listing": ("latest",),
        "checkpoint.load": ("load",),
        "checkpoint.resume": ("resume",),
        "checkpoint.save": ("save",),
        "checkpoint.weights.save_load_model": (
            "load_model",
            "save_model",
        ),
        "comm.batch_mean": ("batch_mean",),
        "comm.collectives": (
            "any_rank",
            "barrier",
            "broadcast",
        ),
        "comm.gather": ("gather",),
        "comm.main_rank": (
            "main_first",
            "main_logger",
            "on_main",
            "print_on_main",
        ),
        "comm.mesh": ("device_mesh",),
        "comm.reduce": (
            "reduce_max",
            "reduce_mean",
            "reduce_min",
            "reduce_sum",
        ),
        "comm.world": (
            "distributed",
            "init",
        ),
        "contrib.deepspeed.wrap_deepspeed": ("wrap_deepspeed",),
        "data.draw": ("draw",),
        "data.group_batches": ("group_batches",),
        "data.loader": (
            "Epoch",
            "ShardedLoader",
        ),
        "data.prefetch": ("prefetch",),
        "data.shard_batch": ("shard_batch",),
        "data.shard_loader": ("shard_loader",),
        "errors": ("AccelError",),
        "launcher.function.launch": ("launch",),
        "observe.evaluate": ("evaluate",),
        "observe.explain": ("explain",),
        "observe.log_to": (
            "log_to",
            "log_values",
        ),
        "observe.predict": ("predict",),
        "observe.profile": ("profile",),
        "observe.progress": ("progress",),
        "step.autocast": ("autocast",),
        "step.grads": ("Grads",),
        "step.plan": ("Plan",),
        "step.report": ("Report",),
        "step.step": ("Step",),
        "step.transform": (
            "Transform",
            "compose",
        ),
        "transforms.accumulate.accumulate": ("accumulate",),
        "transforms.activation_checkpointing": ("checkpoint_activations",),
        "transforms.amp.amp": ("with_amp",),
        "transforms.average": (
            "averaged",
            "ema",
            "swa",
        ),
        "transforms.check_replicas": ("check_replicas",),
        "transforms.clip": (
            "clip",
            "clip_value",
        ),
        "transforms.compile.compiled": ("compiled",),
        "transforms.ddp": ("wrap_ddp",),
        "transforms.freeze": ("freeze",),
        "transforms.fsdp.fsdp": ("wrap_fsdp",),
        "transforms.local_sgd.local_sgd": ("local_sgd",),
        "transforms.place": ("place",),
        "transforms.preemption": ("Preemption",),
        "transforms.reproducible.reproducible": ("reproducible",),
        "transforms.schedule.schedule": ("schedule",),
        "transforms.skip": (
            "skip_nonfinite",
            "skip_spikes",
        ),
        "transforms.tp.wrap_tp": ("wrap_tp",),
        "transforms.when": ("when",),
        "transforms.wrap_as_launched": ("wrap_as_launched",),
    },
    modules=MODULES,
)
