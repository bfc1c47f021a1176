"""The forward of a micro-batch: the user's loss as a module, placed and in its contexts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node

from accel_fn.base.state import DistState
from accel_fn.base.torch_compile import uncompiled
from accel_fn.base.weights import Weight
from accel_fn.comm.dtensor import is_sharded, whole
from accel_fn.errors import BatchError, LossError
from accel_fn.step.frozen_models import given_frozen
from accel_fn.step.loss_terms import (
    COUNTED,
    broken_pair,
    broken_rule,
    is_mean,
    is_pair,
    kind_of,
    leave_out,
    pairs_in,
    stacked,
)
from accel_fn.step.plan import ContextFn, LossFn, Plan, describe

T = TypeVar("T")
Metrics = Mapping[str, Tensor | tuple[Tensor, Tensor] | str]
"""By name a mean, [], or a sum and its count; a str is the rule that a value breaks."""
Outcome = tuple[Tensor, Metrics]
"""The mean loss of a micro-batch, [], or the means of its terms, [terms]; and its metrics.

Of a loss that is a sum and a count, the sums, [] or [terms]; `counted_in` finds both in the metrics.
"""


class LossModule(nn.Module):
    """The user's loss as a module: what a strategy wraps in place of the user's model.

    So the model keeps its type, hooks and `state_dict` keys, and the loss may call any method of
    it. The price: gradients must come from the one backward that the step runs.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        model: nn.Module,
        terms: Sequence[str] = (),
        frozen: Mapping[str, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.terms = terms
        self.model = model
        self.loss_fn = loss_fn
        self.loss_of: Callable[..., Any]
        # No child of this module, also where loss_fn is a module.
        self.__dict__["loss_of"] = given_frozen(loss_fn, frozen or {})
        # If set, everything that a rank without items reaches: DDP with find_unused_parameters must
        # find the model's parameters unused there.
        self.idle: nn.Parameter | None = None
        self.shards: Collection[Tensor] = ()
        """The parameters whose gradients `wrap_fsdp` adds up, but for what of them is unsharded."""
        self.refuses_counts = ""
        """Why a loss may be no sum and count; empty if it may."""
        self.joining: Sequence[Node | None] = ()
        """Nodes of the graph where gradients of all ranks meet: a term that is left out ends before them."""

    def forward(self, batch: Any, left_out: Sequence[str] = ()) -> Outcome:
        """The mean loss of a batch; for None, a zero that reaches every parameter.

        The gradients of terms that are left out are zeros.
        """
        if batch is None:
            return self._zero(), {}
        found: Any = self.loss_of(self.model, batch)
        loss, metrics = (found, None) if isinstance(found, Tensor) else parted(found)
        if not isinstance(loss, Tensor) and not self.terms and pairs_in(loss):
            return self._counted(pairs_in(loss), metrics)
        if self.terms:
            return self._of_terms(loss, metrics, left_out)
        if not is_mean(loss):
            _refuse_loss(loss)
        return loss, {} if metrics is None else checked_metrics(metrics, loss)

    def _counted(self, pairs: Mapping[str, Any], metrics: Any) -> Outcome:
        broken = self.refuses_counts or broken_pair(pairs)
        if broken:
            terms = [each[0] for each in pairs.values() if is_pair(each) and is_mean(each[0])]
            return sum(terms, self._zero()), {"": broken}
        return counted(pairs, metrics)

    def _zero(self) -> Tensor:
        """A zero that reaches every parameter."""
        sparse = [each.weight for each in sparse_tables(self.model).values()]
        # DDP has no zeros for a sparse gradient, so tables count as used in either case.
        reached = self.model.parameters() if self.idle is None else [self.idle, *sparse]
        trained = [each for each in reached if each.requires_grad and each not in self.shards]
        zeros = [_empty_zero(each, sparse) for each in trained] or [torch.zeros(())]
        return torch.stack([zero.to(zeros[0]) for zero in zeros]).sum()

    def _of_terms(self, found: Any, metrics: Any, left_out: Sequence[str]) -> Outcome:
        broken = broken_rule(found, self.terms)
        if broken:
            # Marked as metrics are, beside a loss whose backward reaches what that of other ranks does.
            terms = [*filter(is_mean, found.values() if isinstance(found, Mapping) else [found])]
            loss = sum(terms, self._zero())
            return torch.stack([loss] * len(self.terms)), {"": broken}
        terms = [found[name] for name in self.terms]
        if left_out:
            weighing = [found[name].grad_fn for name in self.terms if name not in left_out]
            ends = [found[name].grad_fn for name in left_out]
            leave_out(ends, [*weighing, *self.joining])
            if not all(found[name].requires_grad for name in left_out):
                # It is not known which parameters a constant stands for.
                terms[0] = terms[0] + self._zero()
        loss = stacked(terms)
        return loss, {} if metrics is None else checked_metrics(metrics, loss, self.terms)


def parted(found: Any) -> tuple[Any, Any]:
    """The loss, and the metrics beside it or None, of what a loss function returned."""
    is_two = type(found) is tuple and len(found) == 2 and not is_pair(found)
    return found if is_two else (found, None)


def counted(pairs: Mapping[str, Any], metrics: Any) -> Outcome:
    """The outcome of a loss whose terms are sums and counts; counts carry no gradient."""
    totals = [total for total, _ in pairs.values()]
    sums = stacked(totals) if len(totals) > 1 else totals[0]
    found: dict[str, Any] = {}
    for name, (total, count) in pairs.items():
        value, number = _number(total, sums), _number(count, sums)
        assert value is not None
        assert number is not None
        # A part may have a sum and no count: all anchors, by the number of the positive ones.
        found[COUNTED + name] = value, number
    return sums, found if metrics is None else {**found, **checked_metrics(metrics, sums, [*pairs])}


def sparse_tables(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Find the embeddings with sparse gradients, by name."""
    named = model.named_modules()
    tables = {n: m for n, m in named if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    return {name: each for name, each in tables.items() if each.sparse}


def _empty_zero(parameter: Tensor, sparse: Sequence[Tensor]) -> Tensor:
    """A zero whose gradient is empty, and sparse where the parameter's always is."""
    if any(each is parameter for each in sparse):
        no_rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
        return F.embedding(no_rows, parameter, sparse=True).sum()
    # Zeros of plain tensors and of shards on any mesh have one sum.
    own = parameter.to_local() if is_sharded(parameter) else parameter
    return own.flatten()[:0].sum()


def checked_metrics(metrics: Any, loss: Tensor, terms: Sequence[str] = ()) -> Metrics:
    """The metrics without their graphs, where DDP would look for parameters.

    What is refused is only marked: a rank that raised here would raise alone.
    """
    if not isinstance(metrics, Mapping):
        rule = "return metrics as a mapping of names to values beside the loss"
        return {"": f"{rule}, got {type(metrics).__name__}"}
    return {str(name): _metric(name, value, loss, terms) for name, value in metrics.items()}


def _metric(
    name: Any, value: Any, loss: Tensor, terms: Sequence[str]
) -> Tensor | tuple[Tensor, Tensor] | str:
    if not isinstance(name, str) or name in ("loss", *terms):
        others = " and the terms" if terms else ""
        return f'name metrics by strings other than "loss"{others}, got {name!r}'
    if terms and not isinstance(value, tuple):
        return (
            f"return metric {name!r} as a pair (sum, count), since terms are means over different "
            f"items, got {kind_of(value)}"
        )
    if not isinstance(value, tuple):
        mean = _number(value, loss)
        return _refused(name, value) if mean is None else mean
    numbers = [_number(each, loss) for each in value]
    if len(numbers) != 2 or numbers[0] is None or numbers[1] is None:
        return _refused(name, value)
    return numbers[0], numbers[1]


def _number(value: Any, loss: Tensor) -> Tensor | None:
    """A real number as a tensor [] without a graph; None for anything else."""
    if isinstance(value, int | float):
        # Not in half precision, which cannot hold a count.
        dtype = torch.promote_types(loss.dtype, torch.float32)
        return loss.detach().new_full((), value, dtype=dtype)
    if not isinstance(value, Tensor) or value.ndim or value.is_complex():
        return None
    return whole(value)


def _refused(name: str, value: Any) -> str:
    parts = value if isinstance(value, tuple) else (value,)
    kinds = [
        f"a tensor {list(each.shape)} of {each.dtype}"
        if isinstance(each, Tensor)
        else type(each).__name__
        for each in parts
    ]
    got = f"({', '.join(kinds)})" if isinstance(value, tuple) else kinds[0]
    return (
        f"return metric {name!r} as a real 0-dim tensor, the mean over the batch's items, or a pair "
        f"(sum, count) of such, got {got}"
    )


def _refuse_loss(loss: Any) -> None:
    repair = "return the mean over the batch's items"
    if isinstance(loss, Mapping):
        is_output = hasattr(loss, "loss")
        terms = "give a weight_fn for each, Plan(..., weight_fn={name: ...}), or return their sum"
        repair = "return its .loss" if is_output else terms
    raise LossError(
        f"step: loss_fn must return a 0-dim floating-point tensor, got {kind_of(loss)}; {repair}"
    )


def loss_module_of(module: nn.Module) -> LossModule:
    """The user's loss, inside of what was made of it."""
    return next(each for each in module.modules() if isinstance(each, LossModule))


def run_terms(
    state: DistState, plan: Plan, module: nn.Module, part: Any, weight: Weight
) -> Outcome:
    """Loss and metrics of one micro-batch, where the loss has several terms.

    With a weight for each term the loss is their means, [terms]; else it is their sum, [].
    """
    weights = weight if isinstance(weight, tuple) else (weight,) * len(plan.terms)
    left_out = [name for name, each in zip(plan.terms, weights, strict=True) if not each]
    part, contexts = placed(state, plan, part), plan.forward_contexts
    if left_out and torch.is_grad_enabled():
        # A compiled graph has one backward for all terms, which none can be left out of.
        with uncompiled():
            call = partial(module, left_out=left_out)
            loss, metrics = in_contexts(state, contexts, call, part)
    else:
        loss, metrics = in_contexts(state, contexts, module, part)
    return loss if isinstance(weight, tuple) else loss.sum(), metrics


def run_placed(state: DistState, plan: Plan, call: Callable[[Any], T], part: Any) -> T:
    """`call` on one micro-batch, where the plan places it and in the plan's contexts."""
    return in_contexts(state, plan.forward_contexts, call, placed(state, plan, part))


def placed(state: DistState, plan: Plan, part: Any) -> Any:
    """A micro-batch where the plan places it."""
    for place_batch in plan.place_batch:
        part = place_batch(state, part)
        if part is None:  # the part stands for a rank without items, so loss_fn is not called
            name = describe(place_batch)
            raise BatchError(f"step: place_batch must return the batch, got None from {name}")
    return part


def in_contexts(
    state: DistState, contexts: Sequence[ContextFn], call: Callable[[Any], T], part: Any
) -> T:
    """`call` in contexts of a plan, the first of them outermost."""
    if not contexts:
        return call(part)
    with contexts[0](state):
        return in_contexts(state, contexts[1:], call, part)
