"""Average tensors over the ranks, weighted and in place, with the same bits on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from accel_fn.core import primitives
from accel_fn.core.state import DistState
from accel_fn.errors import ReplicaError

_HALVES = (torch.float16, torch.bfloat16)
_BUCKET_NUMEL = 2**24
"""The most numbers in a message of several tensors. An average takes two buffers of this size."""


def average(
    tensors: Mapping[str, Tensor], weight: float, state: DistState, also: Sequence[str] = ()
) -> None:
    """Replace tensors by their weighted mean over the ranks, in place; the same bits on all ranks.

    The mean is the value of the rank with the largest weight, plus the weighted differences of the
    other ranks from it. So a value that is equal on all ranks, such as a count of updates, keeps
    its bits. The lines of `also` must be equal on all ranks, as the names of the tensors must.
    """
    weights = _agreed(tensors, weight, state, also)
    total = sum(weights)
    shares = [each / total if total else 1 / len(weights) for each in weights]
    share, source = shares[state.rank], shares.index(max(shares))
    for bucket in buckets(map(plain, tensors.values())):
        mine = flat(bucket)
        first = mine.clone()
        primitives.broadcast(first, state, source, "local_sgd")
        # Set the difference of equal elements to 0 below: the difference of two equal infinities is
        # NaN.
        equal = mine == first
        # Do not multiply by a share of 0: for a rank without items that holds an infinity, the
        # product is NaN, and so would be the sum on all ranks.
        difference = mine.sub_(first).mul_(share) if share else mine.zero_()
        primitives.start_sum(difference.masked_fill_(equal, 0.0), state, "local_sgd").wait()
        write(first.add_(difference), bucket)


def _agreed(
    tensors: Mapping[str, Tensor], weight: float, state: DistState, also: Sequence[str]
) -> list[float]:
    """Return every rank's weight; raise on all ranks if they would average different tensors."""
    lines = [*also, *(f"{name} {list(each.shape)} {each.dtype}" for name, each in tensors.items())]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    every = primitives.exchange((weight, digest), state, "local_sgd")
    if len({digest for _, digest in every}) > 1:
        lists = [set(each) for each in primitives.exchange(lines, state, "local_sgd")]
        name = min(set.union(*lists) - set.intersection(*lists))
        ranks = [rank for rank, each in enumerate(lists) if name not in each]
        raise ReplicaError(
            f"local_sgd: optimizer state must be of the same parameters on all ranks, got no {name} on "
            f"ranks {ranks}; freeze what a rank's loss may not reach, or use "
            "wrap_ddp(find_unused_parameters=True)"
        )
    return [weight for weight, _ in every]


def plain(tensor: Tensor) -> Tensor:
    """View a tensor's memory without a graph, and complex numbers as pairs of real numbers."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors of one dtype and device, up to the size of one message."""
    open_: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for each in tensors:
        bucket = open_.setdefault((each.dtype, each.device), [])
        if bucket and sum(map(Tensor.numel, bucket)) + each.numel() > _BUCKET_NUMEL:
            yield bucket.copy()
            bucket.clear()
        bucket.append(each)
    yield from open_.values()


def flat(bucket: Sequence[Tensor]) -> Tensor:
    """Copy tensors into one flat tensor; half precision becomes float32."""
    joined = torch.cat([each.reshape(-1) for each in bucket])
    return joined.float() if joined.dtype in _HALVES else joined


def write(joined: Tensor, bucket: Sequence[Tensor]) -> None:
    parts = torch.split(joined, [each.numel() for each in bucket])
    for each, part in zip(bucket, parts, strict=True):
        each.copy_(part.view(each.shape))
