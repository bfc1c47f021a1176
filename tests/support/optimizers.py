"""One row for every optimizer of torch.optim and torch_optimizer, and the checks of each row.

`python -m tests.support.optimizers` writes the table of docs/tested-optimizers.md from what the contract
gives.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch_optimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

import accel_fn as af
from accel_fn.testing import simulate
from accel_fn.testing.internals import multiply, with_multiply
from tests import reference
from tests.support.strategies import dealt, mse, regression_model

Batch = tuple[Tensor, Tensor]

PAGE = Path(__file__).parents[2] / "docs" / "tested-optimizers.md"
FENCES = ("<!-- table: python -m tests.support.optimizers -->\n", "<!-- end of table -->\n")
SIZES = (7, 5, 6, 4)
PARTS = ((5, 2), (2, 3), (6, 0), (1, 3))  # sizes of the ranks' parts of each batch
MAX_NORM = 0.05  # far below the norm of every batch
INIT_SCALE = 2.0**10  # in the middle of the range of float16 for these models

# Gradients are summed in another order, or divided instead of multiplied. The tolerance is relative
# to how far training moved the parameters: that takes some thousand roundings and divides by small
# moments.
RTOL = {torch.float64: 1e-10, torch.float32: 1e-4}


@dataclass(frozen=True)
class Refusal:
    """The error that reports why an optimizer does not work."""

    error: type[Exception]
    match: str


@dataclass(frozen=True)
class Row:
    """One optimizer: how to make it, its model, and the checks that it cannot pass."""

    kind: type[Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[[Any], Optimizer] | None = None
    model: Callable[[], nn.Module] = regression_model
    loop: Callable[..., Any] = reference.train
    refusals: Mapping[str, Refusal] = field(default_factory=dict)
    note: str = ""

    @property
    def name(self) -> str:
        """Return the optimizer as a user writes it."""
        library = "torch.optim" if self.kind in kinds(torch.optim) else "torch_optimizer"
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{library}.{self.kind.__name__}" + (f"({options})" if options else "")

    def start(self, dtype: torch.dtype) -> tuple[nn.Module, Optimizer]:
        """Make a model, the same each time, and its optimizer."""
        model = self.model().to(dtype)
        make = self.make or (lambda parameters: self.kind(parameters, **self.options))
        return model, make(model.parameters())


def kinds(library: Any) -> set[type[Optimizer]]:
    """List the public optimizers of a library."""
    found = {value for value in vars(library).values() if inspect.isclass(value)}
    return {each for each in found if issubclass(each, Optimizer) and each is not Optimizer}


class Lookups(nn.Module):
    """A table with sparse gradients; the inputs determine which rows are looked up."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(6, 4, generator=generator)
        self.table = nn.Embedding(6, 4, sparse=True, _weight=rows)
        self.register_buffer("readout", torch.linspace(-1.0, 1.0, 4).reshape(4, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        rows = self.table((inputs.abs() * 10).long() % 6)
        return rows.mean(1) @ self.readout


def matrices() -> nn.Module:
    """Make the regression model with matrices only, since Muon takes nothing else."""
    model = regression_model()
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            layer.bias = None
    return model


def train_sparse(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Batch], Tensor],
    optimizer: Optimizer,
    batches: Sequence[Batch],
    *,
    max_norm: float | None = None,
) -> None:
    """Train the reference loop for one table, since `clip_grad_norm_` does not take sparse
    gradients."""
    (table,) = model.parameters()
    for batch in batches:
        loss_fn(model, batch).backward()
        if max_norm is not None:
            norm = table.grad.to_dense().norm()
            table.grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
        optimizer.step()
        optimizer.zero_grad()


def lookahead(parameters: Any) -> Optimizer:
    """Make Lookahead around another optimizer."""
    return torch_optimizer.Lookahead(torch.optim.SGD(parameters, lr=0.05, momentum=0.9), k=2)


_MOMENTUM = {"lr": 0.05, "momentum": 0.9}
_NESTEROV = {**_MOMENTUM, "nesterov": True}
_FUSED = {"fused": True}
_CHECKS = ("step", "accumulate and clip", "two ranks", "float16")
_CLOSURE = Refusal(ValueError, "must update from gradients alone, got LBFGS")
_GRAPH = Refusal(RuntimeError, "does not have grad_fn.*create_graph")
_WAITS = "waits for the host in its first update with float16"

