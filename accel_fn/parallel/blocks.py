"""Find the repeated blocks of a model, or the blocks that the user names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from accel_fn.errors import ArgumentError, ArgumentTypeError, PlanError, message

Blocks = type[nn.Module] | str | Sequence[type[nn.Module] | str] | None


def is_container(module: nn.Module) -> bool:
    """Return whether a module only holds other modules, without a forward."""
    holds = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return holds and type(module).forward is nn.Module.forward


def check_blocks(function: str, blocks: Any, parameter: str = "blocks") -> None:
    """Refuse an argument that does not name blocks."""
    several = blocks if isinstance(blocks, list | tuple) else (blocks,)
    if not several:
        repair = "leave it out for the repeated ones" if parameter == "blocks" else "leave it out"
        raise ArgumentError(message(function, parameter, "name one block at least", blocks, repair))
    for each in several:
        is_kind = isinstance(each, type) and issubclass(each, nn.Module)
        if not (is_kind or isinstance(each, str) or blocks is None):
            rule = "be a class of modules, a name of a module, several of these, or None"
            raise ArgumentTypeError(message(function, parameter, rule, blocks))


def find_blocks(model: nn.Module, blocks: Blocks, function: str) -> dict[str, nn.Module]:
    """Return the blocks that have parameters, by name, in the order of the model.

    Args:
        model: the model, which is not a block itself.
        blocks: classes, names of modules (the name of a list means its items), or None for the
            repeated blocks, see `repeated`.
        function: the name of the public function, for errors.

    Returns:
        Modules by name.

    Raises:
        ValueError: a class or a name matches nothing.
    """
    return repeated(model) if blocks is None else named_blocks(model, blocks, f"{function}(blocks)")


def modules_in(model: nn.Module, blocks: Blocks, argument: str) -> set[nn.Module]:
    """Return these blocks and all modules inside them; an empty set for None."""
    found = {} if blocks is None else named_blocks(model, blocks, argument)
    return {each for block in found.values() for each in block.modules()}


def named_blocks(
    model: nn.Module, blocks: type[nn.Module] | str | Sequence[type[nn.Module] | str], argument: str
) -> dict[str, nn.Module]:
    """Return blocks by class or name; errors name the `argument`, such as `wrap_fsdp(blocks)`."""
    wanted = [blocks] if isinstance(blocks, type | str) else list(blocks)
    modules = {name: each for name, each in model.named_modules() if name and _has_any(each)}
    found: set[str] = set()
    for each in wanted:
        matches = _matches(modules, each)
        if not matches:
            shown = each if isinstance(each, str) else each.__name__
            some = sorted({type(module).__name__ for module in modules.values()})
            raise PlanError(
                f"build: {argument} must match modules with parameters, got {shown!r}, which "
                f"matches none of {type(model).__name__}; there are {', '.join(some)}"
            )
        found |= matches
    return {name: module for name, module in modules.items() if name in found}


def _matches(modules: dict[str, nn.Module], wanted: type[nn.Module] | str) -> set[str]:
    if not isinstance(wanted, str):
        found = {name for name, module in modules.items() if isinstance(module, wanted)}
    elif wanted in modules and is_container(modules[wanted]):
        found = {name for name in modules if name.rpartition(".")[0] == wanted}
    else:
        found = {wanted} & modules.keys()
    return {name for name in found if not is_container(modules[name])}


def repeated(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of the class that each outermost `ModuleList` or `Sequential` repeats most.

    If two classes are equally frequent in a list, the class with more parameters is used. All items
    of a class that is used in one list are returned, also from lists that hold one such item.
    """
    held: dict[str, list[nn.Module]] = {}
    for within, _, module in _items(model, "", ""):
        held.setdefault(within, []).append(module)
    kinds = {_most(modules) for modules in held.values()}
    return {name: module for _, name, module in _items(model, "", "") if type(module) in kinds}


def _most(modules: Sequence[nn.Module]) -> type[nn.Module] | None:
    counts = Counter(map(type, modules))
    sizes = Counter[type[nn.Module]]()
    for module in modules:
        sizes[type(module)] += sum(parameter.numel() for parameter in module.parameters())
    most = max(counts, key=lambda kind: (counts[kind], sizes[kind]))
    return most if counts[most] > 1 else None


def _items(module: nn.Module, prefix: str, within: str) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield the items that have parameters in lists and sequences.

    Each result holds the name of the outermost list, the name of the item, and the item.
    """
    lists = nn.Sequential | nn.ModuleList
    is_list = isinstance(module, lists)
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if is_list and not isinstance(child, lists):
            if _has_any(child):
                yield within, path, child
        else:
            yield from _items(child, f"{path}.", within if is_list else path)


def _has_any(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
