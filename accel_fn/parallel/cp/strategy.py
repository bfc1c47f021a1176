"""The strategy of wrap_ddp or wrap_fsdp, for ranks that share the tokens of each sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from accel_fn.core import primitives
from accel_fn.core.batch import map_tensors
from accel_fn.core.dtensor import is_sharded, local
from accel_fn.core.grads import Grads
from accel_fn.core.loop import Strategy
from accel_fn.core.loss import Metrics, Outcome, leave_out, loss_module_of
from accel_fn.core.plan import Plan, describe
from accel_fn.core.report import Report
from accel_fn.core.state import DistState
from accel_fn.core.weights import Weight, weigh
from accel_fn.errors import AccelError, BatchError
from accel_fn.parallel.cp.attention import WholeAttention
from accel_fn.parallel.cp.blocks import Blocks, blocks_in
from accel_fn.parallel.cp.draws import draws_of_block
from accel_fn.parallel.cp.transformers import ModelsOfTransformers


def make_cp(
    state: DistState,
    module: nn.Module,
    plan: Plan,
    *,
    dims: Mapping[str, int],
    axis: str,
    attention: str = "gather",
    inner: Callable[[DistState, nn.Module, Plan], Strategy] = Strategy,
) -> Strategy:
    """Make the strategy of `inner`, with sequences that are cut over the ranks along the axis."""
    is_split = any(map(is_sharded, plan.model.parameters()))
    strategy = inner(state, module, plan)
    cp = state.along(axis)
    if cp.world_size > 1:
        strategy.__class__ = _over_context(type(strategy))  # type: ignore[arg-type]
        assert isinstance(strategy, ContextParallel)
        attending = WholeAttention(cp, by_heads=attention == "ulysses")
        strategy.begin(plan, cp, dims, attending, averages=is_split)
    return strategy


@cache
def _over_context(kind: type[Strategy]) -> type[Strategy]:
    """Return a subclass of a strategy that runs blocks of tokens."""
    return type(f"ContextParallel{kind.__name__}", (ContextParallel, kind), {})


class ContextParallel(Strategy):
    """A base class to list before a strategy: ranks along an axis compute blocks of the same sequences.

    Losses are summed over the axis. The backward of this sum multiplies the gradient by the number
    of ranks along the axis. So the average of the gradients over these ranks is the gradient of the
    sum.
    """

    def begin(
        self,
        plan: Plan,
        cp: DistState,
        dims: Mapping[str, int],
        attention: WholeAttention,
        *,
        averages: bool,
    ) -> None:
        """Store the settings of `wrap_cp` in a strategy that was made as an object of its own class.

        `make_cp` calls this after it has changed the class of the strategy.
        """
        self._cp, self._dims, self._weight_fn = cp, dims, plan.weight_fn
        loss_module_of(self.module).refuses_counts = (
            "return the mean over the tokens that weight_fn counts, with wrap_cp, got (sum, count); divide "
            "the sum by the count"
        )
        self.layout.counts = ()
        self._averages = averages
        """Whether this class must average gradients over the axis. The strategy averages over `dp`
        alone if wrap_tp has split the model."""
        self._attention = attention
        self._of_transformers = ModelsOfTransformers(self.model, dims)
        self._layouts: dict[bool, Sequence[tuple[str, int]]] = {}
        """The names and sizes of the metrics of the first rank along the axis, by the model's
        attribute `training`. All ranks along the axis must have them."""
        self._checked: tuple[Plan, Plan] | None = None
        self._is_whole = False
        """Whether this rank runs whole sequences, as in the checks."""

    def gradients(
        self, plan: Plan, state: DistState, batch: Any
    ) -> tuple[DistState, Grads, Report]:
        """Compute the gradients of the global batch; refuse sequences that cannot be cut."""
        # Refuse sequences in the weight_fn: the step calls it before the first forward, and sends
        # its error to all ranks.
        if self._checked is None or self._checked[0] is not plan:
            self._checked = plan, replace(plan, weight_fn=partial(self._weigh, plan))
        return super().gradients(self._checked[1], state, batch)

    def _weigh(self, plan: Plan, part: Any) -> float:
        """Weigh a whole micro-batch; refuse one that cannot be cut."""
        return self.weights_of(plan, part)[0]

    def can_run(self, plan: Plan, part: Any) -> bool:
        """Return whether sequences can be cut into blocks whose weights add up to the whole."""
        try:
            self.weights_of(plan, part)
        except AccelError:
            return False
        return True

    def outputs(self, plan: Plan, state: DistState, part: Any, weight: Weight) -> Outcome:
        """Return loss and metrics of a micro-batch; this rank runs its block of tokens."""
        if part is None or self._is_whole:
            return super().outputs(plan, state, part, weight)
        blocks = self.blocks_of(part)
        _, *weights = self.weights_of(plan, part)
        with (
            self._attending(blocks),
            self._of_transformers.given(part, blocks),
            draws_of_block(state.device, blocks.rank),
        ):
            own = blocks.cut(part, self._dims)
            outcome = super().outputs(plan, state, own, weight)
        if plan.reduction == "sum":
            return self._joined(*outcome, 1.0)
        share = weights[blocks.rank] / sum(weights) if any(weights) else 0.0
        return self._joined(*outcome, share)

    def weights_of(self, plan: Plan, part: Any) -> list[float]:
        """Return the weight of a micro-batch and of each block; refuse weights that do not add up."""
        blocks = self.blocks_of(part)
        part = self._of_transformers.with_shifted(part)
        dims = self._dims
        if self._of_transformers.shifts:
            dims = {**dims, "shift_labels": dims["labels"]}
        cuts = [blocks.at(rank).cut(part, dims) for rank in range(blocks.num_ranks)]
        found = [sum(each) for each in weigh(self._weight_fn, [part, *cuts])]
        if plan.reduction == "mean" and not isclose(found[0], sum(found[1:]), rel_tol=1e-9):
            every = " + ".join(f"{each:g}" for each in found[1:])
            raise BatchError(
                "step: weight_fn must count tokens, so that weights of the blocks of a sequence add up, got "
                f"{found[0]:g} for all and {every} for the blocks, by {describe(self._weight_fn)}; use "
                'count_labels("labels"), with labels in dims of wrap_cp, shifted before the batch is cut'
            )
        return found

    def _joined(self, loss: Tensor, metrics: Metrics, share: float) -> Outcome:
        """Multiply the block's loss and metrics by the block's share, and sum them over the axis."""
        if share:
            own = loss * share
        else:
            # The loss of a block without items may be 0 / 0. Replace the gradients by zeros between
            # the loss and the attention. The backward of the attention still runs, since it
            # exchanges the gradients of other ranks.
            if loss.grad_fn is not None and torch.is_grad_enabled():
                leave_out([loss.grad_fn], _attention_behind([loss.grad_fn]))
            own = torch.zeros_like(loss) * torch.nan_to_num(loss, 0.0, 0.0, 0.0)
        names, layout = self._layout(metrics)
        values = [*_values(metrics, share)] if names == layout else []
        missing = sum(size for _, size in layout) if names != layout else 0
        like = torch.promote_types(loss.dtype, torch.float32)
        flat = [each.detach().to(loss.device, like).reshape(1) for each in values]
        rest = torch.cat([*flat, loss.new_full((missing,), torch.nan, dtype=like)])
        total, rest = _SumOverBlocks.apply(own, rest, self._cp)  # type: ignore[no-untyped-call]
        if names != layout:
            rule = "return the same metrics for every block of a sequence"
            return total, {"": f"{rule}, got {names} and {layout}"}
        found: dict[str, Any] = {}
        pieces = iter(rest.unbind())
        for name, size in layout:
            found[name] = next(pieces) if size == 1 else (next(pieces), next(pieces))
        marks = {name: each for name, each in metrics.items() if isinstance(each, str)}
        return total, {**found, **marks}

    def _layout(self, metrics: Metrics) -> tuple[list[tuple[str, int]], Sequence[tuple[str, int]]]:
        """Return names and sizes of this block's metrics, and names and sizes that all blocks must have."""
        names = [
            (name, 2 if isinstance(each, tuple) else 1)
            for name, each in metrics.items()
            if not isinstance(each, str)
        ]
        key = self.model.training
        if key not in self._layouts:
            first, *_ = primitives.exchange(names, self._cp, "step")
            self._layouts[key] = first
        return names, self._layouts[key]

    def backward(self, loss: Tensor, seed: Tensor | None) -> None:
        """Run the backward; activation checkpoints in it run attention again."""
        with nullcontext() if self._is_whole else self._attending():
            super().backward(loss, seed)

    @contextmanager
    def _attending(self, blocks: Blocks | None = None) -> Iterator[None]:
        """Enter a context for a forward of these blocks.

        Without `blocks`, enter a context for a backward of the last blocks.
        """
        attention = self._attention if blocks is None else self._attention.over(blocks)
        with attention, self._of_transformers.attending():
            yield

    def average(self, state: DistState) -> None:
        """Average the gradients over the ranks of the strategy, and along the axis."""
        super().average(state)
        if self._averages:
            self._average_along_axis()

    def _average_along_axis(self) -> None:
        tensors = [local(each.grad) for each in self.trained if each.grad is not None]
        average_over(tensors, self._cp)

    @contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Enter a context in which each rank runs whole sequences, for the checks."""
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False

    def join_gradients(self) -> None:
        """Average the gradients of the checks' passes along the axis, unless FSDP has done so."""
        if self._averages:
            super().average(self._cp)
        if self._averages or not self.pads:
            self._average_along_axis()

    def blocks_of(self, part: Any) -> Blocks:
        """Return the blocks of a micro-batch."""
        return blocks_in(part, self._dims, self._cp)

    def windows_of(self, part: Any, num_tokens: int) -> Iterator[Any]:
        """Yield windows of the sequences, each of `num_tokens` tokens for each rank along the axis.

        In an entry that `wrap_cp` does not cut, every dimension except dimension 0 is shortened if
        it is as long as a sequence.
        """
        length = self.blocks_of(part).num_tokens
        most = num_tokens * self._cp.world_size
        if length <= most:
            yield part
            return

        def shortened(tensor: Tensor, start: int) -> Tensor:
            for dim in range(1, tensor.ndim):
                if tensor.shape[dim] == length:
                    tensor = tensor.narrow(dim, start, most)
            return tensor

        for first in range(0, length, most):
            start = min(first, length - most)
            window = map_tensors(partial(shortened, start=start), part)
            for name, dim in self._dims.items():
                if name in part:
                    window[name] = part[name].narrow(dim, start, most)
            yield window


