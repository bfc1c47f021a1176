"""A global batch in a fixed number of slots: the gradient of one is the same on whichever rank it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from accel_fn.base.batch import map_tensors, num_samples, part_sizes, split_rows
from accel_fn.base.rng import kept_random, key_random
from accel_fn.base.state import DistState
from accel_fn.comm import primitives
from accel_fn.errors import BatchError, PlanError, message
from accel_fn.step.backward import Backward, backward_seed
from accel_fn.step.global_mean import checked_total
from accel_fn.step.grads import Grads
from accel_fn.step.loss_module import run_forward
from accel_fn.step.microbatches import Parts, Weights, cut
from accel_fn.step.plan import Report
from accel_fn.step.same_on_all_ranks import fingerprints
from accel_fn.step.torch_internals import run_backward
from accel_fn.transforms.fsdp.sharded_loss import loss_module_of
from accel_fn.transforms.reproducible.tree_sum import Tensors, Tree, sum_over_ranks

_TRACKING = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
Slot = tuple[Parts, Weights]
"""Its micro-batches that count for something, and their weights."""


class Slotted(nn.Module):
    """The loss as a module, of which a step runs one slot at a time."""

    def __init__(self, module: nn.Module, num_slots: int) -> None:
        super().__init__()
        self.module = module
        self.num_slots = num_slots
        self.tracking = tracking_modules(loss_module_of(module).model)
        self._is_watched = True
        """Until a first batch has shown that its forward changes no buffers."""

    def forward(self, batch: Any) -> Tensor:
        """The loss of a batch."""
        loss: Tensor = self.module(batch)
        return loss

    @contextmanager
    def watched(self, state: DistState) -> Iterator[None]:
        """Refuse, on all ranks, a forward in it that changes what is saved with the model, the first time."""
        if not self._is_watched:
            yield
            return
        before = self._saved()
        yield
        after = self._saved()
        changed = [name for name, bits in after.items() if before.get(name) != bits]
        name = next(
            (each for names in primitives.exchange(changed, state, "step") for each in names), ""
        )
        if name:
            raise PlanError(
                "step: reproducible's model must change no buffers in its forward, which on each rank is "
                f"that of other slots, got {name}; give it persistent=False where it does not count"
            )
        self._is_watched = False

    def _saved(self) -> dict[str, int]:
        """The buffers that are saved with the model, by name: a sum over the bits of each."""
        model = loss_module_of(self.module).model
        trained = dict(model.named_parameters(remove_duplicate=False))
        found = {
            name: value
            for name, value in model.state_dict().items()
            if isinstance(value, Tensor) and name not in trained
        }
        return dict(zip(found, fingerprints(list(found.values())), strict=True)) if found else {}


def tracking_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Those that, in training mode, depend on which other slots their rank has, by name."""
    return {
        name or "the model": module
        for name, module in model.named_modules()
        if isinstance(module, nn.SyncBatchNorm)
        or (isinstance(module, _TRACKING) and module.track_running_stats)
    }


def check_tracking(tracking: Mapping[str, nn.Module], function: str) -> None:
    """Refuse running statistics that are being taken: each rank would take those of its own slots."""
    for name, module in tracking.items():
        if module.training:
            raise PlanError(
                f"{function}: reproducible's model must take no running statistics of batches, got {name}, "
                f"a {type(module).__name__} in training mode; use GroupNorm or track_running_stats=False, "
                "or freeze it by eval()"
            )


