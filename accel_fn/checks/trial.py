"""Run a few rows forward and backward as training does, and restore the model afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from accel_fn.checks.draws import (
    Calls,
    CannotReplayError,
    Draws,
    draws_inside,
    has_rate,
    without_dropout,
)
from accel_fn.checks.graph import hides_parameters
from accel_fn.checks.writes import Snapshot, Written, tensors_written
from accel_fn.core.batch import map_tensors
from accel_fn.core.differentiable import loss_of
from accel_fn.core.dtensor import local
from accel_fn.core.loop import Strategy
from accel_fn.core.loss import Outcome, counted_in, loss_module_of
from accel_fn.core.mean import seed_of
from accel_fn.core.parameters import no_graph
from accel_fn.core.plan import Plan
from accel_fn.core.primitives import num_collectives
from accel_fn.core.restored import with_forwards
from accel_fn.core.state import DistState
from accel_fn.core.torch_compile import uncompiled
from accel_fn.core.weights import Weight

Outputs = Callable[[Any, Weight], Outcome]
"""A function of rows and their weight. It returns the loss and the metrics."""
_LOW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16)


def couples(plan: Plan, strategy: Strategy) -> bool:
    """Return whether forwards have collectives, so that all ranks must run the same number."""
    meets = bool(plan.shard_model or plan.having("cuts_sequences"))
    return strategy.pads or meets or not strategy.leaves_gradients


class Ran(NamedTuple):
    """The results of one run, except for gradients."""

    losses: list[float]
    """The loss of each term."""
    metrics: dict[str, tuple[float, ...]]
    """The metrics by name. Each is a mean, or a sum and its count."""
    written: Mapping[str, Written]
    dtype: torch.dtype
    """The dtype of the loss."""


class Trial:
    """Runs a few rows; gradients are added up in `.grad` from run to run.

    All writes of a forward are undone after each run, unless the next run must read them.
    """

    def __init__(
        self, plan: Plan, strategy: Strategy, state: DistState, outputs: Outputs | None = None
    ) -> None:
        self._plan, self._strategy, self._state = plan, strategy, state
        self._outputs: Outputs = outputs or partial(strategy.outputs, plan, state)
        """By default, the plan's loss."""
        self._has_gradients = strategy.leaves_gradients and torch.is_grad_enabled()
        self._snapshot = Snapshot(
            plan.model,
            state,
            parameters=not couples(plan, strategy),
            attributes=strategy.leaves_gradients,
        )
        self.draws = Draws(seed=state.step)
        self._statistics = _BatchStatistics()
        self._dtypes: set[torch.dtype] = set()
        self._joining = _Joining()
        self._trained = plan.trained()
        self._forwards = _plain_forwards(strategy.module)
        self._collectives = _num_collectives(state, plan)
        self._is_first = True
        self._refused = loss_module_of(strategy.module).refuses_counts
        self.is_counted = False
        """Whether the loss is `(sum, count)`; known after the first run."""
        # On a split model, do not watch operations: DTensors call further operations to compute
        # shapes, and a dispatch mode must not intercept those.
        self._is_split = bool(plan.shard_model)
        self._is_plain = self._is_split
        """Whether the next run is not watched: on a split model, and after a run that did not draw,
        write or use BatchNorm."""
        self.forget()

    def forget(self) -> None:
        """Drop the gradients of all runs so far."""
        for parameter in self._strategy.reachable:
            parameter.grad = None

    def close(self) -> None:
        """Restore the model and the generators."""
        self._snapshot.restore()

    @property
    def calls_collectives(self) -> bool:
        """Return whether the loss has called collectives."""
        raw = _num_collectives(self._state, self._plan) != self._collectives
        return self._joining.calls_collectives or raw

    @property
    def least_values(self) -> int | None:
        """Return the fewest values of a BatchNorm statistic in the first run; None without one."""
        return self._statistics.least

    def dtypes(self) -> list[torch.dtype]:
        """Return the lowest precision in which each trained parameter's gradient may have been computed."""
        low = [each for each in _LOW if each in self._dtypes]
        single = torch.float32 in self._dtypes
        return [
            each.dtype
            if each.dtype in _LOW
            else (low or [torch.float32 if single else each.dtype])[0]
            for each in self._trained
        ]

    def is_half(self) -> bool:
        """Return whether anything is computed in half precision or less."""
        return not self._dtypes.isdisjoint(_LOW)

    def norms(self) -> list[float]:
        """Return the gradient norm of each trained parameter's shard; 0 without a gradient."""
        found = [_norm(each) for each in self._trained]
        first = next((each for each in found if each.dtype == torch.float64), found[0])
        return torch.stack([each.to(first) for each in found]).tolist()

    def run(
        self,
        rows: Any,
        weight: Weight,
        factor: Weight | None,
        *,
        keeps_writes: bool = False,
        drawn: tuple[Sequence[int], int] | None = None,
    ) -> Ran:
        """Run rows of this weight; with a factor, add the gradients of `factor * loss`.

        If each row has its own random numbers, `drawn` gives the places of these rows and the
        number of all rows.
        """
        strategy, state = self._strategy, self._state
        snapshot, draws = self._snapshot, self.draws
        # Copy the rows: a loss may write to its batch.
        own = map_tensors(Tensor.clone, rows)
        draws.begin(*(drawn or (None, 0)))
        try:
            if self._is_split:
                # Switch off dropout: on a split model, the check cannot replace the random numbers
                # of dropout.
                self._plan.model.eval()
            with self._around():
                loss, metrics = self._outputs(own, weight)
                if metrics.get("") and metrics[""] == self._refused:
                    raise CannotReplayError("the step refuses a sum with its count")
                if counted_in(metrics):
                    # The sums of parts add up to the sum of the batch. With several terms, so does
                    # the total of the terms.
                    self.is_counted, loss = True, loss.sum()
                losses = loss.detach().reshape(-1)
                figures = {name: _figures(value) for name, value in metrics.items()}
                if factor is not None:
                    _check_graph(loss)
                    if self._is_first and any(p.grad is not None for p in strategy.reachable):
                        raise CannotReplayError("it writes gradients of its own")
                    if not self._is_plain:
                        self._statistics.begin_backward()
                    draws.begin_backward()
                    strategy.backward(loss, seed_of(loss, factor, state.scaler))
                else:
                    # A forward may leave parameters unsharded until a backward. This run has no
                    # backward, so reshard the parameters here.
                    strategy.reset()
                del loss, metrics
            draws.end()
            snapshot.check_watched()
            written = snapshot.written()
            self._is_first = False
            seen = draws.has_any or written or self._statistics.has_any
            self._is_plain = self._is_split or not seen
            return Ran(losses.tolist(), figures, written, losses.dtype)
        finally:
            grads = [each.grad for each in strategy.reachable]
            if keeps_writes:
                snapshot.restore_random()
            else:
                snapshot.restore()
            for parameter, grad in zip(strategy.reachable, grads, strict=True):
                parameter.grad = grad

    @contextmanager
    def _around(self) -> Iterator[None]:
        """Enter the contexts of a run: without compiled graphs and averages over ranks, with equal draws."""
        contexts: list[AbstractContextManager[Any]] = [
            torch.set_grad_enabled(self._has_gradients),
            uncompiled(),
            loss_of(self._joining),
            self._strategy.alone(),
            with_forwards(self._forwards),
            _uncompiled_modules(self._strategy.module),
        ]
        if not self._is_plain:
            self._statistics.begin()
            watch = _Watch(self.draws, self._snapshot, self._dtypes)
            contexts += [self._statistics, watch]
        with ExitStack() as stack:
            for each in contexts:
                stack.enter_context(each)
            yield


