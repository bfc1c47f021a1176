"""The user's loss as a module, checks of the values that it returns, and its frozen models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node

from accel_fn.core import primitives
from accel_fn.core.dtensor import is_sharded, local, whole
from accel_fn.core.plan import ContextFn, LossFn, Plan, describe
from accel_fn.core.state import DistState
from accel_fn.core.torch_compile import uncompiled
from accel_fn.core.weights import Weight
from accel_fn.errors import ArgumentTypeError, BatchError, LossError, PlanError, message


def broken_rule(found: Any, names: Collection[str]) -> str:
    """Return the rule that a loss's terms break, with the value found; "" if they are valid."""
    rule = f"return terms {sorted(names)}, as weight_fn names them"
    if not isinstance(found, Mapping):
        return f"{rule}, got {kind_of(found)}; return a dict of these, or give one weight_fn"
    if found.keys() != set(names):
        repair = "give its .loss a name" if hasattr(found, "loss") else "return all for every batch"
        return f"{rule}, got {sorted(map(str, found))}; {repair}"
    wrong = next((name for name in names if not is_mean(found[name])), None)
    if wrong is None:
        return ""
    return (
        f"return term {wrong!r} as a 0-dim floating-point tensor, the mean over its items, got "
        f"{kind_of(found[wrong])}"
    )


def is_mean(value: object) -> bool:
    """Return whether a value can be a mean loss: 0-dim and floating-point."""
    return isinstance(value, Tensor) and not value.ndim and value.is_floating_point()


def kind_of(value: object) -> str:
    """Describe a value for an error: its dtype and shape, or its type."""
    return (
        f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    )


COUNTED = "(sum, count) of "
"""The prefix of the names under which the `(sum, count)` terms of a loss stand among its metrics."""


def is_pair(value: object) -> bool:
    """Return whether a value is a pair `(sum, count)`."""
    if type(value) is not tuple or len(value) != 2:
        return False
    total, count = value
    is_count = not count.ndim if isinstance(count, Tensor) else isinstance(count, int | float)
    return is_count and isinstance(total, Tensor | int | float)


def pairs_in(loss: object) -> Mapping[str, tuple[Any, Any]]:
    """Return the `(sum, count)` terms of a loss by name ("loss" for one pair); {} for means."""
    if is_pair(loss):
        return {"loss": loss}  # type: ignore[dict-item]
    if isinstance(loss, Mapping) and loss and any(map(is_pair, loss.values())):
        return loss
    return {}


def broken_pair(pairs: Mapping[str, Any]) -> str:
    """Return the rule that sums and counts break; "" if they are valid."""
    for name, pair in pairs.items():
        if not isinstance(name, str) or (name == "loss" and len(pairs) > 1):
            return f'name terms by strings other than "loss", got {name!r}'
        if not is_pair(pair):
            return f"return all terms as (sum, count), or none, got {name!r} as {kind_of(pair)}"
        total, count = pair
        if not is_mean(total):
            return (
                f"return the sum of {name!r} as a 0-dim floating-point tensor, got {kind_of(total)}"
            )
        if isinstance(count, Tensor) and count.is_complex():
            return (
                f"return the count of {name!r} as a number or a 0-dim tensor, got {kind_of(count)}"
            )
    return ""