def average_over(tensors: Sequence[Tensor], state: DistState) -> None:
    """Average tensors over the ranks of a state, in place, by one collective per dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for each in tensors:
        by_dtype.setdefault(each.dtype, []).append(each)
    sums = [primitives.start_sums(same, state, "step") for same in by_dtype.values()]
    for same, pending in zip(by_dtype.values(), sums, strict=True):
        pending.wait()
        torch._foreach_div_(same, state.world_size)


def _values(metrics: Metrics, share: float) -> Iterator[Tensor]:
    """Yield the numbers to add up over the ranks: means times the share, and sums and counts."""
    for value in metrics.values():
        if isinstance(value, tuple):
            yield from value
        elif not isinstance(value, str):
            yield value * share if share else torch.zeros_like(value)


def _attention_behind(ends: Sequence[Node]) -> list[Node]:
    """Return the attention nodes that a backward from `ends` reaches first.

    The backward of these nodes exchanges gradients.
    """
    found: list[Node] = []
    seen: set[Node] = set()
    ahead = [*ends]
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() in ("_AttentionBackward", "_SwapBackward"):
            found.append(node)
        else:
            ahead += [each for each, _ in node.next_functions if each is not None]
    return found


class _SumOverBlocks(torch.autograd.Function):
    """Sums a loss and metric values over the ranks along `cp`. Only the loss has a gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, rest: Tensor, cp: DistState) -> tuple[Tensor, Tensor]:
        ctx.num_ranks = cp.world_size
        total = torch.cat([loss.reshape(-1).to(rest.dtype), rest])
        primitives.start_sum(total, cp, "step").wait()
        whole, rest = torch.split(total, [loss.numel(), len(rest)])
        ctx.mark_non_differentiable(rest)
        return whole.reshape(loss.shape).to(loss.dtype), rest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _rest: Tensor) -> tuple[Any, ...]:
        return gradient * ctx.num_ranks, None, None
