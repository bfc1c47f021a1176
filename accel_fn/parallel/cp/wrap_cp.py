"""wrap_cp: cut the tokens of sequences over the ranks along an axis of the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from accel_fn.core.loss import sparse_tables
from accel_fn.core.mesh_axes import AXES
from accel_fn.core.plan import Batch, Plan, SlotFunction, describe
from accel_fn.core.state import DistState
from accel_fn.core.transform import Transform, fill, transform
from accel_fn.errors import ArgumentError, ArgumentTypeError, PlanError, message
from accel_fn.parallel.axis_size import axis_size
from accel_fn.parallel.batch_norm import batch_norms
from accel_fn.parallel.cp.strategy import make_cp
from accel_fn.parallel.cp.transformers import check_models

_RATES = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attn_dropout")
"""The names under which a `config` keeps the rate of dropout inside of attention."""


@transform
def wrap_cp(dims: Mapping[str, int], *, axis: str = "cp", attention: str = "gather") -> Transform:
    """Cut sequences over the ranks of an axis: each computes some of the tokens, its block.

    The ranks along the axis get the same batch. Each cuts its block out of the entries in `dims`,
    and runs model and loss on it; all other entries stay whole. A block is an early and a late piece
    of the sequence, so that ranks have the same work in causal attention. Blocks differ by at most
    one token.
    `F.scaled_dot_product_attention` uses the keys and values of all blocks, from the forward to the
    end of the backward: `is_causal` refers to places in the whole sequence, and a mask covers the
    whole sequence, [..., length, length] or [..., 1, length]. The plan must also have `wrap_ddp` or
    `wrap_fsdp`, which averages gradients over `dp` and the axis; it may have `wrap_tp`.

    All other operations must compute each token by itself, from the batch: give the model its
    positions as an entry, shift labels before the batch, and use no convolution, recurrence,
    pooling or norm along the sequence. `weight_fn` must count tokens. A loss must have a graph for
    a block without labels too. The function of `predict` or `evaluate` gets whole sequences on
    every rank, and runs on them without `wrap_cp`.

    Outside of attention, ranks along the axis draw different numbers after `seed_all`.

    Law: any mesh gives the result of one rank, for sequences of any length, causal or masked, uneven
    parts, an empty rank, blocks without a label. Tests: `tests/laws/law13_context_parallel.py`.

    Args:
        dims: the dimension of the tokens in each entry of a batch that is cut, by its name. Entries
            that a batch lacks are skipped.
        axis: "cp", or another axis of the mesh than `dp`. In a mesh without it, `wrap_cp` is a no-op.
        attention: `"gather"`: each rank gathers keys and values, and attends for its tokens. `"ulysses"`:
            each rank exchanges its tokens for some heads, and attends for these among all tokens. The number
            of ranks must divide the numbers of heads; masks are whole on each rank.

    Returns:
        A transform.

    Raises:
        TypeError: `dims` does not map names to integers.
        ValueError: `dims` is empty, or `axis` or `attention` is not one of these. In `build`, on
            all ranks: several ranks without a mesh; the plan has neither `wrap_ddp` nor `wrap_fsdp`;
            several terms, `accumulate("auto")` or `compiled`; a model with BatchNorm, sparse
            gradients, `nn.MultiheadAttention`, dropout inside of attention, or rotary positions
            that depend on the length (rope type "dynamic" or "longrope"). In a step, on all
            ranks: a batch that is not a mapping, has none of these entries, has them in several
            lengths, or has fewer tokens than ranks along the axis; weights of blocks that do not
            add up to the weight of the sequence; a loss `(sum, count)`; in steps 1, 2, 10 and 100,
            which run a window of some sequences whole and cut: another loss, gradient or output of
            a layer. In a step, on each rank along the axis: attention with dropout, among other
            tokens than those of the block, or with a mask of another shape; `draw` in the loss.

    Cost: for each attention, one all-gather of keys and values over the axis in the forward; in the
        backward, which computes attention a second time, one more and one all-to-all of the size of
        a reduce-scatter. For each micro-batch, one small all-reduce of loss and metrics. With
        `wrap_tp`, one all-reduce of the gradients over the axis after the last backward. In the
        first forward, one small exchange. A rank holds the activations of its block, and, in one
        attention at a time, the keys and values of the sequence. The weights of a micro-batch are
        counted once more for its blocks. With "ulysses", four all-to-alls of a block of queries,
        keys, values or outputs in the forward and four in the backward, and attention is computed
        once. In steps 1, 2, 10 and 100, two more forwards and backwards of a window of 64 tokens per
        rank of two sequences, and with `wrap_ddp` one all-reduce of the gradients over the axis.

    Source: Dubey et al. 2024, arXiv:2407.21783, section 3.3.2; Jacobs et al. 2023, arXiv:2309.14509.

    >>> import accel_fn as af
    >>> af.wrap_cp({"input_ids": 1, "labels": 1, "position_ids": 1})
    wrap_cp({'input_ids': 1, 'labels': 1, 'position_ids': 1})
    """
    rule = "map names of entries of a batch to the dimension of their tokens"
    repair = 'such as {"input_ids": 1, "labels": 1}'
    if not isinstance(dims, Mapping):
        raise ArgumentTypeError(message("wrap_cp", "dims", rule, type(dims).__name__, repair))
    for name, dim in dims.items():
        if not isinstance(name, str) or not isinstance(dim, int) or isinstance(dim, bool):
            raise ArgumentTypeError(message("wrap_cp", "dims", rule, {name: dim}, repair))
    if not dims:
        raise ArgumentError(message("wrap_cp", "dims", "name an entry", {}, repair))
    others = [name for name in AXES if name != "dp"]
    if axis not in others:
        raise ArgumentError(message("wrap_cp", "axis", f"be one of {', '.join(others)}", axis))
    if attention not in ("gather", "ulysses"):
        rule = 'be "gather" or "ulysses"'
        raise ArgumentError(message("wrap_cp", "attention", rule, attention))
    return fill(strategy=CPSlot(make_cp, dims=dict(dims), axis=axis, attention=attention))


class CPSlot(SlotFunction):
    """The slot function of wrap_cp: it calls `make_cp` with its settings and the inner strategy."""

    @property
    def traits(self) -> frozenset[str]:  # type: ignore[override]
        """Return the inner strategy's traits and `cuts_sequences`."""
        inner = self.keywords.get("inner")
        return frozenset({"cuts_sequences"} | getattr(inner, "traits", frozenset()))

    def claim(self, plan: Plan[Batch]) -> Plan[Batch]:
        """Take over the plan's strategy, which becomes the inner strategy."""
        others = [each for each in plan.strategy if not isinstance(each, CPSlot)]
        if len(others) != 1 or len(plan.strategy) != 2:
            return plan
        held = CPSlot(self.func, **{**self.keywords, "inner": others[0]})
        held.call, held.source = f"{describe(others[0])} and {describe(self)}", self.source
        return replace(plan, strategy=(held,))

    def validate(self, state: DistState, plan: Plan) -> None:
        """Refuse plans whose steps cannot be cut along sequences."""
        inner: Any = self.keywords.get("inner")
        if isinstance(inner, SlotFunction):
            inner.validate(state, plan)
        if axis_size("wrap_cp", state, self.keywords["axis"]) == 1:
            return
        if "takes_blocks" not in getattr(inner, "traits", ()):
            others = [each for each in (inner, *plan.strategy) if each not in (None, self)]
            got = " and ".join(map(describe, others)) or "nothing"
            raise PlanError(
                "build: wrap_cp must stand beside one wrap_ddp or wrap_fsdp, which averages gradients, got "
                f"{got}"
            )
        if plan.terms:
            rule, repair = "be one function with wrap_cp", "return one mean over tokens"
            raise PlanError(message("build", "weight_fn", rule, f"terms {[*plan.terms]}", repair))
        if plan.having("retries"):
            raise PlanError(
                'build: accumulate("auto") must not be used with wrap_cp, since a rank that is out of '
                "memory cannot join the collectives of the others; give a number of micro-batches"
            )
        for compiled in (*plan.compile_step, *plan.compile_loss, *plan.having("torch_compile")):
            raise PlanError(
                f"build: wrap_cp must not be used with {describe(compiled)}, whose graph cannot hold what "
                "gathers keys and values; leave it out"
            )
        check_models(plan.model, self.keywords["dims"])
        for name, module in plan.model.named_modules():
            _check_attention(name, module)
        for name, layer in batch_norms(plan.model).items():
            rule, repair = "normalize tokens one by one", "use LayerNorm"
            got = f"{name}, a {type(layer).__name__}"
            raise PlanError(message("build", "wrap_cp's model", rule, got, repair))
        for name in sparse_tables(plan.model):
            rule, repair = "have dense gradients", "use sparse=False"
            raise PlanError(message("build", "wrap_cp's model", rule, name, repair))


def _check_attention(name: str, module: nn.Module) -> None:
    """Refuse torch's attention layer, and rates of dropout inside of attention in a `config`."""
    if isinstance(module, nn.MultiheadAttention):
        rule, repair = "attend by F.scaled_dot_product_attention", "call it in a layer of yours"
        got = f"{name}, a MultiheadAttention"
        raise PlanError(message("build", "wrap_cp's model", rule, got, repair))
    config = getattr(module, "config", None)
    for key in _RATES:
        if rate := getattr(config, key, 0):
            rule, repair = "have no dropout inside of attention", f"set {key}=0"
            raise PlanError(message("build", "wrap_cp's model", rule, f"{key}={rate}", repair))
