"""Name the first operation whose output differs between two steps.

This module uses torch's private DebugMode; tests/testing/test_equivalence.py fails when it changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch.utils._debug_mode import DebugMode
from torch.utils._pytree import tree_leaves

_VIEWS = {"aten.detach.default", "aten.t.default", "aten.view.default"}
"""Operations that are not compared, since they only return a view of their input."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of torch and the L1 norm of each tensor that it returned."""

    name: str
    norms: tuple[float, ...]


@contextmanager
def recorded() -> Iterator[list[Operation]]:
    """Record this thread's operations, also in backwards; the list is filled at the end."""
    operations: list[Operation] = []
    with DebugMode() as mode, DebugMode.log_tensor_hashes(hash_fn="norm"):
        yield operations
    calls = [call for call in mode.logs if hasattr(call, "op") and str(call.op) not in _VIEWS]
    operations += map(_operation, calls)


def _operation(call: Any) -> Operation:
    norms = tree_leaves((call.log or {}).get("hash"))
    return Operation(str(call.op), tuple(norm for norm in norms if norm is not None))


def first_difference(
    plan_a: Sequence[Operation], plan_b: Sequence[Operation], rtol: float, atol: float
) -> str:
    """Return the end of a sentence about the first operation that differs in name or output, else ""."""
    for number, (a, b) in enumerate(zip_longest(plan_a, plan_b), start=1):
        if a is None or b is None or a.name != b.name:
            names = [each.name if each else "none" for each in (a, b)]
            return f"; operation {number} is {names[0]} with plan_a and {names[1]} with plan_b"
        if not _close(a.norms, b.norms, rtol, atol):
            given = [", ".join(f"{norm:.9g}" for norm in each.norms) for each in (a, b)]
            return (
                f"; operation {number}, {a.name}, is the first whose output differs: its L1 norm is "
                f"{given[0]} with plan_a and {given[1]} with plan_b"
            )
    return ""


def _close(a: tuple[float, ...], b: tuple[float, ...], rtol: float, atol: float) -> bool:
    return len(a) == len(b) and all(
        math.isclose(x, y, rel_tol=rtol, abs_tol=atol) or (math.isnan(x) and math.isnan(y))
        for x, y in zip(a, b, strict=True)
    )
