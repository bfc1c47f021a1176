"""Micro-batches that fit: where memory runs out, the batch is done again in smaller ones."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from accel_fn.base.batch import num_samples, split_batch
from accel_fn.base.out_of_memory import free_memory, is_memory
from accel_fn.base.rng import random_state, restore_random
from accel_fn.base.state import DistState
from accel_fn.comm.primitives import exchange, start_total
from accel_fn.errors import OutOfMemoryError
from accel_fn.step.backward import Backward
from accel_fn.step.grads import Grads
from accel_fn.step.plan import Kept, Report


class Halving:
    """Cuts a batch into as many micro-batches as were found to fit, in a world of this size."""

    def __init__(self, world_size: int) -> None:
        self.num_parts = 1
        self.world_size = world_size

    def __call__(self, batch: Any) -> Sequence[Any]:
        return split_batch(batch, num_parts=self.num_parts)

    def state_dict(self) -> dict[str, int]:
        """What a run that goes on has to cut into, to make the same bits: alike on all ranks."""
        return {"num_parts": self.num_parts, "world_size": self.world_size}

    def load_state_dict(self, saved: Mapping[str, int]) -> None:
        if saved["world_size"] == self.world_size:  # else a rank's part of the batch is another
            self.num_parts = saved["num_parts"]

    def __repr__(self) -> str:
        return f"halving(num_parts={self.num_parts})"


class Fitting(Kept):
    """What makes a `Halving` for each step: by this a plan is known to ask for one."""


@dataclass(frozen=True, slots=True)
class Retrying:
    """A `GradFn` that does a batch again, in twice as many micro-batches, if memory runs out on any rank.

    It is done again as if nothing had happened: buffers and random generators are where they
    were. Replicas `agree` before any rank averages something. Shards do after all is done, since a
    rank without room goes all the way with the others.
    """

    backward: Backward
    halving: Halving

    def __call__(self, state: DistState, batch: Any) -> tuple[DistState, Grads, Report]:
        if state.world_size > 1 and self.backward.way is None:
            with self.backward.no_sync():
                self.backward.module(None)  # what DDP has to say before a forward, it says here
        buffers = _copied(self.backward.plan.model)
        generators = random_state(state.device)
        while True:
            try:
                state, grads, report = self.backward(state, batch)
                if self.backward.way is not None:
                    agree(state)
            except _OthersError as others:
                told = others.told
            except (RuntimeError, MemoryError) as error:
                if isinstance(error, OutOfMemoryError) or not is_memory(error):
                    raise
                told = _tell(state, str(error) or repr(error))
            else:
                extras = {**report.extras, "num_microbatches": self.halving.num_parts}
                return state, grads, replace(report, extras=extras)
            # Here, where no traceback holds the tensors of the attempt any more.
            for parameter in self.backward.trainable:
                parameter.grad = None
            for home, name, buffer, value in buffers:
                home[name] = buffer.copy_(value)
            restore_random(generators, state.device)
            self._halve(state, batch, told)

    def _halve(self, state: DistState, batch: Any, told: list[str]) -> None:
        """Twice as many micro-batches, on all ranks, or an error where they are single samples already."""
        largest = max(exchange(num_samples(batch), state, "step"))
        first = next(rank for rank, words in enumerate(told) if words)
        if largest <= self.halving.num_parts:
            raise OutOfMemoryError(
                f"step: batch must fit into memory in micro-batches of one sample, got on rank {first}: "
                f"{told[first]}; use smaller samples, checkpointed, or more ranks"
            )
        self.halving.num_parts *= 2
        if state.is_main:
            print(
                f"accel_fn: out of memory on rank {first} at step {state.step + 1}; going on with "
                f"{self.halving.num_parts} micro-batches",
                file=sys.stderr,
            )
        free_memory(state)


def _copied(model: nn.Module) -> list[tuple[dict[str, Any], str, Tensor, Tensor]]:
    """Its buffers: where each is held, under what name, it, and what it holds."""
    return [
        (vars(module)["_buffers"], name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]


def agree(state: DistState) -> None:
    """Return when all ranks have all of their gradients; raise where memory has run out on another one."""
    told = _tell(state, "")
    if any(told):
        raise _OthersError(told)


def _tell(state: DistState, words: str) -> list[str]:
    """What ranks say of their memory, empty where it was enough."""
    if state.world_size == 1:
        return [words]
    failed = torch.tensor(float(bool(words)), dtype=torch.float64)
    start_total(failed, state, "step").wait()
    return exchange(words, state, "step") if failed else [""] * state.world_size


class _OthersError(Exception):
    """Memory has run out on another rank."""

    def __init__(self, told: list[str]) -> None:
        super().__init__(told)
        self.told = told
