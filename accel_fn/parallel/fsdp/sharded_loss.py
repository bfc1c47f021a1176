"""The loss as a module over shards: it is FSDP's root, and hides FSDP's classes from the user.

FSDP changes the class of every module that it shards. The user would see the new class in
`type(model)`, errors and pickles. Here, the user's modules have the new classes only while this
file calls a method of FSDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from accel_fn.core.batch import map_tensors
from accel_fn.core.dtensor import WholeNumbers, is_of_shards, is_sharded, place_of_error
from accel_fn.core.loss import Outcome, loss_module_of
from accel_fn.errors import AccelError, LossError, PlanError
from accel_fn.parallel.fsdp.unit_order import OrderedGather, OrderedReduce, UnitOrder

_REPAIR = 'give wrap_fsdp(blocks=""), which gathers the whole model for a loss, or use wrap_ddp'
_BLOCKS_ALONE = (
    "step: wrap_fsdp must have a loss_fn that uses a block's parameters by calling the block, got one that "
    f"uses shards of them; compute that in the block's forward, or {_REPAIR}"
)


class ShardedLoss(nn.Module):
    """A module that maps a batch to its loss, over parameters that are unsharded only while needed.

    Every forward and backward gathers parameters. So all ranks must run the same number of forwards
    and backwards, see `FSDP.pad`.
    """

    def __init__(self, module: nn.Module, *, keeps_whole: bool) -> None:
        super().__init__()
        self.module = module
        self._keeps_whole = keeps_whole
        """Whether parameters stay whole between micro-batches."""
        self._kinds: dict[nn.Module, type[nn.Module]] = {}
        """The class that FSDP made for each module that has shards."""
        self._is_in_loss = False
        """Whether a loss with gradients is being computed."""
        self._is_empty = True
        """Whether the last forward had no batch."""
        self._ends: list[Node] = []
        """The autograd nodes that receive the gradients of shards. The list keeps their hooks alive."""
        self._tops: list[nn.Module] = []
        """The modules that hold parameters outside of all blocks."""
        self._frozen: dict[str, nn.Module] = {}
        """Frozen models in shards, by name."""
        self._is_running = False
        """Whether a loss is being computed, with gradients or without."""
        self._watches = True
        """Whether the next loss is the first, which runs under `WholeNumbers`."""
        self._whole: set[nn.Module] = set()
        """Units whose parameters are all whole while a loss is computed."""
        self._held: dict[nn.Module, list[Any]] = {}
        """FSDP's records of the parameters of each unit that is not in `_whole`."""

    def shard(
        self,
        unit: nn.Module,
        fully_shard: Callable[[nn.Module], object],
        *,
        is_whole: bool = False,
    ) -> None:
        """Shard the parameters of a part of the model, which keeps its class.

        A part with `is_whole` is gathered for every loss, which may use it in any way.
        """
        kind = type(unit)
        if not is_whole:
            unit.register_forward_hook(self._guarded)
        fully_shard(unit)
        self._kinds[unit], unit.__class__ = type(unit), kind
        if is_whole:
            self._whole.add(unit)
            self._leave_to_loss(unit)
        else:
            unit.register_forward_pre_hook(self._refuse_others, prepend=True)

    def _leave_to_loss(self, unit: nn.Module) -> None:
        """Stop FSDP from acting when the loss calls a part whose parameters it has gathered already.

        FSDP's hooks on outputs would mistake an inner backward, such as that of `torch.func.grad`,
        for the backward of the step.
        """
        [state] = self._call("_get_fsdp_state", [unit])
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            run = state._cast_forward_inputs
            return (
                run(args, kwargs) if self._is_running else state._pre_forward(module, args, kwargs)
            )

        def after(module: nn.Module, inputs: Any, output: Any) -> Any:
            return output if self._is_running else state._post_forward(module, inputs, output)

        unit.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        unit.register_forward_hook(after)

    def _refuse_others(self, unit: nn.Module, _inputs: object) -> None:
        """Refuse parameters that the loss has put into a unit: FSDP would overwrite them.

        For example, `torch.func.functional_call` puts parameters into a unit.
        """
        for each in self._held.get(unit, ()):
            where = each._module_info
            now = where.module._parameters[where.param_name]
            if now is not each.sharded_param and now is not each._unsharded_param:
                raise LossError(
                    "step: wrap_fsdp must have a loss_fn that calls a block with the parameters of the "
                    "model, got one that puts in others, as torch.func.functional_call does; "
                    + _REPAIR
                )

    def add_top(self, top: nn.Module) -> None:
        """Register a part whose parameters outside of blocks are gathered for each loss.

        Without gradients, they are resharded after the loss, and after a call of the part alone.
        """
        self._tops.append(top)
        top.register_forward_hook(self._free_alone if top in self._whole else self.free)

    def _free_alone(self, *_: object) -> None:
        """Reshard everything after a call outside of a loss, unless a backward is still to run.

        In a loss, a later call may need the gathered parameters.
        """
        if not self._is_running:
            self.free()

    def add_frozen(self, name: str, model: nn.Module) -> None:
        """Add a frozen model, whose units are sharded, to the modules that this loss gathers."""
        # As a child of this module, the model shares FSDP's root, streams and order of collectives.
        self.add_module(f"frozen_{len(self._frozen)}", model)
        self._frozen[name] = model

    def add_frozen_top(self, top: nn.Module) -> None:
        """Register a part of a frozen model, whose parameters outside of blocks each loss gathers.

        They are resharded after a call of the part outside of a loss.
        """
        self._tops.append(top)
        top.register_forward_hook(self._free_after_call)

    def _free_after_call(self, *_: object) -> None:
        """Reshard everything after a call of a frozen model outside of a loss.

        In a loss, a later call may need the gathered parameters.
        """
        if not self._is_running:
            self._call("reshard", self._kinds)
            self._forget_forwards()

    def forward(self, batch: Any, left_out: Sequence[str] = ()) -> Outcome:
        """Return the loss of a batch; for None, a zero that reaches every shard."""
        self._is_empty = batch is None
        if batch is None:
            # A sum over no elements is zero even if a parameter is NaN.
            zeros = [each.to_local().flatten()[:0].sum() for each in self._shards()]
            return torch.stack(zeros).sum(), {}
        # Gather the parameters outside of blocks before the loss, which may call any method of the
        # model.
        self._call("unshard", self._tops)
        self._is_in_loss, self._is_running = torch.is_grad_enabled(), True
        try:
            run = self._run_watched if self._watches else self.module
            outcome: Outcome = run(batch, left_out)
        except Exception as error:
            self._explain(error)
            raise
        finally:
            self._is_in_loss = self._is_running = False
        self.free()
        if any(map(is_sharded, tree_leaves(outcome))):
            raise LossError(_BLOCKS_ALONE)
        return outcome

    def _run_watched(self, batch: Any, left_out: Sequence[str]) -> Outcome:
        with WholeNumbers():  # type: ignore[no-untyped-call]
            outcome: Outcome = self.module(batch, left_out)
        self._watches = False
        return outcome

    def _explain(self, error: Exception) -> None:
        """Raise an error with a repair, if torch failed because a loss computes with shards."""
        is_missed = "appears to not have been used in the graph" in str(error) and self._held
        if isinstance(error, AccelError) or not (is_missed or is_of_shards(error)):
            return
        refused = LossError(_BLOCKS_ALONE)
        place = place_of_error(error, loss_module_of(self).model)
        if place:
            refused.add_note(f"step: torch failed in the forward of {place}")
        raise refused from error

    def __deepcopy__(self, _memo: object) -> Any:
        # Refuse a copy: a copy of a unit would include the unit's hooks, and with them this module.
        raise PlanError(
            "copy.deepcopy: a model must not be copied after wrap_fsdp has sharded it in build, as "
            "AveragedModel does; average by af.ema(decay), copy a frozen model before build, or write "
            "the weights by save_model"
        )

    def refuse_gradients_of_shards(self) -> None:
        """Refuse a loss that uses a shard itself, instead of the parameter that a block gathers.

        FSDP does not add up gradients of shards over the ranks, so each rank would have only the
        gradient of its own loss.
        """
        for shard in self._shards():
            node = get_gradient_edge(shard).node
            node.register_prehook(self._refuse_shard)
            self._ends.append(node)

    def _refuse_shard(self, _gradient: object) -> None:
        if not self._is_empty:
            raise LossError(_BLOCKS_ALONE)

    def _guarded(self, _module: nn.Module, _inputs: object, output: Any) -> Any:
        """Copy each output that is a view; refuse a backward of any output while the loss is computed.

        If the loss wrote to a view, the view would lose FSDP's hook, which gathers the parameters
        for the backward.
        """
        if isinstance(output, Tensor):
            return self._watch(output)
        # Blocks of transformers return tuples; this branch saves a call.
        if type(output) is tuple:
            return tuple([map_tensors(self._watch, each) for each in output])
        return map_tensors(self._watch, output)

    def _watch(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        output = tensor.clone() if tensor._is_view() else tensor
        output.register_hook(self._refuse_early)  # type: ignore[no-untyped-call]
        return output

    def _refuse_early(self, _gradient: Tensor) -> None:
        # FSDP would mistake this backward for the step's, and the gradients of the loss would be
        # wrong.
        if self._is_in_loss:
            raise LossError(
                "step: wrap_fsdp must have a loss_fn without gradients of gradients, got one that runs a "
                f"backward (torch.autograd.grad); {_REPAIR}"
            )

    def free(self, *_: object) -> None:
        """Reshard everything, unless a backward is still to run."""
        # FSDP keeps some units whole until the backward. Without gradients there is no backward, so
        # reshard these units here.
        if not torch.is_grad_enabled():
            self._call("reshard", self._kinds)
            if not self._is_in_loss:
                self._forget_forwards()

    def _forget_forwards(self) -> None:
        """Clear FSDP's record of forwards that had no backward.

        Otherwise the next backward would gather the last unit of these forwards.
        """
        for state in self._call("_get_fsdp_state", self._kinds):
            state._comm_ctx.post_forward_order.clear()
            for group in _groups_of(state):
                group._post_forward_indices.clear()

    def reset(self) -> None:
        """Reshard every unit, and forget collectives that did not finish."""
        # FSDP has this method since torch 2.13.
        forget = getattr(self, "reset_iter_state", None)
        if forget is not None:
            forget()
        self._call("reshard", self._kinds)
        # Drop the sums of the step that failed. Otherwise the next step would add its gradients to
        # them.
        self._forget_sums()

    def zero_sums(self) -> None:
        """Zero the sums of gradients that FSDP keeps in a wider dtype."""
        for parameter in self._group_parameters():
            if parameter.unsharded_accumulated_grad is not None:
                parameter.unsharded_accumulated_grad.zero_()

    def _forget_sums(self) -> None:
        """Drop the sums of gradients that FSDP keeps in a wider dtype and does not reset."""
        for parameter in self._group_parameters():
            parameter.unsharded_accumulated_grad = None

    def keep_order(self, order: UnitOrder, mesh: DeviceMesh) -> None:
        """Let `order` check the collectives of every unit, so that all ranks call them in one order."""
        if order.state.world_size == 1:
            return
        shard_axis, *others = mesh.get_all_groups()[::-1]
        names = {each: name for name, each in loss_module_of(self).model.named_modules()}
        for name, model in self._frozen.items():
            names |= {each: f"{key} of {name}".strip() for key, each in model.named_modules()}
        for number, unit in enumerate(self._kinds):
            name = names[unit] or "the model outside of its blocks"
            # A unit has no collectives if inner units hold all of its parameters.
            if not any(self._group_parameters([unit])):
                continue
            replicas = others[0] if others else None
            gather = OrderedGather(order, number, name)
            reduce = OrderedReduce(order, number, name, replicas, shard_axis.size())
            self._call("set_custom_all_gather", [unit], gather)
            self._call("set_custom_reduce_scatter", [unit], reduce)

    def _group_parameters(self, units: Iterable[nn.Module] | None = None) -> Iterator[Any]:
        """Yield FSDP's records of the parameters in these units; by default, in all units."""
        for state in self._call("_get_fsdp_state", self._kinds if units is None else units):
            for group in _groups_of(state):
                yield from group.fsdp_params

    def unsharded_of(self, shards: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return the unsharded parameters of these shards."""
        of_shard = {id(each.sharded_param): each for each in self._group_parameters()}
        found = [of_shard[id(each)] for each in shards if id(each) in of_shard]
        return [each.unsharded_param for each in found]

    def trainable(self) -> list[nn.Parameter]:
        """Return parameters that a backward may reach: each one unsharded, and its shard."""
        shards, found = self._shards(), []
        known = {*map(id, shards)}
        for module in self._kinds:
            self._call("unshard", [module])
            found += [each for each in module.parameters() if id(each) not in known]
            self._call("reshard", [module])
            if module not in self._whole:
                self._held[module] = [*self._group_parameters([module])]
        return [each for each in [*found, *shards] if each.requires_grad]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the whole gradients of a micro-batch on this rank, without a reduce-scatter."""
        self._sync(False)
        try:
            yield
        finally:
            self._sync(True)

    def _sync(self, on: bool) -> None:
        self._call("set_requires_gradient_sync", [self], on)
        if self._keeps_whole:
            # The next micro-batch uses the same gathered parameters, and the last backward frees
            # them.
            self._call("set_reshard_after_backward", [self], on)

    def _shards(self) -> list[Any]:
        return [each for each in self.parameters() if is_sharded(each) and each.requires_grad]

    def _call(self, method: str, modules: Iterable[nn.Module], *arguments: object) -> list[Any]:
        """Call a method of FSDP on these modules, with all units in the classes that FSDP gave them."""
        own = {module: type(module) for module in self._kinds}
        _set_classes(self._kinds)
        try:
            return [getattr(module, method)(*arguments) for module in modules]
        finally:
            _set_classes(own)


def _set_classes(kinds: Mapping[nn.Module, type[nn.Module]]) -> None:
    for module, kind in kinds.items():
        # Avoid the `__setattr__` of `nn.Module`, which takes far longer.
        object.__setattr__(module, "__class__", kind)


def _groups_of(state: Any) -> list[Any]:
    """Return FSDP's groups of parameters of a unit."""
    # Older torch has one group or None, not a list.
    several = vars(state).get("_fsdp_param_groups")
    return [each for each in ([state._fsdp_param_group] if several is None else several) if each]
