"""Compare a window of a few sequences: as wrap_cp cuts it over an axis, and whole on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from accel_fn.checks.findings import Gradients, agree, loss_tolerance, wrong_gradient
from accel_fn.checks.trial import Ran, Trial
from accel_fn.core import primitives
from accel_fn.core.batch import map_tensors, tensors_of
from accel_fn.core.collectives import broadcast
from accel_fn.core.dtensor import is_sharded
from accel_fn.core.loop import Strategy
from accel_fn.core.microbatches import cut
from accel_fn.core.observers import Observer
from accel_fn.core.plan import Plan
from accel_fn.core.state import DistState
from accel_fn.core.weights import Weight, weigh
from accel_fn.errors import LossError
from accel_fn.parallel.cp.blocks import Blocks
from accel_fn.parallel.cp.strategy import ContextParallel

_LOOKS = (1, 2, 10, 100)
_MOST_TOKENS = 64
"""The number of tokens of each rank that are compared."""
_MOST_ROWS = 8
"""The number of rows of a micro-batch that are searched for labels; two of them are compared."""
_MOST_STEPS = 10
"""The last step that is checked because no earlier one had labels in several blocks."""


class SequenceCheck(Observer):
    """In steps 1, 2, 10 and 100, runs a window of two sequences whole on each rank, and cut.

    A model may make its own positions, shift its labels, or mix tokens outside of attention. With
    wrap_cp it would then silently train on something else. All ranks run the same rows, which one
    rank provides, and all refuse a difference.

    Cost: in these steps, a broadcast of the rows, two forwards and backwards of at most 64 tokens
    per rank along the axis, under wrap_ddp an all-reduce of the gradients over the axis, and three
    small collectives. The `weight_fn` counts window after window, until one has labels in several
    blocks.
    """

    def __init__(self, plan: Plan, strategy: Strategy, state: DistState) -> None:
        self._plan, self._strategy = plan, strategy
        self._num_steps = 0
        self._is_due = False
        """Whether the next step is checked too, because this one had labels in at most one
        block."""
        self.text = "is compared with the whole one in the first step"
        """The result, for `explain`."""

    def wants(self, state: DistState) -> bool:
        """Count this step, and return whether to check it."""
        self._num_steps += 1
        return isinstance(self._strategy, ContextParallel) and (
            self._num_steps in _LOOKS or self._is_due
        )

    def before(self, state: DistState, batch: Any) -> None:
        """Compare the start of sequences; raise on all ranks if the results differ."""
        strategy = self._strategy
        assert isinstance(strategy, ContextParallel)
        rows = self._rows(state, strategy, batch)
        if rows is None:
            return
        found = self._on_all_ranks(state, lambda: self._compared(state, strategy, rows))
        if found is None:
            return
        if not any(found):
            self.text = f"is that of the whole one, in step {self._num_steps}"
            return
        layers = self._on_all_ranks(state, lambda: self._differing(state, strategy, rows)) or []
        first = min((each for each in layers if each[1]), default=None)
        raise LossError(_of_layer(first[1]) if first else next(filter(None, found)))

    def _rows(self, state: DistState, strategy: ContextParallel, batch: Any) -> Any:
        """Return, on all ranks, the rows with labels in the most blocks; None if no row has labels."""
        best, own = 0, None
        # Do not raise here: the step itself refuses, on all ranks, a batch that cannot be cut.
        with suppress(Exception):
            best, own = self._own_rows(strategy, batch)
        every = primitives.exchange(best, state, "step")
        most = max(every)
        # If only the first block has labels, errors in the other blocks stay hidden. So check the
        # next step too.
        self._is_due = most < 2 and self._num_steps < _MOST_STEPS
        if not most:
            self.text = "could not be compared with the whole one: no row has labels"
            return None
        return broadcast(own, state, source=every.index(most))

    def _own_rows(self, strategy: ContextParallel, batch: Any) -> tuple[int, Any]:
        """Find the first window of a micro-batch that has labels in several blocks.

        Return the number of these blocks for one row, and the window of this row and another one.
        """
        parts = cut(self._plan, batch)[0]
        best: tuple[int, Any] = (0, None)
        # Prompts may fill the start of all sequences, so search on until there are labels.
        for windows in zip_longest(*[strategy.windows_of(each, _MOST_TOKENS) for each in parts]):
            for window in windows:
                if window is not None and any(*weigh(self._plan.weight_fn, [window])):
                    found = self._rows_of(strategy, window)
                    best = max(best, found, key=itemgetter(0))
            if best[0] > 1:
                break
        return best

    def _rows_of(self, strategy: ContextParallel, window: Any) -> tuple[int, Any]:
        """Return the most blocks in which one row has labels, and the two rows with the most."""
        found: list[tuple[int, int]] = []
        for row in range(min(len(tensors_of(window)[0]), _MOST_ROWS)):
            one = map_tensors(itemgetter(slice(row, row + 1)), window)
            found.append((sum(map(bool, strategy.weights_of(self._plan, one)[1:])), row))
        found.sort(reverse=True)
        rows = sorted(row for _, row in found[:2])
        return found[0][0], map_tensors(itemgetter(rows), window)

    def _on_all_ranks(self, state: DistState, look: Callable[[], Any]) -> list[Any] | None:
        """Call `look` on all ranks and return the results; return None if `look` failed on one rank."""
        found, failure = None, ""
        try:
            found = look()
        except Exception as error:
            # Do not raise here: if the same error occurs in training, the step reports it.
            self._strategy.reset()
            failure = f"{type(error).__name__}: {error}"
        every = primitives.exchange((found, failure), state, "step")
        failure = next((each for _, each in every if each), "")
        if failure:
            self.text = f"could not be compared with the whole one: {failure}"
            return None
        return [each for each, _ in every]

    def _compared(self, state: DistState, strategy: ContextParallel, rows: Any) -> str:
        """Describe the difference between whole and cut sequences; "" if there is none."""
        plan = self._plan
        (weight,) = weigh(plan.weight_fn, [rows])
        trial = Trial(plan, strategy, state)
        try:
            trial.draws.record(whole=True)
            whole = self._whole(strategy, trial, rows, weight)
            if any(primitives.exchange(trial.draws.has_any, state, "step")):
                # Draw the same numbers for every token, in both runs.
                trial.draws.record(whole=False)
                trial.run(rows, weight, (-1.0,))
                trial.draws.check_alike()
                trial.forget()
                whole = self._whole(strategy, trial, rows, weight)
            norms = trial.norms()
            cut_up = trial.run(rows, weight, (-1.0,))
            strategy.join_gradients()
            rest = trial.norms()
            return self._verdict(whole, cut_up, Gradients(norms, norms, rest), trial.dtypes())
        finally:
            trial.forget()
            trial.close()

    def _whole(self, strategy: ContextParallel, trial: Trial, rows: Any, weight: Weight) -> Ran:
        with strategy.whole_sequences():
            return trial.run(rows, weight, (1.0,))

    def _verdict(
        self, whole: Ran, cut_up: Ran, gradients: Gradients, dtypes: Sequence[torch.dtype]
    ) -> str:
        tolerance = loss_tolerance(whole.dtype, dtypes)
        pair = whole.losses[0], cut_up.losses[0]
        if not agree(pair, tolerance):
            return (
                "step: loss_fn must be the mean over the tokens that weight_fn counts, each by itself, with "
                f"wrap_cp, got {pair[0]:.6g} for whole sequences and {pair[1]:.6g} for their blocks; shift "
                'labels before the batch is cut, with count_labels("labels", shift=0), and name all '
                "entries with tokens in dims"
            )
        trained = self._plan.trained()
        wrong = wrong_gradient([gradients], [each.dtype for each in trained], dtypes)
        if wrong is None:
            return ""
        names = {id(each): name for name, each in self._plan.model.named_parameters()}
        return (
            "step: model must compute each token by itself but for attention, with wrap_cp, got another "
            f"gradient of {names[id(trained[wrong[0]])]} for blocks of sequences than for whole ones, off by "
            f" {wrong[1]:.2g} of its norm; see what mixes tokens, or detaches what attention returns"
        )

    def _differing(self, state: DistState, strategy: ContextParallel, rows: Any) -> tuple[int, str]:
        """Return number and name of the first layer whose output for a block differs; the name "" if none."""
        (weight,) = weigh(self._plan.weight_fn, [rows])
        blocks = strategy.blocks_of(rows)
        trial = Trial(self._plan, strategy, state)
        outputs: list[tuple[str, list[Tensor]]] = []
        try:
            trial.draws.record(whole=True)
            with strategy.whole_sequences(), _noting(strategy.model, outputs):
                trial.run(rows, weight, (0.0,))
            whole = dict(reversed(outputs))
            outputs.clear()
            with _noting(strategy.model, outputs):
                trial.run(rows, weight, (0.0,))
        finally:
            trial.forget()
            trial.close()
        first = dict(reversed(outputs))
        for number, (name, _) in enumerate(outputs):
            pairs = zip(whole.get(name, []), first[name], strict=False)
            if any(_differ(one, other, blocks) for one, other in pairs):
                return number, name
        return len(outputs), ""


def _of_layer(name: str) -> str:
    return (
        f"step: model must compute each token by itself but for attention, with wrap_cp, got {name}, whose "
        "output for a block of a sequence is not that for the whole one; give the model its positions in the "
        "batch, as position_ids named in dims, call F.scaled_dot_product_attention for attention, and use no "
        "convolution, recurrence, pooling or norm along the sequence"
    )


@contextmanager
def _noting(model: nn.Module, outputs: list[tuple[str, list[Tensor]]]) -> Iterator[None]:
    """Record the names and outputs of a model's inner modules, in the order in which they return."""

    def note(name: str, output: Any) -> None:
        tensors = [each.detach().clone() for each in tensors_of(output) if not is_sharded(each)]
        outputs.append((name, [each for each in tensors if each.is_floating_point()]))

    handles = [
        module.register_forward_hook(lambda _, __, output, name=name: note(name, output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield
    finally:
        for each in handles:
            each.remove()


def _differ(whole: Tensor, own: Tensor, blocks: Blocks) -> bool:
    """Return whether an output for a block differs from the same block of the output for all tokens."""
    if whole.ndim != own.ndim:
        return False
    dims = [dim for dim in range(own.ndim) if whole.shape[dim] != own.shape[dim]]
    sizes = [(whole.shape[dim], own.shape[dim]) for dim in dims]
    if sizes == [(blocks.num_tokens, blocks.own)]:
        whole = blocks.take(whole, dims[0])
    elif dims:
        return False
    tolerance = loss_tolerance(own.dtype, [own.dtype])[0]
    bound = tolerance * float(whole.abs().max()) if whole.numel() else 0.0
    return not torch.allclose(own, whole, rtol=tolerance, atol=bound, equal_nan=True)
