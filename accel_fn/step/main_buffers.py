"""The buffers of the model that a run saves: those of rank 0, on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from accel_fn.base.buffers import BufferCopy, copied_buffers
from accel_fn.base.raw_bytes import bytes_of
from accel_fn.base.state import DistState
from accel_fn.comm import primitives
from accel_fn.comm.collectives import agreed
from accel_fn.errors import check_equal


@contextmanager
def main_buffers(model: nn.Module, state: DistState, function: str) -> Iterator[None]:
    """Give every rank the saved buffers of rank 0; at the end, put its own back.

    Cost: if the model has any, two small collectives and a broadcast of them.
    """
    own = copied_buffers(model, saved=True)
    if not own:
        yield
        return
    try:
        _receive(own, state, function)
        yield
    finally:
        for each in own:
            each.put_back()


def _receive(own: Sequence[BufferCopy], state: DistState, function: str) -> None:
    """Overwrite buffers by those of rank 0."""
    sent: list[Tensor] = []

    def described() -> list[str]:
        sent.extend(bytes_of(each.value.contiguous()).to(state.device) for each in own)
        return [f"{each.path} {list(each.value.shape)} {each.value.dtype}" for each in own]

    every = agreed(described, state, function)
    common = set.intersection(*map(set, every))
    others = ["; ".join(each for each in specs if each not in common) or "none" for specs in every]
    check_equal(others, f"{function}: model must have the same buffers on all ranks")
    joined = torch.cat(sent)
    primitives.broadcast(joined, state, 0, function)
    parts = torch.split(joined, [each.numel() for each in sent])
    with torch.no_grad():
        for (buffer, *_), part in zip(own, parts, strict=True):
            # In memory of its own, since a view as a wider dtype must begin at a multiple of it.
            buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))
