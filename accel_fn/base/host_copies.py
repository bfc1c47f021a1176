"""Host copies of what was moved to an accelerator, so that labels are counted without waiting for it."""

from __future__ import annotations

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# An attribute of the tensor would be pickled, and copied, with it.
_SOURCES = WeakTensorKeyDictionary()


def remember_source(moved: Tensor, source: Tensor) -> None:
    """Keep the host tensor that was copied as long as the copy lives, if it may hold labels."""
    if not (source.is_floating_point() or source.is_complex()):
        _SOURCES[moved] = source, (source._version, moved._version)


def on_host(tensor: Tensor) -> Tensor:
    """Return the same values on the host, if they are known there; else the tensor itself."""
    if tensor.is_cpu:
        return tensor
    base = tensor if tensor._base is None else tensor._base  # `accumulate` gives views
    known: tuple[Tensor, tuple[int, int]] | None = _SOURCES.get(base)  # type: ignore[no-untyped-call]
    if known is None:
        return tensor
    source, versions = known
    if (
        (source._version, base._version) != versions  # one was written since
        or source.stride() != base.stride()
        or tensor.dtype != source.dtype
    ):
        return tensor
    offset = tensor.storage_offset() - base.storage_offset() + source.storage_offset()
    return source.as_strided(tensor.size(), tensor.stride(), offset)
