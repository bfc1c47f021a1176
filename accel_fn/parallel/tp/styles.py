"""The parallel style of each module: from the user's mapping, or from the model's own plan."""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Iterator, Mapping

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn.modules.dropout import _DropoutNd

from accel_fn.errors import PlanError, message
from accel_fn.parallel.tp.model_plan import READS_WEIGHTS, plan_styles
from accel_fn.parallel.tp.patterns import matches, starred
from accel_fn.parallel.tp.split_sequence import SplitSequence

_STYLES = "wrap_tp's styles"
_NUM_HEADS = (
    "num_heads",
    "n_head",
    "n_heads",
    "nhead",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
)
_HEAD_SIZE = ("head_dim", "head_size")


def styles_of(
    model: nn.Module, styles: str | Mapping[str, object], size: int
) -> dict[str, ParallelStyle]:
    """Return the parallel style of each module that has one, by the module's name.

    Args:
        model: its parameters may be on the meta device.
        styles: styles by pattern of names, in which `*` matches one name between dots; "auto": the
            model's own plan, without layers that are tied to a layer outside of it.
        size: the number of ranks along the axis.

    Returns:
        Styles in the order of the model, a copy for each module.

    Raises:
        ValueError: a pattern matches nothing, or a style does not fit its module.
    """
    modules = dict(model.named_modules())
    ties = _ties(modules)
    given = _matched(model, styles if isinstance(styles, Mapping) else plan_styles(model))
    if styles == "auto":
        for owners in ties:
            if not owners.keys() <= given.keys():
                given = {name: style for name, style in given.items() if name not in owners}
    found = {name: _style(name, modules[name], given[name]) for name in modules if name in given}
    for name, style in found.items():
        _check_module(modules, name, style, size)
    _check_heads(modules, found, size)
    for owners in ties:
        _check_tie(modules, found, owners)
    return found


def _matched(model: nn.Module, styles: Mapping[str, object]) -> dict[str, object]:
    """Return the style of each module that has one, by the first of the module's names."""
    # A module at two places of the model has two names. Use the first name.
    names = list(model.named_modules(remove_duplicate=False))
    first = {module: name for name, module in reversed(names)}
    found: dict[str, tuple[str, object]] = {}
    for pattern, style in styles.items():
        matched = {first[module] for name, module in names if matches(name, pattern)}
        if not matched:
            near = difflib.get_close_matches(pattern, {starred(name) for name, _ in names}, n=3)
            repair = f"did you mean {' or '.join(near)}?" if near else ""
            raise PlanError(
                message("build", _STYLES, "match modules of the model", pattern, repair)
            )
        for name in matched:
            other, its = found.setdefault(name, (pattern, style))
            if its != style:
                rule = f"give {name} one style"
                raise PlanError(message("build", _STYLES, rule, {other: its, pattern: style}))
    return {name: style for name, (_, style) in found.items()}


def _style(name: str, module: nn.Module, given: object) -> ParallelStyle:
    if isinstance(given, ParallelStyle):
        # Copy the style, since `parallelize_module` writes into it.
        return copy.copy(given)
    if given == "colwise":
        return ColwiseParallel()
    if given == "rowwise":
        # An embedding gets all tokens on every rank. A linear layer gets a part of the input
        # features.
        is_table = isinstance(module, nn.Embedding)
        return RowwiseParallel(input_layouts=Replicate() if is_table else None)
    if given == "sequence":
        return SplitSequence()
    rule = 'be "colwise", "rowwise", "sequence" or one of torch\'s ParallelStyle objects'
    raise PlanError(message("build", _STYLES, rule, {name: given}))