_SPECIAL = [
    Row(torch.optim.Adagrad, _FUSED),
    Row(torch.optim.Adam, _FUSED),
    Row(torch.optim.AdamW, _FUSED),
    Row(
        torch.optim.LBFGS,
        refusals=dict.fromkeys(_CHECKS, _CLOSURE),
        note="evaluates the loss again in its step; `build` refuses it",
    ),
    Row(torch.optim.Muon, model=matrices, note="for matrices alone"),
    Row(torch.optim.SGD),
    Row(torch.optim.SGD, _MOMENTUM),
    Row(torch.optim.SGD, _NESTEROV),
    Row(torch.optim.SGD, _FUSED),
    Row(torch.optim.SGD, {**_MOMENTUM, **_FUSED}, note=_WAITS),
    Row(torch.optim.SGD, {**_NESTEROV, **_FUSED}, note=_WAITS),
    Row(
        torch.optim.SparseAdam,
        model=Lookups,
        loop=train_sparse,
        note="for sparse gradients alone",
    ),
    Row(
        torch_optimizer.Adahessian,
        refusals=dict.fromkeys(_CHECKS, _GRAPH),
        note="differentiates the gradients",
    ),
    Row(torch_optimizer.Lookahead, make=lookahead, note="has no `state_dict` on torch 2.13"),
]
_PLAIN = [
    Row(kind)
    for library in (torch.optim, torch_optimizer)
    for kind in kinds(library)
    if kind not in {row.kind for row in _SPECIAL if row.options != _FUSED}
]
ROWS = {row.name: row for row in sorted([*_SPECIAL, *_PLAIN], key=lambda row: row.name.lower())}


def batches(dtype: torch.dtype) -> list[Batch]:
    """Return the same global batches in a given precision."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 3, generator=generator).to(dtype),
            torch.randn(size, 1, generator=generator).to(dtype),
        )
        for size in SIZES
    ]


def overflowing(batch: Batch) -> Batch:
    """Return the batch with a target that makes every gradient infinite or NaN."""
    inputs, targets = batch
    return inputs, targets.index_fill(0, torch.tensor([1]), torch.inf)


def trained_by_hand(row: Row, dtype: torch.dtype, max_norm: float | None = None) -> list[Tensor]:
    """Return the parameters at the end of the reference loop."""
    model, optimizer = row.start(dtype)
    row.loop(model, mse, optimizer, batches(dtype), max_norm=max_norm)
    return list(model.parameters())


def trained(
    row: Row, recipe: af.Transform, dtype: torch.dtype, parts: Sequence[Sequence[Batch]]
) -> list[list[Tensor]]:
    """Return the parameters at the end of a run, checked to be equal on every rank."""
    started = [row.start(dtype) for _ in parts]

    def run(state: af.DistState) -> list[Tensor]:
        model, optimizer = started[state.rank]
        state, step = af.build(recipe(af.Plan(mse, model, optimizer)), state)
        for batch in parts[state.rank]:
            state, _ = step(state, batch)
        return list(model.parameters())

    return simulate(run, world_size=len(parts))


def assert_alike(
    row: Row, actual: Sequence[Tensor], expected: Sequence[Tensor], rtol: float | None = None
) -> None:
    """Assert equality to rounding, relative to how far training moved."""
    start = row.start(expected[0].dtype)[0].parameters()
    for before, have, want in zip(start, actual, expected, strict=True):
        moved = float((want - before).detach().abs().max())
        assert 0 < moved < torch.inf
        rounding = 4 * torch.finfo(want.dtype).eps * float(want.detach().abs().max())
        atol = (rtol or RTOL[want.dtype]) * moved + rounding
        torch.testing.assert_close(have, want, rtol=0, atol=atol)


def assert_same_bits(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    """Assert equality to the bit, in every tensor and every other value."""
    for have, want in zip(actual, expected, strict=True):
        if isinstance(want, Tensor):
            torch.testing.assert_close(have, want, rtol=0, atol=0)
        else:
            assert have == want


def check_step(row: Row) -> str:
    """Check that a step without transforms has the bits of the reference loop."""
    (parameters,) = trained(row, af.compose(), torch.float64, [batches(torch.float64)])
    expected = trained_by_hand(row, torch.float64)
    assert_alike(row, parameters, expected)
    assert_same_bits(parameters, expected)
    return "yes"


def check_accumulate_and_clip(row: Row) -> str:
    """Check three micro-batches and a bound on the norm against the loop with `clip_grad_norm_`."""
    recipe = af.compose(af.accumulate(3), af.clip(MAX_NORM))
    for dtype in (torch.float64, torch.float32):  # a kernel takes the factor only in float32
        (parameters,) = trained(row, recipe, dtype, [batches(dtype)])
        assert_alike(row, parameters, trained_by_hand(row, dtype, MAX_NORM))
    return "yes"


def check_two_ranks(row: Row) -> str:
    """Check two ranks of uneven parts, one of them empty, against the loop of one process."""
    recipe = af.compose(af.wrap_ddp(), af.accumulate(2), af.clip(MAX_NORM))
    parts = dealt(batches(torch.float64), PARTS)
    for parameters in trained(row, recipe, torch.float64, parts):
        assert_alike(row, parameters, trained_by_hand(row, torch.float64, MAX_NORM))
    return "yes"


def check_float16(row: Row) -> str:
    """Check that a batch that overflows only halves the scale, wherever in the run it comes."""
    first, *others = batches(torch.float32)
    check_skip(row, [], overflowing(first), others)
    check_skip(row, others[:1], overflowing(first), others[1:])
    return "yes"


def check_skip(row: Row, before: list[Batch], bad: Batch, after: list[Batch]) -> None:
    """Train around one bad batch, against a loop by hand that leaves it out."""
    model, optimizer = row.start(torch.float32)
    recipe = af.with_amp("fp16", init_scale=INIT_SCALE)
    state, step = af.build(recipe(af.Plan(mse, model, optimizer)), af.DistState())
    for batch in before:
        state, report = step(state, batch)
        assert report.applied
    held = copy.deepcopy(list(model.parameters()))
    remembered = copy.deepcopy(memory(model, optimizer))
    state, report = step(state, bad)
    assert not report.applied
    assert state.scaler is not None
    assert state.scaler.scale == INIT_SCALE / 2
    assert_same_bits(list(model.parameters()), held)
    if before:  # a kernel that skips its first update still makes its state, of zeros
        assert_same_bits(memory(model, optimizer), remembered)
    for batch in after:
        state, report = step(state, batch)
        assert report.applied
    expected, optimizer = row.start(torch.float32)
    train_float16(expected, optimizer, before, INIT_SCALE)
    train_float16(expected, optimizer, after, INIT_SCALE / 2)
    assert_same_bits(list(model.parameters()), list(expected.parameters()))


def memory(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """Return the optimizer's state of each parameter, and the settings of each group."""
    states = [optimizer.state.get(each, {}) for each in model.parameters()]
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    return pytree.tree_leaves([states, groups])


