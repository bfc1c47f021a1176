"""wrap: one model on several ranks, in the way that the launch says."""

from __future__ import annotations

from accel_fn._launch_options import launch_options
from accel_fn._plan import Transform
from accel_fn.transforms._ddp import wrap_ddp
from accel_fn.transforms._fsdp import wrap_fsdp


def wrap() -> Transform:
    """Train on all ranks as replicas or as shards, as the launch says.

    `accel-fn launch --wrap fsdp`, a configuration or ACCEL_FN_WRAP says so; where nothing does,
    replicas. For options of either, use `wrap_ddp` or `wrap_fsdp` themselves.

    Law: that of both: W ranks are one rank.

    Returns:
        `wrap_ddp()` or `wrap_fsdp()`.

    Raises:
        ValueError: ACCEL_FN_WRAP is neither "ddp" nor "fsdp".

    Cost: that of the one it is.

    >>> import accel_fn as af
    >>> af.wrap()(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=num_samples, own_parameters=[replicate()])
    """
    return wrap_fsdp() if launch_options().wrap == "fsdp" else wrap_ddp()
