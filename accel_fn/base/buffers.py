"""Copies of a model's buffers, to put them back after forwards that write them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class BufferCopy(NamedTuple):
    """A buffer, the buffers of its module, its name in the model, and a copy of its value."""

    buffer: Tensor
    home: dict[str, Any]
    path: str
    value: Tensor

    def put_back(self) -> None:
        """Give the module this tensor again, with the value that it had."""
        with torch.no_grad():
            self.home[self.path.rpartition(".")[2]] = self.buffer.copy_(self.value)


def copied_buffers(model: nn.Module, *, saved: bool = False) -> list[BufferCopy]:
    """Copy the buffers of a model; with `saved`, those that are in its `state_dict`."""
    return [
        BufferCopy(buffer, vars(module)["_buffers"], f"{path}.{name}", buffer.detach().clone())
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if not (saved and name in module._non_persistent_buffers_set)
    ]


@contextmanager
def spare_buffers(model: nn.Module) -> Iterator[None]:
    """A context in which forwards write to copies of the buffers, of which nothing is kept."""
    # Not copied back: a graph that is still to run backward refuses buffers that were written since.
    homes = [(vars(module)["_buffers"], dict(module._buffers)) for module in model.modules()]
    try:
        for home, own in homes:
            home.update({n: each if each is None else each.clone() for n, each in own.items()})
        yield
    finally:
        for home, own in homes:
            home.update(own)
