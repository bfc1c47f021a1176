"""wrap_cp: sequences whose tokens are shared by the ranks along an axis of the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from accel_fn.core.loss import sparse_tables
from accel_fn.core.mesh_axes import AXES, mesh_name
from accel_fn.core.plan import Batch, Plan, SlotFunction, describe
from accel_fn.core.state import DistState, mesh_of
from accel_fn.core.transform import Transform, fill, transform
from accel_fn.errors import ArgumentError, ArgumentTypeError, PlanError, message
from accel_fn.parallel.batch_norm import batch_norms
from accel_fn.parallel.cp.strategy import make_cp
from accel_fn.parallel.ddp import DDPSlot
from accel_fn.parallel.fsdp.fsdp import FSDPSlot


@transform
def wrap_cp(dims: Mapping[str, int], *, axis: str = "cp") -> Transform:
    """Cut sequences over the ranks of an axis: each computes a block of consecutive tokens.
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
    return fill(strategy=CPSlot(make_cp, dims=dict(dims), axis=axis))


class CPSlot(SlotFunction):
    """The slot function of wrap_cp: `make_cp` with its settings, and the strategy that it holds."""

    @property
    def traits(self) -> frozenset[str]:  # type: ignore[override]
        """Return the traits: those of the strategy, and forwards that have collectives."""
        inner = self.keywords.get("inner")
        return frozenset({"shards", "cuts_sequences"} | getattr(inner, "traits", frozenset()))

    def claim(self, plan: Plan[Batch]) -> Plan[Batch]:
        """Take over the strategy that stands beside this one."""
        others = [each for each in plan.strategy if each is not self]
        if len(others) != 1 or isinstance(others[0], CPSlot):
            return plan
        held = CPSlot(self.func, **{**self.keywords, "inner": others[0]})
        held.call, held.source = f"{describe(others[0])} and {describe(self)}", self.source
        return replace(plan, strategy=(held,))

    def validate(self, state: DistState, plan: Plan) -> None:
        """Refuse plans whose steps cannot be cut along sequences."""
        inner: Any = self.keywords.get("inner")
        if isinstance(inner, SlotFunction):
            inner.validate(state, plan)
        if _size(state, self.keywords["axis"]) == 1:
            return
        if not isinstance(inner, DDPSlot | FSDPSlot):
            got = "nothing" if inner is None else describe(inner)
            raise PlanError(
                f"build: wrap_cp must stand beside what averages gradients, wrap_ddp or wrap_fsdp, got {got}"
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
        for name, layer in batch_norms(plan.model).items():
            rule, repair = "normalize tokens one by one", "use LayerNorm"
            got = f"{name}, a {type(layer).__name__}"
            raise PlanError(message("build", "wrap_cp's model", rule, got, repair))
        for name in sparse_tables(plan.model):
            rule, repair = "have dense gradients", "use sparse=False"
            raise PlanError(message("build", "wrap_cp's model", rule, name, repair))


def _size(state: DistState, axis: str) -> int:
    """Return the number of ranks along the axis, which the mesh must name."""
    mesh = mesh_of(state)
    if axis in mesh or state.world_size == 1:
        return mesh.get(axis, 1)
    repair = f'init(mesh={{"dp": -1, {axis!r}: 2}}), or --mesh dp=-1,{axis}=2'.replace("'", '"')
    raise PlanError(
        message("build", "wrap_cp's mesh", f"have an axis {axis!r}", mesh_name(mesh), repair)
    )
