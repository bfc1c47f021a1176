"""Weights of batches: how many items a loss is a mean over, and the shares of micro-batches."""

from __future__ import annotations

import numbers
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from accel_fn.errors import ArgumentError, ArgumentTypeError, BatchError, message

# Keep sources in a dictionary: an attribute of a tensor would be pickled and copied with the
# tensor.
_SOURCES = WeakTensorKeyDictionary()


def remember_source(moved: Tensor, source: Tensor) -> None:
    """Keep a host tensor that may hold labels for as long as its device copy exists."""
    if not (source.is_floating_point() or source.is_complex()):
        _SOURCES[moved] = source, (source._version, moved._version)


def on_host(tensor: Tensor) -> Tensor:
    """Return the tensor's values on the host if they are known there, or the tensor itself."""
    if tensor.is_cpu:
        return tensor
    # `accumulate` cuts a batch into views: look up their base.
    base = tensor if tensor._base is None else tensor._base
    known: tuple[Tensor, tuple[int, int]] | None = _SOURCES.get(base)  # type: ignore[no-untyped-call]
    if known is None:
        return tensor
    source, versions = known
    if (
        # One of the two tensors was written to after the copy.
        (source._version, base._version) != versions
        or source.stride() != base.stride()
        or tensor.dtype != source.dtype
    ):
        return tensor
    offset = tensor.storage_offset() - base.storage_offset() + source.storage_offset()
    return source.as_strided(tensor.size(), tensor.stride(), offset)


Key = str | int
WeightFn = Callable[[Any], "int | float | Tensor"]
Weight = tuple[float, ...]
"""For each term of a loss, the number of items that it is a mean over; () if all are 0."""
_EXACT = 2**53
"""The largest integer up to which all integers are exact in float64, in which ranks add up weights."""
_SMALLEST, _LARGEST = 1e-30, 1e30
# The repr of more class weights than this shows a checksum instead.
_SHOWN = 8


def count_labels(
    key_or_path: Key | Sequence[Key],
    ignore_index: int = -100,
    *,
    shift: int = 0,
    class_weight: Tensor | Sequence[float] | None = None,
) -> WeightFn:
    """Make a `weight_fn` that counts the labels that the loss does not ignore.

    For losses that are a mean over tokens: `cross_entropy(..., ignore_index=-100)`
    of language models, masked targets of any shape.

    Args:
        key_or_path: the place of the labels in the batch: a key, an index, an attribute name, or a
            path of these (`("target", 0)`).
        ignore_index: the label that does not count.
        shift: 1 for losses that compare each output with the next label, and so leave out the first
            label of each row, as in transformers' causal language models; else 0. With 1, a batch
            that also holds `"shift_labels"` counts those, which are shifted already.
        class_weight: the weight of each class, [num_classes], finite and >= 0, if the loss divides
            by the sum of the labels' weights: `cross_entropy(..., weight=class_weight)`.

    Returns:
        A function of a batch whose labels are an integer tensor of any shape,
        which gives their number as an `int`; with `class_weight`, the sum of their weights as a
        `float`, added up in float64.

    Raises:
        TypeError: the path is empty or holds other values than str and int, `ignore_index` or
            `shift` is not an integer, or `class_weight` is not a tensor or sequence of numbers.
        ValueError: `shift` is < 0, or `class_weight` not 1-d, empty, negative or not finite; (when called)
            the batch has no tensor there, or a label that has no class weight.

    Cost: one read of the labels. Labels from a data loader or from `prefetch` are counted on the
    host, without waiting: before `place` moves the batch, or in the copy that was moved. Other
    labels on an accelerator, and those that were written there, cost one host synchronisation per
    micro-batch.

    >>> import torch, accel_fn as af
    >>> af.count_labels("labels")({"labels": torch.tensor([[5, 7, -100], [2, -100, -100]])})
    3
    >>> af.count_labels("labels", class_weight=[1.0, 7.0])({"labels": torch.tensor([0, 1, 1, -100])})
    15.0
    """
    path = (key_or_path,) if isinstance(key_or_path, str | int) else key_or_path
    if not (isinstance(path, Sequence) and path and all(map(_is_key, path))):
        rule = "be a key, an index or a path of these"
        raise ArgumentTypeError(message("count_labels", "key_or_path", rule, key_or_path))
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, numbers.Integral):
        raise ArgumentTypeError(
            message("count_labels", "ignore_index", "be an integer", ignore_index)
        )
    if isinstance(shift, bool) or not isinstance(shift, int):
        raise ArgumentTypeError(message("count_labels", "shift", "be an integer >= 0", shift))
    if shift < 0:
        raise ArgumentError(message("count_labels", "shift", "be an integer >= 0", shift))
    options: dict[str, Any] = {"shift": shift} if shift else {}
    if class_weight is not None:
        options["class_weight"] = _class_weights(class_weight)
    counting = partial(labels_at, path=tuple(path), ignore_index=ignore_index, **options)
    given = ", ".join(f"{name}={value!r}" for name, value in counting.keywords.items())
    # Set the text that a plan prints for this function.
    vars(counting)["call"] = f"count_labels({given})"
    return counting


