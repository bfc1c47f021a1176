"""Retry on OOM: if memory runs out, repeat the batch in smaller micro-batches."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from accel_fn.core.batch import count_samples
from accel_fn.core.collectives import exchange_failures
from accel_fn.core.grads import Grads
from accel_fn.core.plan import GradFn, Plan
from accel_fn.core.primitives import exchange
from accel_fn.core.report import Report
from accel_fn.core.restored import copied_buffers, hold_random
from accel_fn.core.split_batch import split_batch
from accel_fn.core.state import DistState
from accel_fn.core.torch_internals import free_memory, is_memory
from accel_fn.errors import OutOfMemoryError, PeerOutOfMemoryError

_LOG = logging.getLogger(__name__)


class FittingSplit:
    """Cuts a batch into `num_parts` micro-batches; `RetryOnOOM` doubles this number on each OOM."""

    def __init__(self, state: DistState, plan: Plan) -> None:
        self.num_parts = 1
        self.world_size = state.world_size

    def __call__(self, batch: Any) -> Sequence[Any]:
        return split_batch(batch, num_parts=self.num_parts)

    def state_dict(self) -> dict[str, int]:
        """Return the number of micro-batches, so that a resumed run computes the same bits."""
        return {"num_parts": self.num_parts, "world_size": self.world_size}

    def load_state_dict(self, saved: Mapping[str, int]) -> None:
        # On another number of ranks, each rank has a larger or smaller part of the batch, so the
        # saved number of micro-batches does not fit.
        if saved["world_size"] == self.world_size:
            self.num_parts = saved["num_parts"]


class RetryOnOOM:
    """Repeats a batch in twice as many micro-batches if memory runs out on any rank.

    The batch starts again from the same buffers and random generators. The strategy exchanges
    failures before any rank averages gradients, so all ranks repeat the batch.
    """

    traits = frozenset({"retries"})

    def __init__(self, state: DistState, plan: Plan) -> None:
        self._model = plan.model
        self._modules = [*plan.model.named_modules()]
        self._split = cast("FittingSplit", plan.split[0])

    def __call__(self, grad_fn: GradFn) -> GradFn:
        def retried(state: DistState, batch: Any) -> tuple[DistState, Grads, Report]:
            before = self._split.num_parts
            try:
                return self._run(grad_fn, state, batch)
            except BaseException:
                # A step that fails must change nothing, so restore the number of micro-batches.
                self._split.num_parts = before
                raise

        return retried

    def signature(self) -> str:
        """Return an empty text, so that a checkpoint does not compare the number of micro-batches."""
        return ""

    def _run(
        self, grad_fn: GradFn, state: DistState, batch: Any
    ) -> tuple[DistState, Grads, Report]:
        buffers = copied_buffers(self._modules)
        put_back_random = hold_random(state.device)
        while True:
            try:
                state, grads, report = grad_fn(state, batch)
            except PeerOutOfMemoryError as error:
                failures = list(error.failures)
            except (RuntimeError, MemoryError) as error:
                if isinstance(error, OutOfMemoryError) or not is_memory(error):
                    raise
                failures = exchange_failures(state, str(error) or repr(error))
            else:
                extras = {**report.extras, "num_microbatches": self._split.num_parts}
                return state, grads, replace(report, extras=extras)
            # Free memory here, after the handlers. Inside a handler, the traceback of the error
            # would still hold the tensors of the failed attempt.
            for parameter in self._model.parameters():
                parameter.grad = None
            for buffer in buffers:
                buffer.put_back()
            put_back_random()
            self._halve(state, batch, failures)

    def _halve(self, state: DistState, batch: Any, failures: Sequence[str]) -> None:
        """Double the number of micro-batches on all ranks; raise if each already has only one sample."""
        largest = max(exchange(count_samples(batch), state, "step"))
        first = next(rank for rank, failure in enumerate(failures) if failure)
        if largest <= self._split.num_parts:
            raise OutOfMemoryError(
                f"step: batch must fit into memory in micro-batches of one sample, got on rank {first}: "
                f"{failures[first]}; use smaller samples, checkpoint_activations, or more ranks"
            )
        self._split.num_parts *= 2
        if state.is_main:
            _LOG.warning(
                "out of memory on rank %d at step %d; continuing with %d micro-batches",
                first,
                state.step + 1,
                self._split.num_parts,
            )
        free_memory(state)