def counted_in(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `(sum, count)` terms of a loss, by the names of their metrics."""
    # `(sum, count)` terms come first among the metrics, so most steps check one name only.
    if not metrics or not next(iter(metrics)).startswith(COUNTED):
        return {}
    return {name: value for name, value in metrics.items() if name.startswith(COUNTED)}


def by_count(count: Tensor, factor: float = 1.0) -> Tensor:
    """Divide the factor by each count; return 0 for a count of 0."""
    return torch.where(count > 0, factor / count, torch.zeros_like(count))


def divided(pair: Tensor) -> Tensor:
    """Divide the sum by the count in a tensor (sum, count), [2]; return 0 for a count of 0."""
    total, count = pair.unbind()
    return torch.where(count > 0, total / count, torch.zeros_like(total))


def stacked(terms: Iterable[Tensor]) -> Tensor:
    """Stack the terms into one tensor, [terms], in the widest of their dtypes."""
    every = list(terms)
    dtype = every[0].dtype
    for each in every:
        dtype = torch.promote_types(dtype, each.dtype)
    return torch.stack([each.to(every[0].device, dtype) for each in every])


def leave_out(terms: Sequence[Node | None], others: Sequence[Node | None]) -> None:
    """Replace the gradients of these terms by zeros, whatever their values; keep those of `others`.

    A factor of 0 is not enough: the backward of 0 / 0 gives nan, and nan times 0 is nan.

    Cost: one walk over the graph. In the backward, one tensor of zeros for each gradient that
    leaves the part of the graph that only these terms use.
    """
    kept = _behind(others, ())
    own = _behind(terms, kept)
    for node in own:
        if any(each is not None and each not in own for each, _ in node.next_functions):
            node.register_hook(_zeros)


def _behind(ends: Sequence[Node | None], known: Collection[Node]) -> set[Node]:
    """Return the nodes that a backward from `ends` runs before it reaches leaves or nodes in `known`."""
    found: set[Node] = set()
    ahead = [*ends]
    while ahead:
        node = ahead.pop()
        if node is None or node in found or node in known or hasattr(node, "variable"):
            continue
        found.add(node)
        ahead += [each for each, _ in node.next_functions]
    return found


def _zeros(gradients: Sequence[Tensor | None], _: object) -> tuple[Tensor | None, ...]:
    return tuple([None if each is None else torch.zeros_like(each) for each in gradients])


_NAME = "frozen"
"""The name of the parameter of `loss_fn` that receives the frozen models."""


def takes_frozen(fn: Callable[..., Any]) -> bool:
    """Return whether a function has a parameter `frozen` that can be passed by name."""
    called = fn.forward if isinstance(fn, nn.Module) else fn
    try:
        found = inspect.signature(called).parameters.get(_NAME)
    except (TypeError, ValueError):
        # A builtin may have no signature. It then gets no frozen models.
        return False
    return found is not None and found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY)


def given_frozen(fn: Callable[..., Any], frozen: Mapping[str, nn.Module]) -> Callable[..., Any]:
    """Bind a plan's frozen models to a function that accepts them; return other functions unchanged."""
    return partial(fn, **{_NAME: frozen}) if frozen and takes_frozen(fn) else fn


def tensors_of_frozen(plan: Plan) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers of the frozen models, with names of the form NAME.KEY."""
    for name, model in plan.frozen.items():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            yield f"{name}.{key}", tensor


def check_frozen(state: DistState, plan: Plan) -> None:
    """Refuse frozen models without values, with parameters of the model, or left on the CPU."""
    trained = {_memory_of(each) for each in plan.model.parameters()} - {None}
    for name, tensor in tensors_of_frozen(plan):
        if tensor.is_meta:
            raise PlanError(
                f"build: frozen models must have values, got {name} on the meta device; fill it by "
                "load_model(folder, model)"
            )
        if _memory_of(tensor) in trained:
            raise PlanError(
                f"build: frozen models must share no parameter with the model, got {name}, which would "
                "be in evaluation mode and not be trained; give a copy, as by copy.deepcopy, or reach it "
                "by the model"
            )
    tensors = [each for _, each in tensors_of_frozen(plan)]
    is_left_there = tensors and not plan.place_frozen and all(each.is_cpu for each in tensors)
    if state.device.type != "cpu" and is_left_there:
        raise PlanError(
            f"build: frozen models must be on {state.device}, the device of the state, got all of "
            "their tensors on the CPU; add place()"
        )


def freeze_models(state: DistState, plan: Plan) -> None:
    """Place the frozen models, and switch them to evaluation mode without gradients.

    One rank alone may fail, for example if it runs out of memory.
    """
    for model in plan.frozen.values():
        for place in plan.place_frozen:
            if place(state, model) is not model:
                rule = "return the model that it was given, changed in place"
                raise ArgumentTypeError(message("build", "place_frozen", rule, "another"))
        model.eval().requires_grad_(False)


def share_frozen(state: DistState, plan: Plan) -> None:
    """Copy rank 0's values of the frozen models to every rank, as for the trained model."""
    if state.world_size > 1:
        for _, tensor in tensors_of_frozen(plan):
            if not is_sharded(tensor):
                primitives.broadcast(tensor.detach(), state, 0, "build")


def _memory_of(tensor: Tensor) -> tuple[object, int] | None:
    """Return device and address of a tensor's memory; None if it has no memory."""
    try:
        held = local(tensor)
        address = held.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        # Tensor subclasses and non-strided tensors may have no storage, so their address is
        # unknown.
        return None
    return (held.device, address) if address else None


T = TypeVar("T")
Metrics = Mapping[str, Tensor | tuple[Tensor, Tensor] | str]
"""Metrics by name. Each is a mean, [], or a pair (sum, count). For an invalid metric, the value is
the rule that it breaks."""
Outcome = tuple[Tensor, Metrics]
"""The loss and metrics of a micro-batch. The loss is a mean, [], or the means of its terms, [terms].
If `loss_fn` returns `(sum, count)`, the loss is the sum or the sums, and the metrics also hold sums
and counts, which `counted_in` finds."""


class LossModule(nn.Module):
    """The user's loss as a module, which a strategy wraps instead of the user's model.

    So the model keeps its type, hooks and `state_dict` keys, and the loss may call any method of
    the model. In return, gradients must come from the one backward that the step runs.
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
        # Store `loss_of` in `__dict__`: it must not become a child module, even if loss_fn is a
        # module.
        self.__dict__["loss_of"] = given_frozen(loss_fn, frozen or {})
        # If `idle` is set, the zero of a rank without items reaches only `idle` and sparse tables:
        # DDP with find_unused_parameters must find the model's other parameters unused there.
        self.idle: nn.Parameter | None = None
        self.shards: Collection[Tensor] = ()
        """The shards whose gradients `wrap_fsdp` adds up. The zero of a rank without items skips
        them, but reaches the unsharded parameters that replace them in a forward."""
        self.refuses_counts = ""
        """The reason why this plan refuses a `(sum, count)` loss; empty if it accepts one."""
        self.joining: Sequence[Node | None] = ()
        """Graph nodes at which gradients are reduced over the ranks. The gradients of a left-out
        term become zeros before they reach these nodes."""

    def forward(self, batch: Any, left_out: Sequence[str] = ()) -> Outcome:
        """Return the loss and metrics of a batch; for None, a zero whose backward reaches the parameters.

        The gradients of left-out terms are zeros.
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
        """Return a zero whose backward reaches the parameters, for a rank without items."""
        sparse = [each.weight for each in sparse_tables(self.model).values()]
        # DDP cannot put zeros in place of a missing sparse gradient, so sparse tables count as used
        # even with `idle`.
        reached = self.model.parameters() if self.idle is None else [self.idle, *sparse]
        trained = [each for each in reached if each.requires_grad and each not in self.shards]
        zeros = [_empty_zero(each, sparse) for each in trained] or [torch.zeros(())]
        return torch.stack([zero.to(zeros[0]) for zero in zeros]).sum()

    def _of_terms(self, found: Any, metrics: Any, left_out: Sequence[str]) -> Outcome:
        broken = broken_rule(found, self.terms)
        if broken:
            # Do not raise here: the other ranks would wait for this rank. Return the broken rule
            # among the metrics, and a loss whose backward reaches the same parameters as on other
            # ranks.
            terms = [*filter(is_mean, found.values() if isinstance(found, Mapping) else [found])]
            loss = sum(terms, self._zero())
            return torch.stack([loss] * len(self.terms)), {"": broken}
        terms = [found[name] for name in self.terms]
        if left_out:
            weighing = [found[name].grad_fn for name in self.terms if name not in left_out]
            ends = [found[name].grad_fn for name in left_out]
            leave_out(ends, [*weighing, *self.joining])
            if not all(found[name].requires_grad for name in left_out):
                # A left-out term that has no graph on this rank may reach any parameter on another
                # rank. Add a zero whose backward reaches all parameters.
                terms[0] = terms[0] + self._zero()
        loss = stacked(terms)
        return loss, {} if metrics is None else checked_metrics(metrics, loss, self.terms)


def parted(found: Any) -> tuple[Any, Any]:
    """Split the result of a loss function into the loss and its metrics (None if it has none)."""
    is_two = type(found) is tuple and len(found) == 2 and not is_pair(found)
    return found if is_two else (found, None)


def counted(pairs: Mapping[str, Any], metrics: Any) -> Outcome:
    """Return the outcome of a loss with `(sum, count)` terms; counts have no gradient."""
    totals = [total for total, _ in pairs.values()]
    sums = stacked(totals) if len(totals) > 1 else totals[0]
    found: dict[str, Any] = {}
    for name, (total, count) in pairs.items():
        value, number = _number(total, sums), _number(count, sums)
        assert value is not None
        assert number is not None
        # Accept a sum with a count of 0. For example, a detection loss sums over all anchors and
        # counts the positive ones, and a micro-batch may have no positive anchor.
        found[COUNTED + name] = value, number
    return sums, found if metrics is None else {**found, **checked_metrics(metrics, sums, [*pairs])}


def sparse_tables(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Find the embeddings with sparse gradients, by name."""
    named = model.named_modules()
    tables = {n: m for n, m in named if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    return {name: each for name, each in tables.items() if each.sparse}


def _empty_zero(parameter: Tensor, sparse: Sequence[Tensor]) -> Tensor:
    """Return the sum over no elements of a parameter: 0, with a sparse gradient for sparse tables."""
    if any(each is parameter for each in sparse):
        no_rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
        return F.embedding(no_rows, parameter, sparse=True).sum()
    # Use local tensors: zeros of plain tensors and of shards on any mesh can then be added up.
    own = parameter.to_local() if is_sharded(parameter) else parameter
    return own.flatten()[:0].sum()


def checked_metrics(metrics: Any, loss: Tensor, terms: Sequence[str] = ()) -> Metrics:
    """Check the metrics, and detach them, so that DDP does not search their graphs for parameters.

    The value of an invalid metric becomes the rule that it breaks. If this function raised, one
    rank might raise alone.
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
    if type(value) is Tensor and not terms and is_mean(value):  # a faster path for most metrics
        return value.detach()
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
    """Return a real number as a detached tensor []; return None for any other value."""
    if isinstance(value, int | float):
        # Use at least float32: half precision cannot hold a large count.
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
    """Find the user's loss inside the module that wraps it."""
    return next(each for each in module.modules() if isinstance(each, LossModule))


def run_terms(
    state: DistState, plan: Plan, module: nn.Module, part: Any, weight: Weight
) -> Outcome:
    """Run a micro-batch of a loss with several terms; return their means, [terms], and metrics."""
    weights = weight or (0,) * len(plan.terms)
    left_out = [name for name, each in zip(plan.terms, weights, strict=True) if not each]
    part, contexts = placed(state, plan, part), plan.forward_contexts
    if left_out and torch.is_grad_enabled():
        # A compiled graph has one backward for all terms. Run the loss without the compiler, so
        # that the backward can leave terms out.
        with uncompiled():
            call = partial(module, left_out=left_out)
            outcome: Outcome = in_contexts(state, contexts, call, part)
    else:
        outcome = in_contexts(state, contexts, module, part)
    return outcome


def run_placed(state: DistState, plan: Plan, call: Callable[[Any], T], part: Any) -> T:
    """Place a micro-batch as the plan does, and run `call` on it in the plan's contexts."""
    return in_contexts(state, plan.forward_contexts, call, placed(state, plan, part))


def placed(state: DistState, plan: Plan, part: Any) -> Any:
    """Place a micro-batch with the functions in the plan's `place_batch`."""
    for place_batch in plan.place_batch:
        part = place_batch(state, part)
        # Refuse None: it would mean that this rank has no items, and loss_fn would not be called.
        if part is None:
            name = describe(place_batch)
            raise BatchError(f"step: place_batch must return the batch, got None from {name}")
    return part


def in_contexts(
    state: DistState, contexts: Sequence[ContextFn], call: Callable[[Any], T], part: Any
) -> T:
    """Run `call` inside the contexts of a plan, the first one outermost."""
    if not contexts:
        return call(part)
    with contexts[0](state):
        return in_contexts(state, contexts[1:], call, part)
