"""wrap_ddp: train a replica on every rank, with gradients that DistributedDataParallel averages."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accel_fn.core import primitives
from accel_fn.core.dtensor import is_sharded, local
from accel_fn.core.loop import Strategy
from accel_fn.core.loss import loss_module_of, sparse_tables
from accel_fn.core.parameters import not_reached
from accel_fn.core.plan import Plan, SlotFunction, describe
from accel_fn.core.predicted_mean import PredictedMean
from accel_fn.core.primitives import device_backend
from accel_fn.core.state import DistState, over
from accel_fn.core.transform import Transform, fill, transform
from accel_fn.errors import ArgumentError, PlanError, check_flag, message
from accel_fn.parallel.synced_batch_norm import SyncedStrategy, check_synced, is_synced

_COMM_HOOKS = ("fp16", "bf16", "powersgd")
_OURS = ("self", "module", "process_group", "device_ids", "output_device")


@transform
def wrap_ddp(
    *, comm_hook: str | None = None, sync_batchnorm: bool = False, **ddp_options: Any
) -> Transform:
    """Train replicas on all ranks: start from rank 0's parameters, average the gradients.

    The average is the exact mean over the items of the global batch, however
    they are spread over the ranks. In a world of one it is a no-op.

    The user's model is not wrapped: DDP gets a private module whose forward is
    the loss, so a loss function may call any method of the model, any number
    of times.

    Law: W ranks give the result of one rank, for every W, uneven parts, any weights, an empty rank.
    Tests: `tests/laws/law03_worlds.py`.

    Args:
        comm_hook: send gradients in "fp16" or "bf16", or as low-rank factors
            ("powersgd"): less traffic, and no longer exact.
        sync_batchnorm: in a step, BatchNorm layers in training mode use the statistics of the rows
            of all ranks, so W ranks are one process for them too. The layers stay your objects.
            Under `accumulate`, the statistics cover one micro-batch of every rank, which has other
            rows on another number of ranks.
        **ddp_options: options of `DistributedDataParallel`, by name. Two defaults differ:
            `gradient_as_bucket_view=True`, and on a CPU `bucket_cap_mb=100`, since there a
            smaller bucket has nothing to overlap with.

    Returns:
        A transform.

    Raises:
        TypeError: `sync_batchnorm` is not True or False.
        ValueError: an option that DDP does not have, or that comes from the state. In `build`:
            `sync_batchnorm` if a layer has another forward than torch's, or with
            `accumulate("auto")` or `compiled(fullgraph=True)`; `static_graph` with `accumulate` or
            a `weight_fn` that is a mapping; any option with `wrap_tp`; in a world of several, an
            `nn.Embedding` with a `max_norm`, and on accelerators one with sparse gradients, if the
            backend cannot sum them.

    Cost: one all-reduce of the gradients per step, on an accelerator overlapped with the last
    backward, and one small collective of weights and losses during the last backward. On an
    accelerator, in the first step, and if the weight must be known (several terms, a loss scale,
    `accumulate("auto")`), there are two small ones: of weights, started before the first forward,
    and of losses. With `sync_batchnorm`, two collectives per BatchNorm layer and micro-batch, of
    twice the features of the widest layer; the step waits for the weights before the first forward,
    and a rank with fewer micro-batches than another computes one of the other's with weight 0. A
    loss that raises on one rank then leaves the other ranks in a collective until the time-out.

    Source: Li et al. 2020, arXiv:2006.15704.

    >>> import accel_fn as af
    >>> af.wrap_ddp(bucket_cap_mb=50)(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=count_samples, strategy=[wrap_ddp(bucket_cap_mb=50)])
    """
    if comm_hook is not None and comm_hook not in _COMM_HOOKS:
        rule = f"be one of {_COMM_HOOKS} or None"
        raise ArgumentError(message("wrap_ddp", "comm_hook", rule, comm_hook))
    check_flag("wrap_ddp", "sync_batchnorm", sync_batchnorm)
    _check_options(ddp_options)
    options: dict[str, Any] = {
        "comm_hook": comm_hook,
        "sync_batchnorm": sync_batchnorm,
        **ddp_options,
    }
    return fill(strategy=DDPSlot(make_ddp, **options))


class DDPSlot(SlotFunction):
    """The slot function of wrap_ddp: it calls `make_ddp` with its settings."""

    @property
    def traits(self) -> frozenset[str]:  # type: ignore[override]
        """Return the traits. Without `find_unused_parameters`, DDP waits for every gradient."""
        finds = self.keywords.get("find_unused_parameters")
        return frozenset({"takes_blocks", *([] if finds else ["needs_every_parameter"])})

    def validate(self, state: DistState, plan: Plan) -> None:
        """Refuse models and options that DDP would not handle."""
        given = [name for name, value in self.keywords.items() if value not in (None, False)]
        if self.keywords.get("sync_batchnorm"):
            check_synced("wrap_ddp", state, plan)
        if plan.shard_model and given:
            raise PlanError(
                f"build: wrap_ddp({given[0]}) must not be used with {describe(plan.shard_model[0])}, whose "
                "parameters DDP does not take; leave it out"
            )
        if self.keywords.get("static_graph") and plan.split:
            raise PlanError(
                "build: wrap_ddp(static_graph=True) must not be combined with accumulate, whose first "
                "micro-batches DDP does not see; leave out one"
            )
        if self.keywords.get("static_graph") and plan.terms:
            raise PlanError(
                "build: wrap_ddp(static_graph=True) must not be combined with a weight_fn of several terms, "
                "which a batch may leave out of the graph; leave out static_graph"
            )
        tables = sparse_tables(plan.model)
        group = None if state.device.type == "cpu" else state.group
        backend = None if group is None else device_backend(group)
        if tables and backend is not None:
            rule = f"have dense gradients on {backend.name().upper()}, which sums no others"
            got, repair = next(iter(tables)), "use sparse=False"
            raise PlanError(message("build", "wrap_ddp's model", rule, got, repair))


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


def make_ddp(
    state: DistState,
    module: nn.Module,
    plan: Plan,
    *,
    sync_batchnorm: bool = False,
    **options: Any,
) -> Strategy:
    """Return a `DDP` strategy, or `SplitReplicas` for a model that is split over another axis.

    Without replicas to average over, return a plain `Strategy`.
    """
    is_split = any(map(is_sharded, plan.model.parameters()))
    if state.world_size == 1 or (is_split and state.data.world_size == 1):
        return Strategy(state, module, plan)
    if is_split:
        return SplitReplicas(state, module, plan)
    kind = SyncedDDP if sync_batchnorm and is_synced(state, plan) else DDP
    return kind(state, module, plan, **options)


class SplitReplicas(Strategy):
    """Replicas over `dp` of a model that is split over a different axis: DDP refuses DTensors."""

    def __init__(self, state: DistState, module: nn.Module, plan: Plan) -> None:
        super().__init__(state, module, plan)
        self._replicas = over(state)
        """The ranks that hold the same parts of the model as this rank."""
        self.finds_unused = False

    def average(self, state: DistState) -> None:
        """Average the gradients over the replicas, after the last backward."""
        super().average(state)
        if any(each.grad is None for each in self.reachable):
            named = self.model.named_parameters()
            raise not_reached([n for n, p in named if p.requires_grad and p.grad is None])
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for each in self.reachable:
            by_dtype.setdefault(each.dtype, []).append(local(cast("Tensor", each.grad)))
        sums = [primitives.start_sums(same, self._replicas, "step") for same in by_dtype.values()]
        for same, pending in zip(by_dtype.values(), sums, strict=True):
            pending.wait()
            torch._foreach_div_(same, self._replicas.world_size)


class _Turn:
    """Records which strategy ran the last backward, for strategies that train the same parameters."""

    last = 0
    """The id of the strategy; 0 before the first backward."""


_TURNS: WeakValueDictionary[int, _Turn] = WeakValueDictionary()
"""The `_Turn` of each parameter, by the parameter's id, since plans may share a model. The
strategies over a parameter keep the parameter and its `_Turn` alive."""


class DDP(Strategy):
    """Replicas whose gradients DistributedDataParallel averages in the last backward."""

    mean_type = PredictedMean

    def __init__(
        self,
        state: DistState,
        module: nn.Module,
        plan: Plan,
        *,
        comm_hook: str | None = None,
        **ddp_options: Any,
    ) -> None:
        options = {"gradient_as_bucket_view": True, **ddp_options}
        if state.device.type == "cpu":
            options.setdefault("bucket_cap_mb", 100)
        self.counts_first = comm_hook == "fp16"
        self.finds_unused = bool(options.get("find_unused_parameters"))
        if self.finds_unused:
            loss_module_of(module).idle = nn.Parameter(torch.zeros((), device=state.device))
        self._options = {"process_group": state.group, **options}
        self._comm_hook = comm_hook and _comm_hook(comm_hook, state.group)
        self._is_unfinished = False
        """Whether to wrap in DDP again: DDP refuses a forward after a backward that did not finish."""
        turn = _Turn()
        self._turns = {_TURNS.setdefault(id(each), turn) for each in plan.model.parameters()}
        self._left_out = plan.left_out()
        self.ddp = self._wrapped(module, **self._options)
        super().__init__(state, self.ddp, plan)
        self.loss_module = module

    @contextmanager
    def sharing(self, state: DistState) -> Iterator[None]:
        """Enter the context of a batch.

        Before that, wrap the loss in a new DDP if the old one cannot be used. With retries, also
        broadcast the buffers.
        """
        if not torch.is_grad_enabled():
            yield
            return
        for turn in self._turns:
            if turn.last != id(self):
                # If the backward of another plan has reached a parameter, DDP counts this parameter
                # as used. So wrap the loss in a new DDP below.
                self._is_unfinished |= self.finds_unused and turn.last != 0
                turn.last = id(self)
        if self._is_unfinished:
            self.ddp._remove_autograd_hooks()  # type: ignore[no-untyped-call]
            options = {**self._options, "init_sync": False}
            self.ddp = self.module = self._wrapped(self.loss_module, **options)
            self._is_unfinished = False
        if self.retries:
            # Broadcast rank 0's buffers now: a rank that runs out of memory would not join a later
            # broadcast. Every attempt needs the broadcast, since a failed attempt restores the
            # buffers that the rank had before. DDP would skip the broadcast after a forward under
            # no_sync, so request it.
            self.ddp.require_forward_param_sync = True
            with self.no_sync():
                self.ddp(None)
        try:
            with super().sharing(state):
                yield
        except BaseException:
            # With retries, backwards run under no_sync, where DDP does not wait for gradients. So
            # the failed backward leaves nothing unfinished in DDP.
            self._is_unfinished = not self.retries
            if self._is_unfinished:
                # The next step wraps the loss in a new DDP. Before that, the checks may run a
                # backward, in which the hooks of the failed forward would start all-reduces.
                self.ddp._remove_autograd_hooks()  # type: ignore[no-untyped-call]
            raise

    def _wrapped(self, module: nn.Module, **options: Any) -> DistributedDataParallel:
        """Wrap the loss in DDP, and fix the layout of DDP's gradient buckets."""
        # DDP must not wait for gradients of the parameters that the plan does not update.
        with _requiring_none(self._left_out):
            ddp = DistributedDataParallel(module, **options)
        _fix_buckets(ddp)
        if self._comm_hook:
            ddp.register_comm_hook(*self._comm_hook)
        return ddp

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context whose backward fills DDP's buckets without averaging them."""
        found: AbstractContextManager[Any] = self.ddp.no_sync()
        return found

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Enter a context for forwards and backwards outside of DDP."""
        with super().alone():
            yield
        # With unused parameters or a static graph, DDP records the parameters that any backward
        # reaches, also a backward of the checks. So the next step wraps the loss in a new DDP.
        self._is_unfinished |= self.ddp.find_unused_parameters or self.ddp.static_graph

    def average(self, state: DistState) -> None:
        """With retries, average by a backward of zeros; otherwise, check that DDP has averaged."""
        # A rank that runs out of memory in the middle of a backward cannot notify the peers that
        # wait for its gradients. So with retries, ranks send gradients only after all of them have
        # confirmed that their backwards succeeded.
        if self.retries:
            loss, _ = self.ddp(None)
            self.backward(loss, loss.new_zeros(()))
            return
        try:
            self.ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            named = self.loss_module.named_parameters()
            missed = [name for name, each in named if each.requires_grad and each.grad is None]
            raise not_reached([each.removeprefix("model.") for each in missed]) from error


@contextmanager
def _requiring_none(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Enter a context in which these parameters require no gradient."""
    for each in parameters:
        each.requires_grad_(False)
    try:
        yield
    finally:
        for each in parameters:
            each.requires_grad_(True)


class SyncedDDP(SyncedStrategy, DDP):
    """DDP whose BatchNorm layers use the rows of all ranks."""


def _fix_buckets(ddp: DistributedDataParallel) -> None:
    """Run a first backward of zeros, after which DDP's gradient buckets no longer change.

    The buckets decide the last bit of a sum over three ranks or more. Without this backward, DDP
    would change them after its first real backward. Then a resumed run would differ from an
    uninterrupted run, and a repeated first step would differ from the first attempt.
    """
    if ddp.static_graph or ddp.find_unused_parameters:
        # With these options, DDP keeps its first layout. With a static graph, the first backward
        # must be a real one.
        return
    loss, _ = ddp(None)
    loss.backward(torch.zeros_like(loss))
    ddp.zero_grad(set_to_none=True)


def _comm_hook(name: str, group: Any) -> tuple[Any, Any]:
    """Return the state and the function of torch's communication hook with this short name."""
    if name == "powersgd":
        return powerSGD_hook.PowerSGDState(group), powerSGD_hook.powerSGD_hook
    compress = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[
        name
    ]
    # The lambda hides the hook's name, by which DDP refuses the bf16 hook without CUDA.
    return group, lambda group, bucket: compress(group, bucket)
