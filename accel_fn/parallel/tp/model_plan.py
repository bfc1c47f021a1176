"""The styles of `"auto"`: the plan of a model of transformers, or an error that suggests a mapping."""

from __future__ import annotations

import json
from collections import Counter

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from accel_fn.errors import PlanError
from accel_fn.parallel.blocks import is_container, repeated
from accel_fn.parallel.tp.patterns import matches, starred

_OF_TRANSFORMERS: dict[str, object] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "embedding_rowwise": "rowwise",
    "embedding_colwise": ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),
    # Norms of heads: each rank has a part of the heads. torch made this style for a part of the
    # sequence. For a part of the heads, the output is right too, and so is the sum of gradients
    # over the ranks.
    "replicated_with_grad_allreduce": SequenceParallel(use_local_output=True),
    "replicate": None,
}
"""Styles by their name in transformers. None: the module stays whole."""

READS_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that read the weights of their layers without calling them."""

PARAMETER_LISTS = (nn.ParameterList, nn.ParameterDict)
"""Modules that are never called: the module that holds them reads their parameters."""


def plan_styles(model: nn.Module) -> dict[str, object]:
    """Return the styles of a model's own plan, by pattern; refuse styles that torch lacks."""
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found: dict[str, object] = {}
    for pattern, style in _plan(model).items():
        is_module = any(matches(name, pattern) for name in modules)
        # Skip a pattern without matches: a plan may name layers that only some models of the class
        # have.
        if not (is_module or any(matches(name, pattern) for name in parameters)):
            continue
        if not (is_module and style in _OF_TRANSFORMERS):
            what = "module" if is_module else "parameter"
            raise PlanError(
                f"build: wrap_tp's styles must be ones that torch has for modules, got {style!r} for the "
                f"{what} {pattern} in the plan of {type(model).__name__}; give a mapping of the other "
                "layers"
            )
        if _OF_TRANSFORMERS[style] is not None:
            found[pattern] = _OF_TRANSFORMERS[style]
    # Refuse a plan that names no layer of a block. For example, the plan of DBRX names only the
    # head.
    if not any("*" in pattern for pattern in found):
        raise PlanError(_without_plan(model))
    return found


def _plan(model: nn.Module) -> dict[str, str]:
    """Return the plan of a model of transformers, or else the joined plans of its children."""
    if plan := getattr(model, "_tp_plan", None):
        return dict(plan)
    return {
        f"{name}.{pattern}": style
        for name, child in model.named_children()
        for pattern, style in _plan(child).items()
    }


def _without_plan(model: nn.Module) -> str:
    """Return the message for a model without a plan, with a guess if the styles are clear."""
    kind, guess = type(model).__name__, dict[str, str]()
    blocks = {
        name: each for name, each in repeated(model).items() if not isinstance(each, nn.Linear)
    }
    for name, block in (blocks or {"": model}).items():
        prefix = f"{starred(name)}." if name else ""
        for inner, module in block.named_modules():
            # Conv1D is a class of transformers.
            if type(module).__name__ == "Conv1D":
                return (
                    f"build: wrap_tp's styles must be for nn.Linear layers, got {kind}, whose "
                    f"{prefix}{inner} is a Conv1D; its weight is transposed, so that torch has no style "
                    "for it"
                )
        for inner, style in _guess(block).items():
            guess.setdefault(f"{prefix}{inner}", style)
    clear = {pattern: style for pattern, style in guess.items() if style}
    unclear = ", ".join(pattern for pattern, style in guess.items() if not style)
    repair = (
        f"look at this guess before you use it: wrap_tp({json.dumps(clear)})"
        if clear
        else 'give one such as {"layers.*.up": "colwise", "layers.*.down": "rowwise"}'
    )
    return (
        f"build: wrap_tp's styles must be a mapping for {kind}, which has no plan of its own, got "
        f'"auto"; {repair}{f"; there is no guess for {unclear}" if unclear else ""}'
    )


def _guess(block: nn.Module) -> dict[str, str]:
    """Guess the styles of a block's layers, for each part of the block, such as its attention.

    The last layer of a part is rowwise if it takes as many features as another layer of the part
    returns. The other layers are then colwise. Otherwise, the styles of the part are empty, for
    example if one matrix holds queries, keys and values.
    """
    modules = dict(block.named_modules())
    layers = {
        name: each
        for name, each in modules.items()
        if isinstance(each, nn.Linear)
        and not isinstance(modules[name.rpartition(".")[0]], READS_WEIGHTS)
    }
    part_of = {name: _part(block, name) for name in layers}
    num_layers = Counter(part_of.values())
    parts: dict[str, list[str]] = {}
    for name, part in part_of.items():
        # In a block of BERT, each of the two layers of the MLP is in a child without other layers.
        # So put all layers that share their child with no other layer into one part: they may be a
        # pair.
        parts.setdefault(part if num_layers[part] > 1 else "", []).append(name)
    guess: dict[str, str] = {}
    for *others, last in parts.values():
        is_clear = layers[last].in_features in {layers[name].out_features for name in others}
        guess |= dict.fromkeys(others, "colwise" if is_clear else "")
        guess[last] = "rowwise" if is_clear else ""
    return {name: guess[name] for name in layers}


def _part(block: nn.Module, name: str) -> str:
    """Return the name of the block's child that holds a layer; "" if the layer is this child."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        outer = ".".join(parts[:depth])
        if not is_container(block.get_submodule(outer)):
            return outer
    return ""
