"""The core of a training step: a loop over micro-batches around one exact mean.

`build(plan, state, observers=())` makes a step with these observers and those of the plan.
`accel_fn.build` adds the checks.
"""

from __future__ import annotations

from accel_fn.names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "core.loop": ("Strategy",),
        "core.observers": ("Observer",),
        "core.plan": ("Plan",),
        "core.step": ("Step", "build"),
    },
)
