"""A pass for torch's compiler, so that scalars, such as those of an optimizer, are computed once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

_WORTH_IT = 1024
"""From this number of elements on, a buffer for a scalar is cheaper than recomputing it."""


class Hoisting(CustomGraphPass):
    """Keeps 0-dim results in memory if large tensors are computed with them.

    Otherwise the compiler writes the computation of a scalar into each loop that reads it. On a
    CPU, Adam's bias correction, two powers, is then computed again for every sixteen elements: a
    C++ compiler must not move it out of the loop, since its inputs could change.
    """

    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes):
            large = [user for user in node.users if _num_elements(user) >= _WORTH_IT]
            if not large or not _is_computed(node):
                continue
            with graph.inserting_after(node):
                kept = graph.call_function(torch.ops.aten.as_strided.default, (node, [], []))
            kept.meta["val"] = node.meta["val"]
            for user in large:
                user.replace_input_with(node, kept)

    def uuid(self) -> Any:
        """Return a key for the compiler's cache; it changes whenever this file changes."""
        return get_hash_for_files((__file__,))


def _num_elements(node: Node) -> int:
    """Return the number of elements of a result; 0 if it is not a tensor or its size is symbolic."""
    value = node.meta.get("val")
    size = value.numel() if isinstance(value, Tensor) else 0
    return size if isinstance(size, int) else 0


def _is_computed(node: Node) -> bool:
    """Return whether a node is a scalar that the graph computes, and not an input or a constant."""
    value = node.meta.get("val")
    is_number = isinstance(value, Tensor) and not value.ndim
    return is_number and node.op == "call_function" and bool(node.all_input_nodes)
