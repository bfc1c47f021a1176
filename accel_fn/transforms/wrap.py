"""wrap: one model on several ranks, in the way that the launch says."""

from __future__ import annotations

from dataclasses import replace

from accel_fn.base.launch_options import FromLaunch, Unsaid, launch_options
from accel_fn.step.plan import Plan, Transform
from accel_fn.transforms.ddp.ddp import Replicating, replicate
from accel_fn.transforms.fsdp.fsdp import Sharding, shard


class _Unsaid(Replicating, Unsaid):
    """`replicate`, as the launch says nothing."""

    given_by = "wrap"


class _Replicating(Replicating, FromLaunch):
    """`replicate`, because the launch says so."""

    given_by = "wrap"


class _Sharding(Sharding, FromLaunch):
    """`shard`, because the launch says so."""

    given_by = "wrap"


def wrap() -> Transform:
    """Train on all ranks as replicas or as shards, as the launch says.

    `accel-fn launch --wrap fsdp`, a configuration or ACCEL_FN_WRAP says so; where nothing does,
    replicas. `explain` says who said it. For options of either, use `wrap_ddp` or `wrap_fsdp` themselves.

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
    owners = {
        None: _Unsaid(replicate),
        "ddp": _Replicating(replicate),
        "fsdp": _Sharding(shard),
    }
    owner = owners[launch_options().wrap]

    def wrapped_plan(plan: Plan) -> Plan:
        return replace(plan, own_parameters=(*plan.own_parameters, owner))

    return wrapped_plan
