"""DeepSpeed's engine as a strategy: it averages and clips gradients, and updates parameters."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from accel_fn import DistState, Grads, Plan, Report, broadcast
from accel_fn.contrib.deepspeed.guards import (
    gathered,
    is_held,
    is_overwritten,
    refuse_state_dicts,
)
from accel_fn.contrib.deepspeed.settings import (
    autocast_dtype,
    bound_of,
    engine_config,
    signature_of,
)
from accel_fn.contrib.deepspeed.whole_state import gather_state, write_state
from accel_fn.errors import BatchError, LossError, StateError, check_equal
from accel_fn.extend import (
    GlobalMean,
    Prepared,
    Strategy,
    exchange,
    exchange_number,
)

_Weight = tuple[float, ...]
_Outcome = tuple[Tensor, Any]

_RULE = "step: wrap_deepspeed must have a loss_fn that reaches the same parameters on every rank"
_REPAIR = "call each part of the model on every rank, with no rows where it has nothing to do, or use stage=0"
_NOTE = (
    "wrap_deepspeed(stage=3): if a module returns an object other than a tensor, tuple, list or dict, such "
    "as a dataclass, return one of these; if the loss has gradients of gradients (torch.autograd.grad with "
    "create_graph=True), use a lower stage: their parameters are not whole any more"
)

_EMPTY = (
    "wrap_deepspeed(stage=3): a parameter is empty, of shape (0), outside of the forward of its module; "
    "use it by its module, as in model.head.weight, not by another reference to it"
)


class OneRank(Strategy):
    """A strategy for one rank, without DeepSpeed: it shards nothing, and clips and updates as any plan."""

    def __init__(
        self, state: DistState, module: nn.Module, plan: Plan, *, clips: Sequence[Any]
    ) -> None:
        super().__init__(state, module, plan)
        self._clips = clips

    def signature(self) -> Mapping[str, Any]:
        """Return the clips of the plan, which this strategy runs, in the form that a checkpoint compares."""
        return signature_of(self._clips)

    def prepare(self, plan: Plan, state: DistState, grads: Grads, report: Report) -> Prepared:
        """Clip the gradients with the clips that the strategy took from the plan; then prepare the update."""
        for each in self._clips:
            grads = each(state, grads)
        return super().prepare(plan, state, grads, report)


class ZeRO(Strategy):
    """ZeRO's stages 0 to 3 by DeepSpeed's engine, which owns gradients and update."""

    leaves_gradients = False
    counts_first = True

    def __init__(
        self,
        state: DistState,
        module: nn.Module,
        plan: Plan,
        *,
        settings: Mapping[str, Any],
        clips: Sequence[Any],
    ) -> None:
        import deepspeed

        super().__init__(state, module, plan)
        zero = settings["zero_optimization"]
        self._stage = zero["stage"]
        self.pads = self._stage >= 1
        (self._optimizer,) = plan.optimizers.values()
        self._is_open = False
        """Whether the engine holds gradients of a step that it has not applied."""
        self._state = state
        self._names = {id(p): name for name, p in plan.model.named_parameters() if p.requires_grad}
        """The names of the parameters that require a gradient, by the parameters' ids."""
        self._is_due = True
        """Whether the next backward checks which parameters the loss reaches."""
        self.parameters.known = {*self._names}
        trained = {*map(id, self.trained)}
        self._beside = [each for each in self.reachable if id(each) not in trained]
        """Parameters that require a gradient, but are in no optimizer."""
        if state.world_size > 1:
            mine = _sent(plan.model)
            for tensor, sent in zip(mine, broadcast(mine, state), strict=True):
                tensor.copy_(sent)
        own = [group["params"] for group in self._optimizer.param_groups]
        dtype = autocast_dtype(plan)
        self._max_norm, self._signature = bound_of(clips), signature_of(clips)
        with self._local_rank(), _unsent(plan.model, is_sharded=self._stage == 3):
            self._engine, *_ = deepspeed.initialize(
                model=module if dtype is None else _UnderAutocast(module, state, dtype),
                optimizer=self._optimizer,
                config=engine_config(settings, self._max_norm, plan.model),
                dist_init_required=False,
            )
        self._engine.set_gradient_accumulation_boundary(True)
        # The engine puts flat shards into the optimizer. Between updates, the optimizer must hold
        # the model's parameters, since checks, schedules and `explain` read them.
        self._flat = [group["params"] for group in self._optimizer.param_groups]
        self._own = own
        self._put(own)
        self.module = self.loss_module = self._engine
        # No parameter needs sums of gradients in float32: the engine adds up gradients itself.
        self.halves = []
        if self._stage:
            refuse_state_dicts(plan.model, self._optimizer)

    @contextmanager
    def _local_rank(self) -> Iterator[None]:
        """Set LOCAL_RANK, from which DeepSpeed chooses its device, if the launcher has not."""
        if "LOCAL_RANK" in os.environ:
            yield
            return
        os.environ["LOCAL_RANK"] = str(self._state.device.index or 0)
        try:
            yield
        finally:
            del os.environ["LOCAL_RANK"]

    def outputs(self, plan: Plan, state: DistState, part: Any, weight: _Weight) -> _Outcome:
        """Return loss and metrics of one micro-batch."""
        with self._local_rank():
            try:
                return super().outputs(plan, state, part, weight)
            except RuntimeError as error:
                if self._stage == 3 and re.search(r"[(\[]0[)\]]", str(error)):
                    error.add_note(_EMPTY)
                raise

    def _put(self, every: Sequence[Any]) -> None:
        for group, parameters in zip(self._optimizer.param_groups, every, strict=True):
            group["params"] = parameters

    @contextmanager
    def _engine_groups(self) -> Iterator[None]:
        """A context in which the optimizer holds the engine's flat shards."""
        self._put(self._flat)
        try:
            yield
        finally:
            self._flat = [group["params"] for group in self._optimizer.param_groups]
            self._put(self._own)

    def sharing(self, state: DistState) -> AbstractContextManager[Any]:
        """Refuse to continue after a failure: the engine keeps the failed batch's gradients."""
        if self._is_open and torch.is_grad_enabled():
            raise StateError(
                "step: wrap_deepspeed must not go on after a step that failed, whose gradients the engine "
                "keeps, got another step; make the model again, build, and load a checkpoint"
            )
        return super().sharing(state)

    def pad(
        self,
        state: DistState,
        mean: GlobalMean | None,
        parts: Sequence[Any],
        weights: Sequence[_Weight],
    ) -> tuple[Sequence[Any], Sequence[_Weight]]:
        """Drop micro-batches of weight 0; from stage 1 on, give every rank equally many.

        Ranks reduce gradients in the order in which a backward computes them, from stage 2 on in
        every backward. At stage 3 every forward gathers parameters. So a rank that has fewer
        micro-batches also runs a micro-batch of another rank, with weight 0. The gradient of this
        micro-batch is zero wherever the other rank's gradient is finite.

        Cost: from stage 1 on one small collective; a broadcast of a micro-batch if a rank needs one.
        """
        counted = [each for each in zip(parts, weights, strict=True) if each[1]]
        if self.pads and (self._stage == 3 or torch.is_grad_enabled()):
            if mean is not None:
                # If a rank could not count its batch, all ranks raise here.
                mean.total()
            counts = [len(counted)]
            if state.world_size > 1:
                counts = exchange_number(len(counted), state, "step")
            if self._stage == 3 and mean is not None and not max(counts):
                raise BatchError(
                    "step: wrap_deepspeed(stage=3) must have a batch that weighs something on one rank, got "
                    "none; skip such batches on all ranks"
                )
            if min(counts) < max(counts):
                mine = counted[-1][0] if counted else None
                spare = broadcast(mine, state, source=counts.index(max(counts)))
                counted = [*[(spare, ())] * (max(counts) - len(counted)), *counted]
        return [part for part, _ in counted], [weight for _, weight in counted]

    def run(
        self,
        plan: Plan,
        state: DistState,
        mean: GlobalMean,
        parts: Sequence[Any],
        weights: Sequence[_Weight],
    ) -> None:
        """Run the micro-batches. If an observer is due, check which parameters the loss reaches."""
        self._is_due, self._is_open = bool(self.observers.due), True
        super().run(plan, state, mean, parts, weights)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Enter a context for a backward that is not the last one before the update."""
        self._engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._engine.set_gradient_accumulation_boundary(True)

    def backward(self, loss: Tensor, seed: Tensor | None) -> None:
        """Add the gradients of `seed * loss` to the gradients that the engine keeps."""
        if self._is_due:
            self._is_due = False
            self._check_reached(loss)
        try:
            with self._local_rank():
                self._engine.backward(loss if seed is None else (loss * seed).sum())
        except AssertionError as error:
            # DeepSpeed raises this if a parameter has a gradient already.
            raise LossError(
                "step: wrap_deepspeed must have no backward beside the step, since its engine adds those "
                "gradients to the batch's, got one; call torch.autograd.grad, or make a copy of the model"
            ) from error
        except RuntimeError as error:
            if self._stage == 3 and "invalid gradient" in str(error) and "got [0]" in str(error):
                raise LossError(
                    "step: wrap_deepspeed(stage=3) must have a loss_fn that reaches parameters by their "
                    "modules, as in model.head.weight, got one that takes them from model.parameters(), "
                    "where they are empty; use the optimizer's weight_decay for a penalty, or a lower stage"
                ) from error
            if self._stage == 3:
                error.add_note(_NOTE)
            raise

    def _check_reached(self, loss: Tensor) -> None:
        """Check which parameters the loss reaches.

        Raise if it reaches no parameter of this engine, or a parameter of another engine. From
        stage 1 on, also raise if it reaches different parameters on different ranks, or if
        parameters were written since `build`.
        """
        leaves = {id(each): each for each in _leaves(loss)}
        names = [name for each, name in self._names.items() if each in leaves]
        foreign = [each for key, each in leaves.items() if is_held(each) and key not in self._names]
        is_written = self._stage > 0 and is_overwritten(self._engine.optimizer, self.trained)
        mine = names, len(foreign), is_written
        # At stage 0, do not exchange: ranks may run different numbers of micro-batches, and could
        # deadlock here. The engine reduces each gradient separately, so the loss may reach different
        # parameters on different ranks.
        every = exchange(mine, self._state, "step") if self._stage else [mine]
        if any(is_written for *_, is_written in every):
            raise StateError(
                "step: parameters must be written before build under wrap_deepspeed, whose engine writes its "
                "own copy over them in every update, got ones that are written after it; write them first, "
                "or use wrap_fsdp"
            )
        if not all(found for found, *_ in every):
            some = ", ".join([*self._names.values()][:3]) + (
                ", ..." if len(self._names) > 3 else ""
            )
            raise LossError(
                "step: loss_fn must reach the model's parameters by the model given to it, got no gradient "
                f"for {some}; no functional_call on copies, freeze what is not used, or "
                "wrap_ddp(find_unused_parameters=True)"
            )
        if any(number for _, number, _ in every):
            raise LossError(
                "step: wrap_deepspeed must have a loss_fn that reaches the parameters of one engine, got one "
                "that reaches another plan's, too; call requires_grad_(False) on those before the step, and "
                "requires_grad_(True) after it"
            )
        check_equal([", ".join(found) for found, *_ in every], _RULE, _REPAIR, LossError)

    def zero_gradients(self) -> None:
        """Do nothing: `pad` drops each micro-batch whose loss may be 0 / 0."""

    def apply(self, plan: Plan, state: DistState, prepared: Prepared) -> tuple[DistState, Report]:
        """Let the engine clip the gradients and update the parameters, with collectives."""
        for each in self._beside:
            # At stage 0, the engine would count this gradient in the norm for clipping.
            each.grad = None
        norm = self._norm_at_stage_0()
        with self._local_rank(), self._engine_groups():
            self._engine.step()
        self._is_open = False
        if self._stage:
            found = self._engine.get_global_grad_norm()
            # The engine reports -1 for a norm that is not finite.
            norm = None if found is None else torch.as_tensor(float(found), device=state.device)
            norm = norm if norm is None or norm >= 0 else torch.full_like(norm, torch.nan)
        # From stage 1 on, the engine skips an update if gradients are not finite.
        applied = self._always if self._engine.was_step_applied() else ~self._always
        report = replace(prepared.report, grad_norm=norm, applied=applied)
        return state.advanced(None, report.samples, report.weight), report

    def _norm_at_stage_0(self) -> Tensor | None:
        """Compute the gradients' norm: at stage 0, the engine clips by it, but does not report it."""
        if self._stage or self._max_norm is None:
            return None
        return self.norm([each.grad for each in self.trained if each.grad is not None])

    def signature(self) -> Mapping[str, Any]:
        """Return the clips of the plan, which the engine runs, in the form that a checkpoint compares."""
        return self._signature

    @contextmanager
    def whole(self, *, writes: bool) -> Iterator[None]:
        """Gather parameters and optimizer state on all ranks; with `writes`, update the shards at the end.

        Cost: a gather of each parameter and of each tensor of its state, and memory for all of
        them.
        """
        if not self._stage:
            yield
            return
        optimizer, zero = self._optimizer, self._engine.optimizer
        shards = optimizer.state
        with gathered(self.model, writes=writes):
            optimizer.state = gather_state(zero, optimizer, self._own)
            try:
                yield
                loaded = optimizer.state
            finally:
                optimizer.state = shards
            if writes:
                write_state(zero, optimizer, self._own, loaded)


