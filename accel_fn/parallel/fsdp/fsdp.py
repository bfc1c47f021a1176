"""wrap_fsdp: shard parameters, gradients and optimizer state over the ranks, by FSDP2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from accel_fn.core import primitives
from accel_fn.core.dtensor import WholeNumbers, is_sharded
from accel_fn.core.empty import give_memory, give_memory_to_plan
from accel_fn.core.grads import Grads
from accel_fn.core.loop import PaddingStrategy, Strategy
from accel_fn.core.loss import LossModule, loss_module_of, sparse_tables
from accel_fn.core.plan import Plan, SlotFunction, describe
from accel_fn.core.report import Report
from accel_fn.core.state import DistState, over
from accel_fn.core.transform import Transform, fill, transform
from accel_fn.core.update import Prepared, follow_shards
from accel_fn.errors import ArgumentTypeError, PlanError, check_count, check_flag, message
from accel_fn.parallel.blocks import Blocks, check_blocks
from accel_fn.parallel.fsdp.optimizer_trial import try_optimizer
from accel_fn.parallel.fsdp.sharded_loss import ShardedLoss
from accel_fn.parallel.fsdp.unit_order import UnitOrder
from accel_fn.parallel.fsdp.units import (
    check_shardable,
    has_inner,
    ignored_in,
    tops_of,
    units_of,
)
from accel_fn.parallel.mesh import device_mesh, make_mesh
from accel_fn.parallel.sharded_optimizers import check_updates_shards
from accel_fn.parallel.synced_batch_norm import SyncedStrategy, check_synced, is_synced


@transform
def wrap_fsdp(
    *,
    blocks: Blocks = None,
    ignore: Blocks = None,
    replicate: int = 1,
    reshard_after_forward: bool = True,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
    offload: bool = False,
    sync_batchnorm: bool = False,
    frozen: bool = False,
) -> Transform:
    """Train one model in shards on all ranks: parameters, gradients and optimizer state, 1/W on each.

    A block's parameters are unsharded for its forward and its backward. Parameters outside of all
    blocks are whole from the forward to the end of the backward. The model starts from rank 0's
    parameters and buffers; `load_model` fills a model that `empty` made. Every update gets the
    exact mean over the items of the global batch, as with `wrap_ddp`. In a world of one it is a
    no-op, unless `param_dtype` or `offload` is given, or the model needs memory.

    The user's model keeps its class and its `state_dict` keys; its parameters, and those that the
    optimizer holds, become shards (torch's `DTensor`) in `build`. The optimizer's state is sharded
    in the same way.

    Law: W ranks give the result of one rank, for every W, uneven parts, any weights, an empty rank.
    Tests: `tests/laws/law03_fsdp.py`.

    Args:
        blocks: the FSDP units: a class of modules, several, or names of modules (the name of a list
            means its items). Default: the modules that are repeated most in the model's outermost
            lists and sequences. `""`, the model itself: all parameters are whole from the start of
            the loss to the end of the backward, so that the loss may use them in any way, also by
            `torch.func` and `torch.autograd.grad`.
        ignore: modules whose parameters stay whole on every rank, in their dtype, named as blocks are:
            a frozen encoder or teacher that fits in memory, which is then not gathered.
        replicate: the number of groups of shards, which divides the number of ranks: parameters are
            sharded within a group of consecutive ranks, the same way in all groups.
        reshard_after_forward: False: blocks stay whole until their backward, and from one
            micro-batch to the next, which takes more memory and less traffic.
        param_dtype: the dtype of unsharded parameters, and of the inputs of a model or block;
            default: unchanged. Shards, and so the optimizer, keep their dtype.
        reduce_dtype: the dtype in which gradients are added up over the ranks; None: their dtype.
            Gradients in float64 are added up in float64, complex ones in their dtype.
        offload: keep shards, gradients and optimizer state in host memory.
        sync_batchnorm: as for `wrap_ddp`.
        frozen: shard the frozen models of the plan too, by their most frequent blocks, in the dtype that
            `place` gives them. Default: they are whole on every rank.

    Returns:
        A transform.

    Raises:
        ValueError: `replicate` is not an integer >= 1 (a TypeError too if it is not an integer), or
            `blocks` or `ignore` is an empty list. In `build`, on all ranks: `replicate` does not
            divide the number of ranks; `accumulate("auto")` with several ranks; `blocks` or
            `ignore` match nothing; a module in `ignore` is not frozen; the model holds a parameter
            that FSDP cannot shard (the error names it): one that is tied across blocks, 0-dim, not
            contiguous, sharded already, or of another dtype; an optimizer that cannot update shards
            (one that is not torch's is tried on small tensors); `replicate` with `wrap_tp`;
            `param_dtype` or `offload` with `wrap_tp` if one rank is along `dp`, or with
            `compiled(scope="step")`; or, in a world of several, an `nn.Embedding` with a `max_norm`
            or sparse gradients. In a step, on all ranks: the units of ranks or their order differ;
            the loss uses shards of a block's parameters, or puts other parameters into a block; in
            the first step, the loss or a gradient transform reads a number from shards.
        TypeError: another argument is of the wrong type.

    Warns:
        UserWarning: in `build`, on the main rank: an optimizer that torch does not have draws random numbers.

    Cost: per step, two gathers of each block, one gather of the rest, and one reduce-scatter of the
        gradients of each. With accumulation, the gathers are for every micro-batch, and gradients
        stay whole until the last one. Also two small collectives on the host and one of a number.
        In the first step, and if units are used in a new order, one more before each of them. If
        ranks have different numbers of micro-batches, ranks with fewer compute another rank's with
        weight 0. The global norm costs one collective of a number. With `offload`, the host waits
        for the gradients at the end of a backward, and for the values that the update reads.

    Source: Zhao et al. 2023, arXiv:2304.11277; Rajbhandari et al. 2020, arXiv:1910.02054.

    >>> import accel_fn as af
    >>> af.wrap_fsdp(replicate=2)(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=count_samples, strategy=[wrap_fsdp(replicate=2)])
    """
    check_blocks("wrap_fsdp", blocks)
    check_blocks("wrap_fsdp", ignore, "ignore")
    check_count("wrap_fsdp", "replicate", replicate)
    flags = {
        "reshard_after_forward": reshard_after_forward,
        "offload": offload,
        "sync_batchnorm": sync_batchnorm,
        "frozen": frozen,
    }
    dtypes = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
    for name, flag in flags.items():
        check_flag("wrap_fsdp", name, flag)
    for name, dtype in dtypes.items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            rule = "be a floating-point torch.dtype or None"
            raise ArgumentTypeError(message("wrap_fsdp", name, rule, dtype))
    settings: dict[str, Any] = {"blocks": blocks, "ignore": ignore, "replicate": replicate}
    settings |= {**flags, **dtypes}
    return fill(strategy=FSDPSlot(make_fsdp, **settings))


class FSDPSlot(SlotFunction):
    """The slot function of wrap_fsdp: it calls `make_fsdp` with its settings."""

    @property
    def traits(self) -> frozenset[str]:  # type: ignore[override]
        """Return the traits: on one rank, FSDP may still convert or offload parameters."""
        alone = self.keywords["param_dtype"] is not None or self.keywords["offload"]
        own = ["acts_alone"] if alone else []
        return frozenset({"shards", "takes_empty", "takes_blocks", *own})

    def validate(self, state: DistState, plan: Plan) -> None:
        """Refuse a model that FSDP cannot shard, and transforms that do not work with FSDP."""
        if self.keywords["sync_batchnorm"]:
            check_synced("wrap_fsdp", state, plan)
        replicate = self.keywords["replicate"]
        if replicate > 1 and plan.shard_model:
            rule, repair = f"be 1 with {describe(plan.shard_model[0])}", "leave it out"
            raise PlanError(message("build", "wrap_fsdp(replicate)", rule, replicate, repair))
        alone = [name for name in ("param_dtype", "offload") if self.keywords.get(name)]
        if alone and plan.shard_model and state.data.world_size == 1 < state.world_size:
            raise PlanError(
                f"build: wrap_fsdp({alone[0]}) must have two ranks along dp or more with "
                f"{describe(plan.shard_model[0])}, got one; leave wrap_fsdp out"
            )
        self.num_parts(state.world_size)
        for name in sparse_tables(plan.model) if state.world_size > 1 else ():
            rule, repair = "have dense gradients", "use sparse=False, or wrap_ddp"
            raise PlanError(message("build", "wrap_fsdp's model", rule, name, repair))
        if plan.having("retries") and state.world_size > 1:
            raise PlanError(
                'build: accumulate("auto") must not be used with wrap_fsdp, since a rank that is out of '
                "memory cannot join the collectives of the others; give a number of micro-batches, or "
                "use wrap_ddp"
            )
        if plan.compile_step and alone:
            raise PlanError(
                f'build: wrap_fsdp({alone[0]}) must not be used with compiled(scope="step"), whose graph '
                'cannot hold what gathers parameters; leave it out, or use scope="loss"'
            )
        self._check_shardable(plan)
        for model in plan.frozen.values() if self.keywords["frozen"] else ():
            check_shardable(model, units_of(model, None), (), is_split=False, is_frozen=True)
        for optimizer in plan.optimizers.values():
            check_updates_shards(optimizer, "wrap_fsdp")

    def _check_shardable(self, plan: Plan) -> None:
        blocks, ignore = self.keywords["blocks"], self.keywords["ignore"]
        units = units_of(plan.model, blocks, ignore)
        is_split = bool(plan.shard_model)
        check_shardable(plan.model, units, ignored_in(plan.model, ignore), is_split=is_split)

    def num_parts(self, size: int) -> Mapping[str, int]:
        """Return into how many parts FSDP divides parameters, gradients and optimizer state.

        For all three, it is the number of ranks in a group of shards.
        """
        replicate = self.keywords["replicate"]
        if size % replicate:
            rule = f"divide the number of ranks, {size}"
            raise PlanError(message("build", "wrap_fsdp(replicate)", rule, replicate))
        return dict.fromkeys(("parameters", "gradients", "optimizer"), size // replicate)

    def share(self, plan: Plan, meshes: Mapping[str, DeviceMesh]) -> nn.Module | None:
        """Shard the model over `dp`, and return the loss over shards; None without this axis."""
        if "dp" not in meshes:
            return None
        self._check_shardable(plan)
        settings = dict(self.keywords)
        settings["frozen"] = plan.frozen if settings["frozen"] else {}
        for name in ("replicate", "sync_batchnorm"):
            del settings[name]
        before = dict(plan.model.named_parameters())
        module = LossModule(plan.loss_fn, plan.model, plan.terms, plan.frozen)
        sharded = ShardedLoss(module, keeps_whole=not settings["reshard_after_forward"])
        # Shard with a state of one rank: without a world, no rank can send its values to others.
        alone = DistState(device=next(plan.model.parameters()).device)
        _shard(alone, sharded, meshes["dp"], **settings)
        for optimizer in plan.optimizers.values():
            follow_shards(optimizer, before, plan.model)
        return sharded


def make_fsdp(
    state: DistState,
    module: nn.Module,
    plan: Plan,
    *,
    replicate: int,
    sync_batchnorm: bool,
    **settings: Any,
) -> Strategy:
    """Make an `FSDP` strategy over all ranks, or over `dp` if the model is split over another axis.

    On one rank, make a plain `Strategy`, unless parameters are converted or offloaded.
    """
    is_split = any(map(is_sharded, plan.model.parameters()))
    ranks = over(state) if is_split else state
    if ranks.world_size == 1 and settings["param_dtype"] is None and not settings["offload"]:
        give_memory_to_plan(plan, state.device)
        return Strategy(state, module, plan)
    mesh = device_mesh(state)["dp"] if is_split else make_mesh(state, replicate)
    for optimizer in plan.optimizers.values() if ranks.world_size > 1 else ():
        try_optimizer(optimizer, state, ranks, mesh)
    kind = SyncedFSDP if sync_batchnorm and is_synced(state, plan) else FSDP
    return kind(state, module, plan, ranks=ranks, mesh=mesh, **settings)


class FSDP(PaddingStrategy):
    """Shards of parameters, gradients and optimizer state on every rank, by `fully_shard`."""

    # A rank that lacks micro-batches runs forwards of weight 0. Gathering the whole model instead
    # would take the memory that sharding saves.

    def __init__(
        self,
        state: DistState,
        module: nn.Module,
        plan: Plan,
        *,
        ranks: DistState,
        mesh: DeviceMesh,
        reshard_after_forward: bool,
        **settings: Any,
    ) -> None:
        self.counts_first = torch.float16 in (settings["param_dtype"], settings["reduce_dtype"])
        before = dict(plan.model.named_parameters())
        sharded = ShardedLoss(module, keeps_whole=not reshard_after_forward)
        settings["frozen"] = plan.frozen if settings["frozen"] else {}
        _shard(state, sharded, mesh, reshard_after_forward=reshard_after_forward, **settings)
        for optimizer in plan.optimizers.values():
            follow_shards(optimizer, before, plan.model)
        self.sharded = sharded
        super().__init__(state, sharded, plan)
        left_out = {*map(id, sharded.unsharded_of(plan.left_out()))}
        self.reachable = [each for each in self.reachable if id(each) not in left_out]
        # Unless the model is split, FSDP shards over all ranks, not only over those along `dp`. So
        # all ranks must run the same number of micro-batches.
        self.ranks = ranks
        names = {each: name for name, each in plan.model.named_parameters()}
        self.order = UnitOrder(ranks, [names.get(each, "a parameter") for each in self.trained])
        self.begin_pass = self.order.begin
        sharded.keep_order(self.order, mesh)
        sharded.refuse_gradients_of_shards()
        # The model holds unsharded parameters in a forward, and shards otherwise. Any other
        # parameter was added after `build`.
        self.parameters.known = {*map(id, self.in_graph), *map(id, sharded.parameters())}

        self.__dict__["prepare"] = self._prepare_first

    def _prepare_first(
        self, plan: Plan, state: DistState, grads: Grads, report: Report
    ) -> Prepared:
        """In the first update, refuse transforms that read a number which they compute from shards."""
        with WholeNumbers():  # type: ignore[no-untyped-call]
            prepared = super().prepare(plan, state, grads, report)
        del self.__dict__["prepare"]
        return prepared

    def zero_gradients(self) -> None:
        """Zero the gradients of micro-batches of weight 0, and FSDP's sums in a wider dtype."""
        super().zero_gradients()
        self.sharded.zero_sums()

    def trainable(self) -> Sequence[nn.Parameter]:
        """Return the unsharded form and the shard of each parameter that a backward may reach."""
        # FSDP's hooks take gradients from these objects, which are the same in every step. With
        # them as inputs, the engine does not write to the `.grad` of other models in the loss.
        return self.sharded.trainable()

    def settle(self, state: DistState) -> None:
        """Compare the collectives of all ranks, and the parameters that have a gradient."""
        trained = self.trained if torch.is_grad_enabled() else ()
        self.order.end([index for index, each in enumerate(trained) if each.grad is None])

    def average(self, state: DistState) -> None:
        """Do nothing: FSDP has averaged the gradients in the last backward."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context whose backward leaves the gradients on this rank, unsharded."""
        return self.sharded.no_sync()

    def reset(self) -> None:
        """Reshard every unit, and forget collectives that did not finish."""
        self.order.abandon()
        self.sharded.reset()


class SyncedFSDP(SyncedStrategy, FSDP):
    """FSDP whose BatchNorm layers use the rows of all ranks."""


def _innermost_first(units: Mapping[str, nn.Module]) -> list[str]:
    return sorted(units, key=lambda name: name.count(".") if name else -1, reverse=True)


def _shard_frozen(
    sharded: ShardedLoss, frozen: Mapping[str, nn.Module], options: Mapping[str, Any]
) -> None:
    """Shard frozen models, unit by unit; keep parameters outside of blocks unsharded during the loss."""
    for name, model in frozen.items():
        units, tops = units_of(model, None), dict(tops_of(model, ""))
        for place in _innermost_first(units):
            reshard = place not in tops
            shard = partial(fully_shard, reshard_after_forward=reshard, **options)
            sharded.shard(units[place], shard)
        sharded.add_frozen(name, model)
        for top in tops.values():
            sharded.add_frozen_top(top)


def _shard(
    state: DistState,
    sharded: ShardedLoss,
    mesh: DeviceMesh,
    *,
    blocks: Blocks,
    ignore: Blocks,
    reshard_after_forward: bool,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    offload: bool,
    frozen: Mapping[str, nn.Module],
) -> None:
    """Copy rank 0's parameters and buffers to all ranks; shard the model and the frozen models."""
    model = loss_module_of(sharded).model
    units, ignored = units_of(model, blocks, ignore), ignored_in(model, ignore)
    tops = {name: top for name, top in tops_of(model, "") if name in units}
    for tensor in [*model.parameters(), *model.buffers()] if state.world_size > 1 else ():
        # Skip the shards of a split model: they are parts of rank 0's values already.
        if not (is_sharded(tensor) or tensor.is_meta):
            primitives.broadcast(tensor.detach(), state, 0, "build")
    pinned = state.device.type != "cpu"
    options: dict[str, Any] = {
        "mesh": mesh,
        "ignored_params": ignored,
        "mp_policy": MixedPrecisionPolicy(param_dtype, _adding(model, param_dtype, reduce_dtype)),
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy(),
    }
    # Shard inner units first, since a unit takes all parameters that no other unit has taken.
    # Parameters outside of blocks stay whole until the backward: the loss may call any method of
    # the model.
    for name in _innermost_first(units):
        reshard = reshard_after_forward and name not in tops
        shard = partial(fully_shard, reshard_after_forward=reshard, **options)
        sharded.shard(units[name], shard, is_whole=name in tops and not has_inner(name, units))
    _shard_frozen(sharded, frozen, {**options, "mp_policy": MixedPrecisionPolicy()})
    for top in tops.values():
        sharded.add_top(top)
    refuse_copy = sharded.__deepcopy__
    fully_shard(sharded, mesh=mesh, ignored_params=ignored)
    home = torch.device("cpu") if offload else state.device
    # FSDP takes over the new tensors in the first forward, below.
    give_memory(sharded, state.device, shards_on=home)
    # Set our `__deepcopy__` on the instance: FSDP gives the module a class whose `__deepcopy__`
    # differs.
    sharded.__dict__["__deepcopy__"] = refuse_copy
    loss_module_of(sharded).shards = {*filter(is_sharded, model.parameters())}
    with torch.no_grad():
        # Run this module before any other: FSDP makes the module that runs first the root.
        sharded(None)


def _adding(
    model: nn.Module, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> torch.dtype | None:
    """Return the dtype in which gradients are added up.

    Return None for float64 and complex gradients, which keep their own dtype.
    """
    gradients = param_dtype or next(p.dtype for p in model.parameters() if p.requires_grad)
    return None if gradients == torch.float64 or gradients.is_complex else reduce_dtype