def _is_key(key: object) -> bool:
    return isinstance(key, str | int) and not isinstance(key, bool)


@dataclass(frozen=True, eq=False)
class _ClassWeights:
    """The weight of each class: [num_classes], float64, on the host."""

    values: Tensor

    def __repr__(self) -> str:
        values = self.values.tolist()
        if len(values) <= _SHOWN:
            return repr(values)
        # Checkpoints compare this text, so different weights need different texts.
        return f"<{len(values)} weights of checksum {zlib.crc32(repr(values).encode()):08x}>"


def _class_weights(given: Any) -> _ClassWeights:
    rule = "be a 1-d tensor or sequence of finite numbers >= 0"
    try:
        found = torch.as_tensor(given).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        got = type(given).__name__
        raise ArgumentTypeError(message("count_labels", "class_weight", rule, got)) from error
    if found.is_complex():
        raise ArgumentTypeError(message("count_labels", "class_weight", rule, found.dtype))
    values = found.to("cpu", torch.float64, copy=True)
    if values.ndim != 1 or not len(values):
        got = f"shape {list(values.shape)}"
        raise ArgumentError(message("count_labels", "class_weight", rule, got))
    wrong = ~(values.isfinite() & (values >= 0))
    if wrong.any():
        raise ArgumentError(message("count_labels", "class_weight", rule, values[wrong][0].item()))
    return _ClassWeights(values)


def labels_at(
    batch: Any,
    *,
    path: tuple[Key, ...],
    ignore_index: int,
    shift: int = 0,
    class_weight: _ClassWeights | None = None,
) -> int | float:
    """Count the labels at `path` except `ignore_index`, without the first `shift` of each row.

    With class weights, add up the weights of these labels.
    """
    labels = batch
    for key in path:
        around, labels = labels, _child(labels, key, path)
    if shift == 1 and isinstance(around, Mapping) and "shift_labels" in around:
        # If a batch has `shift_labels`, the loss uses these instead of the labels. They hold the
        # next label of each token, also at the end of a block.
        labels, shift = around["shift_labels"], 0
    if not isinstance(labels, Tensor):
        rule = f"lead to a tensor of labels in the batch, {path!r} does not"
        raise BatchError(message("count_labels", "key_or_path", rule, type(labels).__name__))
    if shift and labels.ndim < 2:
        rule = f"lead to labels [num_samples, length, ...] with shift={shift}"
        raise BatchError(message("count_labels", "key_or_path", rule, list(labels.shape)))
    labels = on_host(labels)
    counted = labels[:, shift:] if shift else labels
    if class_weight is None:
        return int(torch.count_nonzero(counted != ignore_index))
    # Copy the labels to the host once: otherwise each operation below would wait for the
    # accelerator.
    counted = counted.cpu()
    return _sum_of_weights(counted[counted != ignore_index], class_weight.values)


