"""The FSDP units of a model, by name."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from accel_fn.base.blocks import Blocks, find_blocks, is_container, modules_in


def units_of(model: nn.Module, blocks: Blocks, ignore: Blocks = None) -> dict[str, nn.Module]:
    """Return the FSDP units of a model, by name; modules that are ignored are none."""
    ignored = modules_in(model, ignore, "wrap_fsdp(ignore)")
    found = {**dict(tops_of(model, "")), **find_blocks(model, blocks, "wrap_fsdp")}
    return {name: unit for name, unit in found.items() if unit not in ignored}


def ignored_in(model: nn.Module, ignore: Blocks) -> set[nn.Parameter]:
    """Return the parameters that stay whole."""
    modules = modules_in(model, ignore, "wrap_fsdp(ignore)")
    return {each for module in modules for each in module.parameters(recurse=False)}


def tops_of(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Return the model, or its children if it is a mere container."""
    if not is_container(module):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from tops_of(child, f"{name}.{child_name}" if name else child_name)