def train_float16(
    model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch], scale: float
) -> None:
    """Train with autocast and a loss scale by hand; the scale is a power of two, so unscaling is
    exact."""
    for batch in batches:
        with torch.autocast("cpu", torch.float16):
            loss = mse(model, batch)
        (loss * scale).backward()
        for parameter in model.parameters():
            parameter.grad.mul_(1 / scale)
        optimizer.step()
        optimizer.zero_grad()


def where_factor_goes(row: Row) -> str:
    """Find out whether the kernel or a multiplication applies the open factor."""
    seen: list[Tensor] = []

    def look(tensors: Sequence[Tensor], factor: Tensor) -> None:
        seen.append(factor)
        multiply(tensors, factor)

    with with_multiply(look):
        trained(row, af.clip(MAX_NORM), torch.float32, [batches(torch.float32)])
    return "multiply" if seen else "kernel"


CONTRACT: dict[str, Callable[[Row], str]] = {
    "step": check_step,
    "accumulate and clip": check_accumulate_and_clip,
    "two ranks": check_two_ranks,
    "float16": check_float16,
}


@cache
def outcome(name: str, check: str) -> str | Exception:
    """Return the result of a check of a row, computed once per process."""
    try:
        return CONTRACT[check](ROWS[name])
    except Exception as error:
        return error


def with_graph(plan: af.Plan) -> af.Plan:
    """Give the optimizer gradients that still have their graph, as second-order optimizers need them."""
    parameters = list(plan.model.parameters())

    def differentiate(grad_fn: Any) -> Any:
        def gradients(state: af.DistState, batch: Any) -> Any:
            loss = plan.loss_fn(plan.model, batch)
            found = torch.autograd.grad(loss, parameters, create_graph=True)
            report = af.Report(loss=loss.detach(), weight=plan.weight_fn(batch))
            return state, af.Grads(tuple(each.clone() for each in found)), report

        return gradients

    return replace(plan, wrap_grad_fn=(*plan.wrap_grad_fn, differentiate))


def table() -> str:
    """Format the results of all checks, one row per optimizer."""
    head = ("optimizer", *CONTRACT, "factor applied by", "note")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, row in ROWS.items():
        results = {check: outcome(name, check) for check in CONTRACT}
        cells = ["no" if isinstance(result, Exception) else result for result in results.values()]
        works = not isinstance(results["step"], Exception)
        factor = where_factor_goes(row) if works else ""
        lines.append("| " + " | ".join((f"`{name}`", *cells, factor, row.note)) + " |")
    return "\n".join(lines) + "\n"


def split_page(text: str, fences: tuple[str, str] = FENCES) -> tuple[str, str, str]:
    """Split a page into the text before a table, the table, and the text after it."""
    head, rest = text.split(fences[0])
    body, tail = rest.split(fences[1], 1)
    return head + fences[0], body, fences[1] + tail


def write_table(table: Callable[[], str], fences: tuple[str, str]) -> None:
    """Replace the table in the page by one measured with this torch."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    head, _, tail = split_page(PAGE.read_text(encoding="utf-8"), fences)
    PAGE.write_text(head + "\n" + table() + "\n" + tail, encoding="utf-8")


if __name__ == "__main__":
    write_table(table, FENCES)
