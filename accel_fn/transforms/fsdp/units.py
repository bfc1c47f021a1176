"""The FSDP units of a model, by name."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from accel_fn.base.blocks import Blocks, find_blocks, is_container


def units_of(model: nn.Module, blocks: Blocks) -> dict[str, nn.Module]:
    """Return the FSDP units of a model, by name."""
    return {**dict(tops_of(model, "")), **find_blocks(model, blocks, "wrap_fsdp")}


def tops_of(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Return the model, or its children if it is a mere container."""
    if not is_container(module):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from tops_of(child, f"{name}.{child_name}" if name else child_name)
