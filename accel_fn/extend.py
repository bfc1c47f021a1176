"""For those who write transforms, strategies and plug-ins: what a plan is made of, and how to fill it."""

from accel_fn.names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "base.batch": (
            "map_tensors",
            "tensors_of",
            "to_device",
        ),
        "base.launch_options": ("parse_mesh",),
        "base.mesh_axes": ("mesh_shape",),
        "base.state": (
            "LossScale",
            "check_state",
        ),
        "checkpoint.compare": ("unlike",),
        "checkpoint.format.plain_data": ("from_plain",),
        "checkpoint.run_state": ("load_optimizer",),
        "checkpoint.weights.save_load_model": ("check_weights",),
        "comm.collectives": ("all_or_none",),
        "comm.dtensor": (
            "is_sharded",
            "shard_like",
        ),
        "comm.primitives": (
            "exchange",
            "exchange_number",
        ),
        "observe.log_lines": (
            "log_events",
            "log_lines",
        ),
        "step.global_mean": ("GlobalMean",),
        "step.plan": (
            "GradFn",
            "SlotFunction",
            "Stateful",
            "describe",
        ),
        "step.loop": ("Strategy",),
        "step.observers": ("Observer",),
        "step.transform": (
            "fill",
            "transform",
        ),
        "step.update": ("Prepared",),
        "transforms.amp.amp": ("compute_dtype",),
    },
)
