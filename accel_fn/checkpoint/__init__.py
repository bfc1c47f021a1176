"""Checkpoints of one run, loadable at any world size; a checkpoint is complete or not there."""

from accel_fn.names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "contrib.accelerate.checkpoint": ("load_accelerate",),
        "checkpoint.store": (
            "Checkpoint",
            "list_checkpoints",
        ),
        "checkpoint.save_weights": ("whole_state_dict",),
    },
)