def _plain_forwards(model: nn.Module) -> dict[nn.Module, Any]:
    """Return forwards for modules that otherwise run a compiled graph of the user, or a collective."""
    forwards: dict[nn.Module, Any] = {}
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            forwards[module] = partial(nn.modules.batchnorm._BatchNorm.forward, module)
        elif "_orig_mod" in module._modules:
            # `torch.compile` made this module as a wrapper, so call the module inside it.
            forwards[module] = module._modules["_orig_mod"]
    return forwards


@contextmanager
def _uncompiled_modules(model: nn.Module) -> Iterator[None]:
    """Run modules without their compiled graphs: a mode cannot watch the operations in a graph."""
    compiled = {
        each: each._compiled_call_impl for each in model.modules() if each._compiled_call_impl
    }
    for module in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled.items():
            module._compiled_call_impl = call


class _Joining:
    """Stands in for the batch that a step trains on, and records whether the loss calls a collective."""

    num_microbatches = 1
    is_evenly_split = False
    is_exact_over_ranks = True
    calls_collectives = False


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts each torch operation: replaces random draws, and records writes and dtypes."""

    def __init__(self, draws: Draws, snapshot: Snapshot, dtypes: set[torch.dtype]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws, self._snapshot, self._dtypes = draws, snapshot, dtypes

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(not issubclass(each, nn.Parameter) and each is not Tensor for each in types):
            # Let the subclass run: it calls operations on plain tensors, which reach this mode.
            return NotImplemented
        self._snapshot.before_write(tensors_written(op, args, kwargs))
        if has_rate(op):
            args, kwargs = without_dropout(op, args, kwargs)
        elif draws_inside(op):
            return self._draws.answer(op, args, kwargs)
        found = op(*args, **kwargs)
        if isinstance(found, Tensor) and found.numel() > 1 and found.is_floating_point():
            self._dtypes.add(found.dtype)
        return found


class _BatchStatistics(TorchFunctionMode):
    """Gives BatchNorm, in every run, the batch statistics of the first run, as constants.

    With the statistics of its own rows, a part would differ from the batch. This would hide all
    other differences.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of_calls: list[tuple[Tensor, Tensor]] = []
        self.least: int | None = None
        """The fewest values per feature in a call of the first run; None without a call."""
        self._is_known = False
        self._calls: Calls | None = None

    @property
    def has_any(self) -> bool:
        """Return whether the first run has used statistics of the batch."""
        return bool(self._of_calls)

    def begin(self) -> None:
        """Begin a run."""
        self._is_known = self._calls is not None
        self._calls = Calls()

    def begin_backward(self) -> None:
        """Record that the forward has ended and the backward begins."""
        assert self._calls is not None
        self._calls.in_backward = True

    def __torch_function__(
        self, fn: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if fn is not F.batch_norm:
            return fn(*args, **kwargs)
        return self._normalised(*args, **kwargs)

    def _normalised(
        self,
        input: Tensor,  # noqa: A002
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Run `F.batch_norm` with the statistics of the first run."""
        if not training:
            return F.batch_norm(
                input, running_mean, running_var, weight, bias, training, momentum, eps
            )
        assert self._calls is not None
        number = self._calls.next()
        if number == len(self._of_calls) and not self._is_known:
            rows = input.detach().to(torch.promote_types(input.dtype, torch.float32))
            dims = [0, *range(2, input.ndim)]
            count = rows.numel() // max(1, rows.size(1))
            self.least = count if self.least is None else min(self.least, count)
            self._of_calls.append((rows.mean(dims), rows.var(dims, unbiased=False)))
        if number >= len(self._of_calls):
            raise CannotReplayError("its parts call BatchNorm another number of times")
        mean, var = self._of_calls[number]
        return F.batch_norm(input, mean, var, weight, bias, False, 0.0, eps)


def _check_graph(loss: Tensor) -> None:
    """Raise if the backward of a loss would miss parameters, since the step refuses the loss then."""
    if not loss.requires_grad:
        raise no_graph()
    if hides_parameters(loss):
        raise CannotReplayError("it uses torch.utils.checkpoint with use_reentrant=True")


def _num_collectives(state: DistState, plan: Plan) -> int | None:
    """Return the number of the group's collectives so far.

    Return None if every forward calls collectives, as with shards.
    """
    if state.group is None or plan.having("shards") or plan.having("cuts_sequences"):
        return None
    return num_collectives(state.group)


def _figures(value: Any) -> tuple[float, ...]:
    """Return a metric as numbers; return () if the step refuses the metric."""
    if isinstance(value, str):
        return ()
    return tuple(float(each) for each in (value if isinstance(value, tuple) else (value,)))


def _norm(parameter: nn.Parameter) -> Tensor:
    """Return the norm, [], of this rank's part of a gradient, in float32 or wider; 0 without a gradient."""
    if parameter.grad is None:
        return local(parameter.detach()).new_zeros((), dtype=torch.float32)
    own = local(parameter.grad)
    own = own.coalesce().values() if own.is_sparse else own
    own = torch.view_as_real(own) if own.is_complex() else own
    dtype = torch.promote_types(own.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(own, dtype=dtype)
    return norm
