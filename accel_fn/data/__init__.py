"""Loaders, and the pure index arithmetic that gives each rank its samples of each batch."""

from accel_fn.names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "data.batch_plan": (
            "BatchPlan",
            "plan_batches",
        ),
        "data.sample_seeds": (
            "SeededSamples",
            "sample_seed",
            "seed_samples",
        ),
    },
)