def _leaves(loss: Tensor) -> list[Tensor]:
    """Return the tensors to which the backward of a loss gives a gradient."""
    ahead = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = {*ahead}
    while ahead:
        following = {node for node, _ in ahead.pop().next_functions if node is not None}
        ahead += following - seen
        seen |= following
    found = [getattr(node, "variable", None) for node in seen]
    return [each for each in found if each is not None]


def _cannot_be_sent(parameter: Tensor) -> bool:
    """Return whether DeepSpeed fails to send a parameter: one of 0 dimensions, or in channels last."""
    return not parameter.dim() or parameter.stride(-1) != 1


def _sent(model: nn.Module) -> list[Tensor]:
    """Return the tensors that the engine does not send: buffers, and parameters of some layouts."""
    return [*model.buffers(), *(p.detach() for p in model.parameters() if _cannot_be_sent(p))]


@contextmanager
def _unsent(model: nn.Module, *, is_sharded: bool) -> Iterator[None]:
    """A context in which the engine does not send the parameters that rank 0 has sent already."""
    held: list[Any] = [each for each in model.parameters() if _cannot_be_sent(each)]
    for each in held if is_sharded else ():
        # Stage 3 sends and shards every parameter as a flat tensor, so make it contiguous.
        each.data = each.data.contiguous()
    for each in held:
        # DeepSpeed does not send parameters with this attribute.
        each.ds_optim_param = True
    try:
        yield
    finally:
        for each in held:
            del each.ds_optim_param


class _UnderAutocast(nn.Module):
    """Computes the loss under the plan's autocast, which the engine disables on an accelerator."""

    def __init__(self, module: nn.Module, state: DistState, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = module
        self._device, self._dtype = state.device.type, dtype

    def forward(self, batch: Any, left_out: Sequence[str] = ()) -> _Outcome:
        with torch.autocast(self._device, self._dtype):
            outcome: _Outcome = self.module(batch, left_out)
            return outcome
