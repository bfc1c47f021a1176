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
        "core.batch": (
            "count_samples",
            "samples",
        ),
        "core.empty": ("empty",),
        "core.restored": ("seed_all",),
        "core.state": ("DistState",),
        "core.weights": ("count_labels",),
        "checkpoint.build": ("build",),
        "checkpoint.store": ("latest",),
        "checkpoint.load": ("load", "resume"),
        "checkpoint.save": ("save",),
        "checkpoint.save_weights": ("save_model",),
        "checkpoint.weights": ("load_model",),
        "core.collectives": (
            "any_rank",
            "barrier",
            "broadcast",
        ),
        "parallel.gather": ("gather",),
        "parallel.main_rank": (
            "main_first",
            "main_logger",
            "on_main",
            "print_on_main",
        ),
        "parallel.mesh": ("device_mesh",),
        "parallel.reduce": (
            "batch_mean",
            "reduce_max",
            "reduce_mean",
            "reduce_min",
            "reduce_sum",
        ),
        "parallel.world": (
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
        "launcher.launch": ("launch",),
        "observe.evaluate": ("evaluate",),
        "observe.explain": ("explain",),
        "observe.log_to": (
            "log_to",
            "log_values",
        ),
        "observe.predict": ("predict",),
        "observe.profile": ("profile",),
        "observe.progress": ("progress",),
        "core.autocast": ("autocast",),
        "core.grads": ("Grads",),
        "core.plan": ("Plan",),
        "core.report": ("Report",),
        "core.step": ("Step",),
        "core.transform": (
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
        "parallel.cp.wrap_cp": ("wrap_cp",),
        "parallel.ddp": ("wrap_ddp",),
        "transforms.freeze": ("freeze",),
        "parallel.fsdp.fsdp": ("wrap_fsdp",),
        "parallel.local_sgd.local_sgd": ("local_sgd",),
        "transforms.place": ("place",),
        "transforms.preemption": ("Preemption",),
        "parallel.reproducible.reproducible": ("reproducible",),
        "transforms.schedule.schedule": ("schedule",),
        "transforms.skip": (
            "skip_nonfinite",
            "skip_spikes",
        ),
        "parallel.tp.wrap_tp": ("wrap_tp",),
        "transforms.when": ("when",),
        "transforms.wrap_as_launched": ("wrap_as_launched",),
    },
    modules=MODULES,
)
