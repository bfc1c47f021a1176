"""The terms of a loss, each a mean over items of its own; those that weigh nothing are left out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node


def broken_rule(found: Any, names: Collection[str]) -> str:
    """The rule that terms break, and what was found in their place; "" where they break none."""
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
    """Can it be a loss?"""
    return isinstance(value, Tensor) and not value.ndim and value.is_floating_point()


def kind_of(value: object) -> str:
    """A value in an error: its dtype and shape, or its type."""
    return (
        f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    )


def stacked(terms: Iterable[Tensor]) -> Tensor:
    """The terms as one tensor, [terms], in the widest of their dtypes."""
    every = list(terms)
    dtype = every[0].dtype
    for each in every:
        dtype = torch.promote_types(dtype, each.dtype)
    return torch.stack([each.to(every[0].device, dtype) for each in every])


def leave_out(terms: Sequence[Node | None], others: Sequence[Node | None]) -> None:
    """Make the gradients of these terms zeros, whatever their values are; those of others stay.

    The backward of 0 / 0 is nan, also times a share of 0.

    Cost: a walk over the graph, and in the backward a zero in place of each gradient that leaves
    what these terms alone are computed by.
    """
    kept = _behind(others, ())
    own = _behind(terms, kept)
    for node in own:
        if any(each is not None and each not in own for each, _ in node.next_functions):
            node.register_hook(_zeros)


def _behind(ends: Sequence[Node | None], known: Collection[Node]) -> set[Node]:
    """The nodes of these graphs that are not known, but for the leaves."""
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
