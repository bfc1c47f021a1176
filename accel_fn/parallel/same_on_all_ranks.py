"""Compare tensors over the ranks: the gradients of the first update, and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_fn.core import primitives
from accel_fn.core.dtensor import local
from accel_fn.core.grads import Grads
from accel_fn.core.plan import Plan
from accel_fn.core.report import Report
from accel_fn.core.state import DistState
from accel_fn.errors import ReplicaError

if TYPE_CHECKING:
    from accel_fn.core.loop import Strategy

_PIECE, _PIECE_ON_HOST = 2**22, 2**16
"""How many words to read at a time, on a device and on the host. Many words need few kernels on a
device. On the host, fewer words fit into the cache."""
_MIXING = 6364136223846793005
"""An odd number whose bits look random: the multiplier of Knuth's generator for MMIX."""


def check_same_gradients(
    strategy: Strategy, state: DistState, plan: Plan, grads: Grads, report: Report
) -> None:
    """Raise on every rank if the gradients for the optimizer differ between ranks.

    On a mesh with other axes than `dp`, compare the losses and metrics first.

    Cost: one read of the gradients, and for each of the comparisons two small collectives and one
    host synchronisation.
    """
    if state.data.world_size < state.world_size:
        # A loss or a metric may come from the part of a split layer that this rank computes.
        # Compare them over all ranks.
        losses = {"the loss": report.loss} | {
            f"the metric {name!r}": each for name, each in report.metrics.items()
        }
        words = (
            "step: loss_fn must return the same on ranks that differ in other axes than dp, {name} differs "
            "on {ranks}; compute it from outputs that are whole, not from those of a colwise layer, and draw "
            "the same random numbers on these ranks, as after seed_all"
        )
        check_same(strategy, state, losses, words)
    # A gradient function may forget to average, or draw different numbers on each rank. Replicas
    # would then diverge silently, so compare the gradients of the first update.
    names = {id(p): name for name, p in plan.model.named_parameters()}
    tensors = {"the factor": grads.factor}
    for parameter, tensor in zip(plan.trained(), grads.tensors, strict=True):
        tensors[names[id(parameter)]] = tensor
    check_same(
        strategy,
        state,
        tensors,
        "step: gradients must be equal on all ranks, {name} differs on {ranks}; average with "
        "reduce_mean what is computed by rank, and draw random numbers by state.step",
    )


def check_same(
    strategy: Strategy, state: DistState, tensors: Mapping[str, Tensor | None], words: str
) -> None:
    """Raise an error with these words on every rank, for the first tensor that differs.

    The strategy defines the ranks to compare, and the part of a tensor that each rank holds. Ranks
    that lack a tensor are left out of its comparison.

    Cost: one read of the tensors, two small collectives, one host synchronisation.
    """
    compared = tuple(strategy.compared_ranks(state))
    # If this rank compares only with itself, every rank does. All ranks return here, so none waits.
    if len(compared) == 1:
        return
    prints = fingerprints(list(tensors.values()))
    places = strategy.placements(tensors)
    own = {name: (places.get(name, ()), it) for name, it in zip(tensors, prints, strict=True)}
    every = primitives.exchange((compared, own), state, words.partition(":")[0])
    for name in dict.fromkeys(name for _, entries in every for name in entries):
        num_axes: dict[tuple[int, ...], int] = {}
        firsts: dict[Any, int] = {}
        wrong = []
        for rank, (peers, entries) in enumerate(every):
            if name not in entries:
                continue
            place, it = entries[name]
            # If a rank lacks the gradient of a shard, its place is empty. Compare the number of
            # axes too, to find this rank.
            same_axes = num_axes.setdefault(peers, len(place)) == len(place)
            if not same_axes or firsts.setdefault((peers, place), it) != it:
                wrong.append(rank)
        if wrong:
            ranks = f"rank{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}"
            raise ReplicaError(words.format(name=name, ranks=ranks))


def fingerprints(tensors: Sequence[Tensor | None]) -> list[int]:
    """Compute a fingerprint of 64 bits for each tensor, from the bits on this rank and their places.

    Equal tensors have equal fingerprints; different tensors almost never do.
    """
    # A missing tensor counts as 0. Put this 0 on the device of the first tensor, so that all
    # fingerprints on one device are copied to the host at once.
    device = next((each.device for each in tensors if each is not None), None)
    nothing = torch.zeros((), dtype=torch.int64, device=device)
    factors: dict[torch.device, Tensor] = {}
    found = [nothing if each is None else _fingerprint(local(each), factors) for each in tensors]
    if len({each.device for each in found}) > 1:
        found = [each.cpu() for each in found]
    prints: list[int] = torch.stack(found).tolist()
    return prints


def _fingerprint(tensor: Tensor, factors: dict[torch.device, Tensor]) -> Tensor:
    """Sum the words of a tensor's memory, each times a factor for its place.

    The sum runs in pieces, to save memory.
    """
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        values, places = (
            _fingerprint(each, factors) for each in (tensor.values(), tensor.indices())
        )
        return values * _MIXING + places
    dense = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    # Use words of at most 32 bits. With 64-bit words, two flipped sign bits would change the sum by
    # a multiple of 2**64, and int64 arithmetic drops that.
    bits = {1: torch.int8, 2: torch.int16}.get(dense.element_size(), torch.int32)
    words = dense.reshape(-1).view(bits)
    largest = _PIECE_ON_HOST if words.is_cpu else _PIECE
    of_places = factors.get(words.device)
    # Make no more factors than needed, since a device may be nearly full.
    if of_places is None or len(of_places) < min(len(words), largest):
        of_places = factors[words.device] = _factors(min(len(words), largest), words.device)
    first, *others = (
        (piece * of_places[: len(piece)]).sum() for piece in torch.split(words, largest)
    )
    return reduce(lambda total, each: total * _MIXING + each, others, first)


def _factors(size: int, device: torch.device) -> Tensor:
    """Return an odd factor for each place, which is not a linear function of the place.

    With linear factors, equal words at places 0 and 3 would have the same sum as at places 1 and 2.
    """
    mixed = torch.arange(size, device=device) * _MIXING
    return mixed.bitwise_xor_(mixed >> 32).bitwise_or_(1)