class SlotBackward(Backward):
    """A `GradFn`: each slot forward and backward by itself, under random numbers of its own.

    What is added up, and in which order, does not depend on the number of ranks.
    """

    @property
    def _slotted(self) -> Slotted:
        assert isinstance(self.module, Slotted)
        return self.module

    def _run(self, state: DistState, batch: Any) -> tuple[DistState, Grads, Report]:
        for parameter in self.trainable:
            parameter.grad = None
        slots, total, stop = self._agreed(state, batch)
        if not total:
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
            loss = torch.zeros((), device=state.device)
            return state, self._take(state, total), self._report(loss, total, stop)
        tree, first = Tree(), state.rank * len(slots)
        with self._slotted.watched(state), kept_random(state.device):
            for number, (parts, weights) in enumerate(slots, start=first):
                key_random(state, number)
                tree.add(self._summed(state, parts, weights, total))
        zero = torch.zeros((), device=state.device)
        mean, *found = sum_over_ranks(tree.total(), [zero, *self.parameters], state)
        for parameter, tensor in zip(self.parameters, found, strict=True):
            parameter.grad = tensor
        assert mean is not None
        return state, self._take(state, total), self._report(mean, total, stop)

    def _agreed(self, state: DistState, batch: Any) -> tuple[Sequence[Slot], float, bool]:
        """This rank's slots, the weight of those of all, and whether any rank asks for an end."""
        failure: Exception | None = None
        rows, slots = -1, list[Slot]()
        try:
            rows, slots = self._cut(state, batch)
        except Exception as error:
            failure = error
        weights = [float("nan")] if failure else [sum(weights) for _, weights in slots]
        stop = any(ask() for ask in self.plan.stops)
        ranks = primitives.exchange((rows, weights, stop), state, "step")
        total = checked_total(float(sum(each for _, ws, _ in ranks for each in ws)), failure)
        self._check_rows([each for each, _, _ in ranks])
        return slots, total, any(each for _, _, each in ranks)

    def _cut(self, state: DistState, batch: Any) -> tuple[int, list[Slot]]:
        """The number of samples of this rank, and its slots: none where they do not divide it."""
        self.settled.check()
        check_tracking(self._slotted.tracking, "step")
        rows, num_mine = num_samples(batch), self._slotted.num_slots // state.world_size
        if rows % num_mine:
            return rows, []
        slots = split_rows(batch, part_sizes(rows, num_mine))
        return rows, [cut(self.plan, slot) for slot in slots]

    def _check_rows(self, rows: Sequence[int]) -> None:
        """Refuse, on all ranks, slots that would not be the same in another world."""
        num_slots = self._slotted.num_slots
        if sum(rows) % num_slots or min(rows) != max(rows):
            got = " + ".join(map(str, rows))
            raise BatchError(
                f"step: batch must have a number of samples that num_slots={num_slots} of reproducible "
                f"divides, as many on every rank, got {got}; let it divide batch_size, and use "
                "drop_last=True"
            )

    def _summed(self, state: DistState, parts: Parts, weights: Weights, total: float) -> Tensors:
        """What a slot adds to the mean loss and to the gradients of the global batch."""
        mean: Tensor | None = None
        for part, weight in zip(parts, weights, strict=True):
            part = _in_own_memory(state, part)
            loss = run_forward(state, self.plan, self._slotted.module, part)
            if mean is None:
                self._check_graph(loss, part)
            share = weight / total
            run_backward(loss, backward_seed(loss, share, state.scaler), self.trainable)
            self._check_dense()
            term = loss.detach().float() * share
            mean = term if mean is None else mean + term
        found = [mean, *[parameter.grad for parameter in self.parameters]]
        for parameter in self.trainable:
            parameter.grad = None
        return found

    def _check_dense(self) -> None:
        """Refuse gradients of some rows alone, which the sum over slots and ranks cannot take."""
        for parameter in self.trainable:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                named = loss_module_of(self._slotted).model.named_parameters()
                name = next(name for name, each in named if each is parameter)
                rule, repair = "have dense gradients", "use sparse=False"
                raise PlanError(message("step", "reproducible's model", rule, name, repair))


def _in_own_memory(state: DistState, part: Any) -> Any:
    """A part of a batch that is a copy: some kernels round by where in memory a tensor begins."""

    def own(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.device == state.device else tensor  # else it will be moved

    return map_tensors(own, part)
