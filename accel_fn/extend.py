"""Public names for authors of transforms, strategies and plug-ins."""

from accel_fn.names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "core.batch": (
            "map_tensors",
            "tensors_of",
            "to_device",
        ),
        "parallel.launch_options": ("parse_mesh",),
        "parallel.mesh": ("silent_meshes",),
        "core.mesh_axes": ("mesh_shape",),
        "core.state": (
            "LossScale",
            "check_state",
        ),
        "checkpoint.compare": ("unlike",),
        "checkpoint.files": ("from_plain",),
        "checkpoint.run_state": ("load_optimizer",),
        "checkpoint.weights": ("check_weights",),
        "core.collectives": ("all_or_none",),
        "core.dtensor": (
            "is_sharded",
            "shard_like",
        ),
        "core.primitives": (
            "exchange",
            "exchange_number",
        ),
        "observe.log_writers": (
            "log_events",
            "log_lines",
        ),
        "core.mean": ("GlobalMean",),
        "core.plan": (
            "GradFn",
            "SlotFunction",
            "Stateful",
            "describe",
        ),
        "core.loop": ("Strategy",),
        "core.observers": ("Observer",),
        "core.transform": (
            "fill",
            "transform",
        ),
        "core.update": ("Prepared",),
        "transforms.amp.amp": ("compute_dtype",),
    },
)
