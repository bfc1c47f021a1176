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


COUNTED = "(sum, count) of "
"""Begins the name of the metric that holds a term which is a sum and its count; no name of a user's."""


def is_pair(value: object) -> bool:
    """Is it a sum and a count?"""
    if type(value) is not tuple or len(value) != 2:
        return False
    total, count = value
    is_count = not count.ndim if isinstance(count, Tensor) else isinstance(count, int | float)
    return is_count and isinstance(total, Tensor | int | float)


def pairs_in(loss: object) -> Mapping[str, tuple[Any, Any]]:
    """The terms of a loss that are sums and counts, by name: "loss" if it is one; none of a loss of means."""
    if is_pair(loss):
        return {"loss": loss}  # type: ignore[dict-item]
    if isinstance(loss, Mapping) and loss and any(map(is_pair, loss.values())):
        return loss
    return {}


def broken_pair(pairs: Mapping[str, Any]) -> str:
    """The rule that sums and counts break; "" where they break none."""
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
    """The terms of a loss that are sums and counts, by the names of their metrics."""
    # They come first, so that most steps look at one name.
    if not metrics or not next(iter(metrics)).startswith(COUNTED):
        return {}
    return {name: value for name, value in metrics.items() if name.startswith(COUNTED)}


def by_count(count: Tensor, factor: float = 1.0) -> Tensor:
    """The factor by the count, for each of several; 0 where nothing was counted."""
    return torch.where(count > 0, factor / count, torch.zeros_like(count))


def divided(pair: Tensor) -> Tensor:
    """The mean of a sum and its count, [2]; 0 where nothing was counted."""
    total, count = pair.unbind()
    return torch.where(count > 0, total / count, torch.zeros_like(total))


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
