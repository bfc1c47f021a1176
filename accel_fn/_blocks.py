"""The repeated blocks of a model."""

from __future__ import annotations

from collections import Counter

from torch import nn


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of the class that most often stands directly inside an `nn.ModuleList` or `nn.Sequential`.

    Only classes that hold parameters and children of their own count, so that the layers of
    a perceptron are no blocks, and one that stands there once is not repeated. Of two classes
    as frequent, the one with more parameters; a block inside of another is not listed apart.

    Args:
        model: any module.

    Returns:
        The blocks in the order of `model.modules()`; empty where nothing is repeated.
    """
    listed = list(
        dict.fromkeys(
            child
            for parent in model.modules()
            if isinstance(parent, nn.ModuleList | nn.Sequential)
            for child in parent.children()
            if any(True for _ in child.children()) and any(True for _ in child.parameters())
        )
    )
    counts = Counter(type(each) for each in listed)
    counts = Counter({kind: count for kind, count in counts.items() if count > 1})
    if not counts:
        return []

    def size(kind: type) -> tuple[int, int]:
        numbers = sum(p.numel() for each in listed if type(each) is kind for p in each.parameters())
        return counts[kind], numbers

    best = max(counts, key=size)
    found = [each for each in listed if type(each) is best]
    inner = {id(below) for each in found for below in each.modules() if below is not each}
    return [each for each in found if id(each) not in inner]