def _sum_of_weights(labels: Tensor, weights: Tensor) -> float:
    """Add up the class weights of labels, [num_labels]."""
    if labels.is_floating_point() or labels.is_complex():
        rule = "lead to integer labels with class_weight"
        raise BatchError(message("count_labels", "key_or_path", rule, labels.dtype))
    outside = labels[(labels < 0) | (labels >= len(weights))]
    if outside.numel():
        rule = f"be in 0 .. {len(weights) - 1}, since class_weight has {len(weights)} weights"
        repair = "give every class a weight, or leave the label out by ignore_index"
        raise BatchError(message("count_labels", "labels", rule, int(outside[0]), repair))
    counts = torch.bincount(labels.long(), minlength=len(weights))
    return float(counts.to(weights.dtype) @ weights)


def _child(node: Any, key: Key, path: tuple[Key, ...]) -> Any:
    try:
        by_name = isinstance(key, str) and not isinstance(node, Mapping) and hasattr(node, str(key))
        return getattr(node, str(key)) if by_name else node[key]
    except (KeyError, IndexError, TypeError) as error:
        has = sorted(map(str, node)) if isinstance(node, Mapping) else type(node).__name__
        rule = f"be found in the batch, {path!r} is not: no {key!r}"
        raise BatchError(message("count_labels", "key_or_path", rule, has)) from error


def weigh(weight_fn: WeightFn | Mapping[str, WeightFn], batches: Sequence[Any]) -> Sequence[Weight]:
    """Compute the weights of batches as finite ints or floats >= 0; refuse other results of `weight_fn`."""
    if callable(weight_fn):
        found: list[Any] = [*map(weight_fn, batches)]
        if {*map(type, found)} == {int} and min(found) >= 0 and max(found) <= _EXACT:
            return [(each,) if each else () for each in found]  # a faster path for most batches
        return [_checked(each) for each in found]
    return [_weights(weight_fn, batch) for batch in batches]


def _weights(weight_fns: Mapping[str, WeightFn], batch: Any) -> Weight:
    each = [_checked(fn(batch), f"weight_fn[{name!r}]") for name, fn in weight_fns.items()]
    return tuple([sum(found) for found in each]) if any(each) else ()


def total_weight(weights: Sequence[Weight]) -> Weight:
    """Add up weights, term by term."""
    return tuple(map(sum, zip(*filter(None, weights), strict=True)))


def shares(weight: Weight, total: Weight, factor: int = 1) -> Weight:
    """Return `factor * weight / total`, term by term; 0 if the weight is 0."""
    if len(weight) == 1 == len(total):  # a faster path for most losses
        return (weight[0] * factor / total[0],)
    pairs = zip(weight, total, strict=False)  # a weight of 0 is ()
    return tuple([part * factor / whole if part else 0.0 for part, whole in pairs])


def _checked(weight: Any, name: str = "weight_fn") -> Weight:
    if type(weight) is int and 0 <= weight <= _EXACT:
        return (weight,) if weight else ()
    value = weight.item() if isinstance(weight, Tensor) and weight.numel() == 1 else weight
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        rule = "return a number or a 0-dim tensor"
        raise BatchError(message("Plan", name, rule, value))
    plain = int(value) if isinstance(value, numbers.Integral) else float(value)
    # Refuse an integer above the largest float too: it cannot be converted to a float.
    if not 0 <= plain <= sys.float_info.max:
        raise BatchError(message("Plan", name, "return a finite count >= 0", value))
    if plain and not _SMALLEST <= plain <= _LARGEST:
        rule = f"return 0 or a count from {_SMALLEST:g} to {_LARGEST:g}, as losses in float32 go times it"
        raise BatchError(message("Plan", name, rule, value))
    return (plain,) if plain else ()
