"""A compiler pass against a bug of torch's compiler, which loses the factor `alpha` of an addition."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

_ATEN = torch.ops.aten


class Addends(CustomGraphPass):
    """A compiler pass that rewrites `add(a, b, alpha=number)` as `a + number * b`.

    torch 2.13 fuses a matrix product with an addition, and then ignores `alpha`. For example, it
    would add weight decay to such a product with the factor 1.
    """

    def __call__(self, graph: Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=_ATEN.add.Tensor):
            first, second = node.args
            alpha = node.kwargs.get("alpha", 1)
            if alpha == 1 or not isinstance(second, Node):
                continue
            with graph.inserting_before(node):
                product = graph.call_function(_ATEN.mul.Tensor, (second, alpha))
            product.meta["val"] = second.meta["val"] * _value(alpha)
            node.args, node.kwargs = (first, product), {}

    def uuid(self) -> Any:
        """Return a key for the compiler's cache; it changes whenever this file changes."""
        return get_hash_for_files((__file__,))


def _value(number: Any) -> Any:
    return number.meta["val"] if isinstance(number, Node) else number
