"""The order in which torch's DataLoader would read a data set; rank 0 draws it for each pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from accel_fn.core.state import DistState, over
from accel_fn.data.collate import EmptyPart
from accel_fn.data.indexed import PEEK, IndexedSource, nested_samplers, outermost, parts_of
from accel_fn.data.loader import DrawnPass, Numbered
from accel_fn.data.order import Order
from accel_fn.data.random_generators import GLOBAL_LOCK
from accel_fn.data.sampled_batches import SampledBatches, SampledParts
from accel_fn.errors import ArgumentError, check_equal, message
from accel_fn.parallel.messages import Channel


class DrawnSource(IndexedSource):
    """A `Source` whose order rank 0 draws for each pass, from the generators that torch would use.

    `drawn` is the draw of the loop's last pass. A pass that resumes in the middle of an epoch uses
    this draw again.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        order: Order,
        state: DistState,
        channel: Channel | None,
        drawn: DrawnPass,
    ) -> None:
        data = over(state)
        super().__init__(loader, order, data.rank, data.world_size)
        self._places = replace(self._read_order, shuffle=False)
        self._generator = loader.generator
        self._samplers_generator: torch.Generator | None = getattr(
            nested_samplers(outermost(loader))[-1], "generator", None
        )
        self._num_ahead = loader.num_workers * (loader.prefetch_factor or 0)
        self._keeps_workers = loader.persistent_workers
        self._has_begun = False
        self._is_main = state.is_main
        self._channel = channel
        self._drawn = drawn

    def batches(
        self, epoch: int | None, first_batch: int, *, by_loop: bool = False
    ) -> Iterator[Any]:
        load = partial(self._reader.batches, by_loop=by_loop)
        return self._pass(load, epoch, first_batch, self._drawn)

    def numbered(self, epoch: int | None, first_batch: int) -> Iterator[Numbered[Any]]:
        # `evaluate` and `predict` read by this method. Give them a copy, since they must not change
        # the draw of the loop's last pass.
        return self._pass(self._reader.numbered, epoch, first_batch, replace(self._drawn))

    def _pass(
        self,
        load: Callable[..., Iterator[Any]],
        epoch: int | None,
        first_batch: int,
        drawn: DrawnPass,
    ) -> Iterator[Any]:
        draw = None
        if self._is_main:
            with GLOBAL_LOCK:
                self._set_loaded_generator()
                if first_batch == 0:
                    self._draw_seed_of_workers()
                # With workers, torch's loader reads ahead, and so draws, in `iter`. Without
                # workers, it draws when the loop takes the first batch.
                if first_batch == 0 and self._num_ahead:
                    draw = self._draw()
        parts = self._drawn_parts(epoch or 0, first_batch, drawn, draw)
        # With `SampledParts`, the loop's thread draws, even if the thread of `prefetch` reads the
        # data.
        sampled = SampledParts(parts, self._num_ahead, None)
        return SampledBatches(self._read(load, sampled, epoch, first_batch), sampled)

    def _set_loaded_generator(self) -> None:
        """After a load, set the sampler's generator to its state after the checkpoint's pass."""
        generator, drawn = self._samplers_generator, self._drawn
        if drawn.is_loaded and generator is not None and isinstance(drawn.draw, Tensor):
            generator.set_state(drawn.draw)
            # torch's RandomSampler draws two permutations in each pass.
            for _ in range(2):
                self._permute(generator)
        drawn.is_loaded = False

    def _draw_seed_of_workers(self) -> None:
        """Draw the seed that torch's `iter` draws for its workers; only once if they are persistent.

        The number is not used, but the generator must advance as torch's does.
        """
        if not (self._keeps_workers and self._has_begun):
            torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        self._has_begun = True

    def _draw(self) -> int | Tensor:
        """Draw a pass's seed as a RandomSampler does; if the sampler has a generator, return its state."""
        if self._samplers_generator is None:
            return int(torch.empty((), dtype=torch.int64).random_())
        return self._samplers_generator.get_state()

    def _drawn_parts(
        self, epoch: int, first_batch: int, drawn: DrawnPass, draw: int | Tensor | None
    ) -> Iterator[Tensor | EmptyPart]:
        places = parts_of(self._places, self._read_rank, epoch, first_batch)
        if not self.order.shuffle:
            yield from places
            return

        def draws_of(starts: list[tuple[int, int]]) -> list[int | Tensor]:
            check_equal(
                [f"pass {number} from batch {batch}" for number, batch in starts],
                "shard_loader: ranks must go through the same passes of a loader together",
                PEEK,
            )
            if first_batch:
                found = self._draw_of_loaded(epoch, first_batch, drawn)
            else:
                with GLOBAL_LOCK:
                    found = self._draw() if draw is None else draw
            return [found] * len(starts)

        start = epoch, first_batch
        if self._channel is None:
            [found] = draws_of([start])
        else:
            found = self._channel.another().via_main(start, draws_of)
        drawn.epoch, drawn.draw = epoch, found
        generator = self._generator_of(found)
        order = self._permute(generator)
        for each in places:
            part = order[each]
            yield EmptyPart(part.tolist()) if isinstance(each, EmptyPart) else part
        # At its end, torch's RandomSampler draws a second permutation and does not use it.
        self._permute(generator)

    def _draw_of_loaded(self, epoch: int, first_batch: int, drawn: DrawnPass) -> int | Tensor:
        if drawn.draw is None or drawn.epoch != epoch:
            rule = 'with order="torch" begin within a pass only if its draw is loaded'
            got = f"batch {first_batch} of pass {epoch}"
            repair = 'load a checkpoint that was saved with extras={"loader": loader}'
            raise ArgumentError(message("shard_loader", "loader", rule, got, repair))
        return drawn.draw

    def _generator_of(self, draw: int | Tensor) -> torch.Generator:
        """Return a generator in the state of the draw; on rank 0, the sampler's own, if it has one."""
        if not isinstance(draw, Tensor):
            return torch.Generator().manual_seed(draw)
        users = self._samplers_generator if self._is_main else None
        generator = torch.Generator() if users is None else users
        generator.set_state(draw)
        return generator

    def _permute(self, generator: torch.Generator) -> Tensor:
        return torch.randperm(self.order.num_samples, generator=generator)

    def indices(self, epoch: int, batch: int) -> Tensor:
        raise _not_known("indices")

    def global_indices(self, epoch: int, batch: int) -> Tensor:
        raise _not_known("global_indices")


def _not_known(function: str) -> ArgumentError:
    rule, repair = "have an order that is known before a pass", 'use order="seed" or "distributed"'
    return ArgumentError(message(function, "loader", rule, 'order="torch"', repair))
