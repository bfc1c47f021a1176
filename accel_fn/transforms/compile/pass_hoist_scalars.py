"""A pass of torch's compiler that computes an optimizer's numbers of its step count only once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

_WORTH_IT = 1024
"""Number of elements from which a buffer for a number costs less than computing it again."""


class Hoisting(CustomGraphPass):
    """Keeps 0-dim results in memory where something large is computed with them.

    Else the compiler writes them into each loop that reads them: on a CPU the bias
    correction of Adam, two powers, is then computed anew for every sixteen elements,
    since a C++ compiler may not move a value that could change between them.
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
        """Return the key in the cache of graphs: another pass makes another graph."""
        return get_hash_for_files((__file__,))


def _num_elements(node: Node) -> int:
    """Return the elements of a node's result; 0 if it is not one tensor, or its size is symbolic."""
    value = node.meta.get("val")
    size = value.numel() if isinstance(value, Tensor) else 0
    return size if isinstance(size, int) else 0


def _is_computed(node: Node) -> bool:
    """Return whether a number is computed: inputs are in memory, constants are part of a loop."""
    value = node.meta.get("val")
    is_number = isinstance(value, Tensor) and not value.ndim
    return is_number and node.op == "call_function" and bool(node.all_input_nodes)
