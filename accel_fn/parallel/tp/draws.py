"""Random draws for activations that are split over an axis: each rank draws different numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn.modules.dropout import _DropoutNd

from accel_fn.parallel.draws import generator_of, seed_at

F = TypeVar("F", bound=Callable[..., None])


def draw_by_shard(model: nn.Module, layers: Mapping[nn.Module, ParallelStyle], rank: int) -> None:
    """Let each rank draw different numbers between column-wise layers and the next row-wise one.

    Ranks along an axis hold the same rows, so their generators have the same state: dropout of an
    activation that all of them hold has one mask. If ranks hold different features, dropout would
    use that one mask for the features of every rank.

    So a column-wise layer starts a region: it seeds the default generator of the activation's
    device from the generator's state and the rank. The next row-wise layer, the end of the model's
    forward or an error ends the region. After a region without draws, the generator has its former
    state. After any other region, it has drawn one number more than before, on all ranks.

    All draws follow from the state of that generator, so a resumed run and a recomputation by
    `torch.utils.checkpoint` draw the same numbers again.

    It does nothing if `may_draw(model)` is false. A graph of `torch.compile` breaks at both ends of
    a region.

    Args:
        model: the root, whose forward calls the layers.
        layers: split layers with their styles. A layer whose output is gathered begins no region.
        rank: this rank's place along the axis.
    """
    if not may_draw(model):
        return
    region = _Region(rank)
    for layer, style in layers.items():
        if isinstance(style, ColwiseParallel) and style.output_layouts != (Replicate(),):
            layer.register_forward_hook(region.start)
        elif isinstance(style, RowwiseParallel):
            layer.register_forward_pre_hook(region.end)
    model.register_forward_hook(region.end, always_call=True)


def may_draw(model: nn.Module) -> bool:
    """Return whether a module, or its `config`, has a number > 0 under a name with "drop"."""
    return any(
        isinstance(value, int | float) and value > 0
        for module in model.modules()
        for value in _rates(module)
    )


def _rates(module: nn.Module) -> Iterator[Any]:
    if isinstance(module, _DropoutNd):
        yield module.p
    for holder in (module, getattr(module, "config", None)):
        for name, value in getattr(holder, "__dict__", {}).items():
            if "drop" in name:
                yield value


def _outside_of_graphs(hook: F) -> F:
    disabled: F = torch.compiler.disable(hook, reason="each rank draws numbers of its own")  # type: ignore[no-untyped-call]
    return disabled


class _Region:
    """A part of a forward in which ranks hold activations of different features."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._device = torch.device("cpu")
        self._seed = 0
        self._inside = self._outside = torch.empty(0)
        """States of the generator at the start of a region: after the seeding, and before it."""
        self._is_open = False

    @_outside_of_graphs
    def start(self, layer: nn.Module, inputs: object, output: Tensor) -> None:
        """Begin a region: seed the generator from its state and the rank."""
        if self._lasts():
            return
        self._device = output.device
        generator = generator_of(self._device)
        self._outside = generator.get_state()
        self._seed = seed_at(self._outside, self._rank)
        generator.manual_seed(self._seed)
        self._inside = generator.get_state()
        self._is_open = True

    @_outside_of_graphs
    def end(self, *_: object) -> None:
        """End the region: restore the generator; if the region has drawn, advance the generator."""
        if self._lasts():
            generator = generator_of(self._device)
            has_drawn = not torch.equal(generator.get_state(), self._inside)
            generator.set_state(self._outside)
            if has_drawn:
                torch.rand((), device=self._device)
        self._is_open = False

    def _lasts(self) -> bool:
        # A recomputation may begin a region and stop before the end of it. torch then restores the
        # generator, and the generator's seed is not that of the region.
        return self._is_open and generator_of(self._device).initial_seed() == self._seed
