"""Turns numbers that an operation takes beside tensors into factors, so that a graph need not know them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Factored(TorchFunctionMode):
    """A mode in which an optimizer's operations multiply by their numbers, with the same rounding.

    A compiler keeps a number as an input of a graph where tensors are multiplied by it. As the
    weight of `lerp_`, for example, it is a part of the graph, and each value takes another graph.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first, *others = args
        if func in (Tensor.add, Tensor.add_) and "alpha" in kwargs:
            return func(first, others[0] * kwargs["alpha"])
        if func is Tensor.addcmul_ and "value" in kwargs:
            return first.add_(others[0] * others[1] * kwargs["value"])
        if func is Tensor.addcdiv_ and "value" in kwargs:
            return first.add_(others[0] / others[1] * kwargs["value"])
        if func is Tensor.lerp_ and not isinstance(others[1], Tensor):
            return first.add_((others[0] - first) * others[1])
        if func is Tensor.__rpow__ and not isinstance(others[0], Tensor):
            return (torch.zeros_like(first) + others[0]) ** first
        return func(*args, **kwargs)