def _check_module(
    modules: Mapping[str, nn.Module], name: str, style: ParallelStyle, size: int
) -> None:
    """Refuse a style that does not fit its module."""
    module = modules[name]
    got = f"{name}, of class {type(module).__name__}"
    holder = modules[name.rpartition(".")[0]]
    if isinstance(holder, READS_WEIGHTS):
        kind = type(holder).__name__
        raise PlanError(
            f"build: {_STYLES} must leave out the layers of {kind}, which reads their weights without "
            f"calling them, got {got}; write it with nn.Linear layers"
        )
    # Refuse dropout: before the first draw of a DTensor on a GPU, torch sends the generator of rank
    # 0 to all ranks. Ranks along `dp` would then draw the same numbers for different rows.
    is_no_norm = isinstance(module, _DropoutNd) or any(
        each.ndim > 1 for each in module.parameters()
    )
    if isinstance(style, SplitSequence) and is_no_norm:
        raise PlanError(
            f'build: {_STYLES} must give "sequence" to norms alone, which have no matrix, got {got}'
        )
    # Do not check other styles: they may shard any module.
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return
    if not isinstance(module, nn.Linear | nn.Embedding):
        # Conv1D is a class of transformers, which GPT-2 uses, for example.
        is_transposed = type(module).__name__ == "Conv1D"
        why = ", whose weight is transposed, so that torch has no style for it"
        word = "colwise" if isinstance(style, ColwiseParallel) else "rowwise"
        raise PlanError(
            f'build: {_STYLES} must give "{word}" to nn.Linear and nn.Embedding alone, '
            f"got {got}{why if is_transposed else ''}"
        )
    if "weight" not in module._parameters:
        raise PlanError(
            f"build: {_STYLES} must leave out layers whose weight is computed from others, as by "
            f"weight_norm, got {got}"
        )
    if isinstance(module, nn.Embedding) and not _is_whole(style.input_layouts):
        raise PlanError(
            f"build: {_STYLES} must take the tokens of an embedding whole, got {name}: {style}; "
            f"use {type(style).__name__}(input_layouts=Replicate())"
        )
    what, number = _divided(module, style)
    if number % size:
        raise PlanError(
            f"build: {_STYLES} must have {what} that the number of ranks along the axis, {size}, "
            f"divides, got {number} of {name}"
        )
    rows = module.weight.shape[0]
    is_cut_by_rows = isinstance(module, nn.Embedding) and _cut(module, "weight", style) == 0
    # torch gives each rank as many rows as rank 0, until no rows are left. So the last ranks may
    # get no row.
    if is_cut_by_rows and math.ceil(rows / size) * (size - 1) >= rows:
        raise PlanError(
            f"build: {_STYLES} must leave every rank a row of an embedding, got {rows} rows of {name} "
            f"for {size} ranks"
        )


def _is_whole(layouts: object) -> bool:
    return layouts == (Replicate(),)


def _divided(module: nn.Linear | nn.Embedding, style: ParallelStyle) -> tuple[str, int]:
    """Return the kind of features that the ranks divide among them, and the number of these features."""
    if isinstance(style, ColwiseParallel) and not _is_whole(style.output_layouts):
        rows, columns = module.weight.shape
        return "output features", rows if isinstance(module, nn.Linear) else columns
    if isinstance(style, RowwiseParallel) and not _is_whole(style.input_layouts):
        return "input features", module.weight.shape[1]
    return "", 0


def _cut(module: nn.Module, name: str, style: ParallelStyle | None) -> int | None:
    """Return the dimension along which a style shards a parameter; None if the parameter stays whole."""
    is_linear = isinstance(module, nn.Linear)
    if isinstance(style, ColwiseParallel):
        return 0 if is_linear else 1
    if isinstance(style, RowwiseParallel):
        return None if name == "bias" else int(is_linear)
    return None


def _check_heads(
    modules: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle], size: int
) -> None:
    """Refuse styles that would give a rank only a part of a head."""
    for name, style in styles.items():
        if not isinstance(style, ColwiseParallel) or _is_whole(style.output_layouts):
            continue
        holder = name.rpartition(".")[0]
        for attribute, number in _num_heads(modules[holder]):
            if number % size:
                raise PlanError(
                    f"build: {_STYLES} must have heads that the number of ranks along the axis, {size}, "
                    f"divides, got {attribute}={number} of {holder or 'the model'}; leave out its "
                    "layers, or choose another size of the axis"
                )


def _num_heads(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the numbers of heads that a module, or its configuration, has."""
    holders: dict[str, object] = {"": module}
    # In transformers, every module may hold the model's configuration, for example an MLP. Only
    # attention has a size of heads, so read the configuration of modules with this size only.
    if any(hasattr(module, name) for name in _HEAD_SIZE):
        holders["config."] = getattr(module, "config", None)
    for prefix, holder in holders.items():
        for name in _NUM_HEADS:
            number = getattr(holder, name, None)
            if type(number) is int:
                yield f"{prefix}{name}", number


def _ties(modules: Mapping[str, nn.Module]) -> list[dict[str, str]]:
    """Return, for each tied parameter, the modules that own it, with its name in each of them."""
    owners: dict[nn.Parameter, dict[str, str]] = {}
    for name, module in modules.items():
        for own, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, {})[name] = own
    return [each for each in owners.values() if len(each) > 1]


def _check_tie(
    modules: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle], owners: Mapping[str, str]
) -> None:
    """Refuse styles that cut a tied parameter in two different ways."""
    cuts = {
        f"{name}.{own}": _cut(modules[name], own, styles.get(name)) for name, own in owners.items()
    }
    if len(set(cuts.values())) > 1:
        got = " and ".join(
            f"{name} {'whole' if dim is None else f'cut along dimension {dim}'}"
            for name, dim in cuts.items()
        )
        raise PlanError(
            f'build: {_STYLES} must cut a tied parameter in one way, got {got}; "rowwise" cuts an '
            'embedding as "colwise" cuts a linear layer'
        )
