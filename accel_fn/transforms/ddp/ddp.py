"""wrap_ddp: replicas on every rank, gradients averaged over them by DistributedDataParallel."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accel_fn.base.batch import tensors_of
from accel_fn.base.state import DistState
from accel_fn.errors import ArgumentError, PlanError, message
from accel_fn.step.loss_module import Own, bare
from accel_fn.step.plan import Asked, Plan, Transform
from accel_fn.transforms.ddp.bucket_scalars import Carrier, is_wide

_COMM_HOOKS = ("fp16", "bf16", "powersgd")
_OURS = ("self", "module", "process_group", "device_ids", "output_device")


def wrap_ddp(
    *, comm_hook: str | None = None, sync_batchnorm: bool = False, **ddp_options: Any
) -> Transform:
    """Train replicas on all ranks: rank 0's parameters to start with, averaged gradients after.

    Averaged means the exact mean over the items of the global batch, however
    they are spread over the ranks. In a world of one it does nothing.

    The user's model is not wrapped: DDP gets a private module whose forward is
    the loss, so a loss function may call any method of the model, any number
    of times.

    Law: W ranks are one rank, for every W, uneven parts, any weights, an empty rank.

    Args:
        comm_hook: send gradients in "fp16" or "bf16", or as low-rank factors
            ("powersgd"): less traffic, and no longer exact.
        sync_batchnorm: batch statistics over all ranks, by torch's
            `SyncBatchNorm` (accelerators only): replaces the model's BatchNorm layers.
            These talk in every forward, so every rank must have as many micro-batches
            with items as the others.
        **ddp_options: `DistributedDataParallel`'s own, by name. Ours differ in
            `gradient_as_bucket_view=True`, and on a CPU in `bucket_cap_mb=100`, where
            there is nothing to overlap a smaller bucket with.

    Returns:
        A transform.

    Raises:
        ValueError: an option that DDP does not have, or that comes from the state;
            in `build`, `sync_batchnorm` on CPUs; in a world of several, an `nn.Embedding` with
            a `max_norm`.

    Cost: one all-reduce of the gradients a step, on an accelerator overlapped with
    the last backward. On an accelerator, with a `comm_hook` or with float16, also two
    small collectives: of weights, started before the first forward and awaited before the
    first backward, and of losses, beside the last backward. Else these numbers travel with
    the gradients, and where the global batch and the world are no powers of two, the
    factor left open costs an optimizer that is not fused one pass over the gradients.

    Source: Li et al. 2020, arXiv:2006.15704.

    >>> import accel_fn as af
    >>> af.wrap_ddp(bucket_cap_mb=50)(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=num_samples, own_parameters=[replicate(bucket_cap_mb=50)])
    """
    if comm_hook is not None and comm_hook not in _COMM_HOOKS:
        rule = f"be one of {_COMM_HOOKS} or None"
        raise ArgumentError(message("wrap_ddp", "comm_hook", rule, comm_hook))
    _check_options(ddp_options)
    settings = dict(ddp_options)
    if comm_hook is not None:
        settings["comm_hook"] = comm_hook
    if sync_batchnorm:
        settings["sync_batchnorm"] = True
    replicating = Replicating(replicate, **settings)

    def ddp_plan(plan: Plan) -> Plan:
        return replace(plan, own_parameters=(*plan.own_parameters, replicating))

    return ddp_plan


class Replicating(Asked):
    """`replicate` with its settings."""

    given_by = "wrap_ddp"

    def check(self, state: DistState, plan: Plan) -> None:  # noqa: ARG002
        """Refuse what DDP would not see."""
        if self.keywords.get("static_graph") and plan.split:
            raise PlanError(
                "build: wrap_ddp(static_graph=True) must not be combined with accumulate, whose first "
                "micro-batches DDP does not see; leave out one"
            )


def _check_options(options: Mapping[str, Any]) -> None:
    known = [
        name for name in inspect.signature(DistributedDataParallel).parameters if name not in _OURS
    ]
    for name in options:
        if name in _OURS:
            raise ArgumentError(f"wrap_ddp: {name} must not be given; it comes from the state")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            repair = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            rule = "be options of DistributedDataParallel"
            raise ArgumentError(message("wrap_ddp", "ddp_options", rule, name, repair))


def replicate(
    state: DistState,
    module: nn.Module,
    *,
    comm_hook: str | None = None,
    sync_batchnorm: bool = False,
    **ddp_options: Any,
) -> nn.Module:
    """`module` under DDP over the state's group; itself in a world of one."""
    if state.world_size == 1:
        return module
    if sync_batchnorm and state.device.type == "cpu":
        raise PlanError(
            "build: wrap_ddp(sync_batchnorm=True) must have accelerators, got ranks on cpu; "
            "torch's SyncBatchNorm has no other kernels"
        )
    if sync_batchnorm:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module, state.group)  # type: ignore[no-untyped-call]
    options = {"gradient_as_bucket_view": True, **ddp_options}
    if state.device.type == "cpu":
        options.setdefault("bucket_cap_mb", 100)
    finds_unused = bool(options.get("find_unused_parameters"))
    if finds_unused:
        module.idle = nn.Parameter(torch.zeros((), device=state.device))
    on_host = state.device.type == "cpu" and state.scaler is None and comm_hook is None
    if on_host and is_wide(module):
        module = Carrier(module, finds_unused=finds_unused)
    replicated = Replicated(module, process_group=state.group, **options)
    _settle_buckets(replicated)
    if comm_hook is not None:
        _register(replicated, state.group, comm_hook)
    return replicated


class Replicated(DistributedDataParallel, Own):
    """DDP around a module of our own, without what goes around its forward where nobody looks."""

    def forward(self, batch: Any) -> Any:
        """As DDP's, but for the profiler's label and the calls through which hooks would be run."""
        looked_at = torch._C._autograd._profiler_enabled()
        if looked_at or self._use_python_reducer or self._delay_all_reduce_all_params:
            return super().forward(batch)  # type: ignore[no-untyped-call]
        [batch], _ = self._pre_forward(batch)  # type: ignore[no-untyped-call]
        DistributedDataParallel._active_ddp_module = self  # a compiler asks for it
        try:
            outcome = bare(self.module)(batch)
        finally:
            DistributedDataParallel._active_ddp_module = None  # also after simulated ranks
        return self._post_forward(outcome)  # type: ignore[no-untyped-call]


def _settle_buckets(replicated: DistributedDataParallel) -> None:
    """Let DDP lay out its buckets for good, by a first backward of zeros.

    It does so after its first backward, and a sum over three ranks or more
    depends on the layout in its last bit: a run that is resumed would differ
    from one that was not, and the first step from the same step again.
    """
    if replicated.static_graph or replicated.find_unused_parameters:
        return  # laid out once, and the first backward of a static graph must be a real one
    roots = tensors_of(replicated(None))
    torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])
    replicated.zero_grad(set_to_none=True)


def _register(replicated: DistributedDataParallel, group: Any, name: str) -> None:
    """Register one of torch's communication hooks by its short name."""
    if name == "powersgd":
        memory = powerSGD_hook.PowerSGDState(group)
        replicated.register_comm_hook(memory, powerSGD_hook.powerSGD_hook)
        return
    compress = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[
        name
    ]
    # Under a name of ours: by its own, DDP refuses the bf16 hook wherever there is no CUDA.
    replicated.register_comm_hook(group, lambda group, bucket: compress(group, bucket))
