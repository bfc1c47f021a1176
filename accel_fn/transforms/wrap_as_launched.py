"""wrap_as_launched: train on several ranks with the strategy that the launch names."""

from __future__ import annotations

from typing import Any

import accel_fn
from accel_fn.core.transform import Transform, fill, transform
from accel_fn.parallel.ddp import wrap_ddp
from accel_fn.parallel.launch_options import launch_options, source_of


@transform
def wrap_as_launched() -> Transform:
    """Train on all ranks as replicas or as shards, as the launch sets it.

    `accel-fn launch --wrap fsdp`, or `--wrap deepspeed`, a configuration or ACCEL_FN_WRAP sets it;
    the default is replicas. `explain` shows the source of the setting. For options, use `wrap_ddp`,
    `wrap_fsdp` or `wrap_deepspeed` themselves.

    Law: as for all three wrappers: W ranks give the result of one rank.

    Returns:
        `wrap_ddp()`, `wrap_fsdp()` or `wrap_deepspeed()`.

    Raises:
        ValueError: ACCEL_FN_WRAP is neither "ddp" nor "fsdp" nor "deepspeed".

    Cost: the cost of the wrapper that it returns.

    >>> import accel_fn as af
    >>> af.wrap_as_launched()(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=count_samples, strategy=[wrap_as_launched()])
    """
    made: Any = wrap_ddp()
    wrapper = launch_options().wrap
    if wrapper == "fsdp":
        # Import FSDP only if the launch names it: the import takes half a second.
        from accel_fn.parallel.fsdp.fsdp import wrap_fsdp

        made = wrap_fsdp()
    elif wrapper == "deepspeed":
        made = accel_fn.wrap_deepspeed()
    (slot,) = made.apply.slots["strategy"]
    return fill(strategy=slot.with_source(source_of("wrap")))
