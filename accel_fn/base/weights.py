"""Weights of batches: how many items each mean loss stands for."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accel_fn.errors import ArgumentError, ArgumentTypeError, BatchError, message

Key = str | int
WeightFn = Callable[[Any], "int | float | Tensor"]
Weight = float | tuple[float, ...]
"""The number of items that a mean loss is over: for several terms one each, or 0 where all are 0."""
_EXACT = 2**53
"""Up to here sums of integers over ranks are exact."""
_SMALLEST, _LARGEST = 1e-30, 1e30


def num_labels(
    key_or_path: Key | Sequence[Key], ignore_index: int = -100, *, shift: int = 0
) -> WeightFn:
    """Make a `weight_fn` that counts the labels that the loss does not ignore.

    For losses that are a mean over tokens: `cross_entropy(..., ignore_index=-100)`
    of language models, masked targets of any shape.

    Args:
        key_or_path: where the labels are in the batch: a key, an index, an
            attribute name, or a path of these (`("target", 0)`).
        ignore_index: the label that does not count.
        shift: 1 for losses that compare each output with the next label, and so leave out the
            first label of each row, as transformers' causal language models do; else 0.

    Returns:
        A function of a batch whose labels are an integer tensor of any shape,
        which gives their number as an `int`.

    Raises:
        TypeError: the path is empty or holds something else than str and int, or
            `ignore_index` or `shift` is no integer.
        ValueError: `shift` is < 0; (when called) the batch has no tensor there.

    Cost: one read of the labels; on an accelerator, one host synchronisation.
    Labels are counted before `place` moves the batch, so labels that come from
    a data loader cost none.

    >>> import torch, accel_fn as af
    >>> af.num_labels("labels")({"labels": torch.tensor([[5, 7, -100], [2, -100, -100]])})
    3
    """
    path = (key_or_path,) if isinstance(key_or_path, str | int) else key_or_path
    if not (isinstance(path, Sequence) and path and all(map(_is_key, path))):
        rule = "be a key, an index or a path of these"
        raise ArgumentTypeError(message("num_labels", "key_or_path", rule, key_or_path))
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, numbers.Integral):
        raise ArgumentTypeError(
            message("num_labels", "ignore_index", "be an integer", ignore_index)
        )
    if isinstance(shift, bool) or not isinstance(shift, int):
        raise ArgumentTypeError(message("num_labels", "shift", "be an integer >= 0", shift))
    if shift < 0:
        raise ArgumentError(message("num_labels", "shift", "be an integer >= 0", shift))
    shifted = {"shift": shift} if shift else {}
    return partial(count_labels, path=tuple(path), ignore_index=ignore_index, **shifted)


def _is_key(key: object) -> bool:
    return isinstance(key, str | int) and not isinstance(key, bool)


def count_labels(batch: Any, *, path: tuple[Key, ...], ignore_index: int, shift: int = 0) -> int:
    """Count the labels at `path` that differ from `ignore_index`, but for the first ones of each row."""
    labels = batch
    for key in path:
        labels = _child(labels, key, path)
    if not isinstance(labels, Tensor):
        rule = f"lead to a tensor of labels in the batch, {path!r} does not"
        raise BatchError(message("num_labels", "key_or_path", rule, type(labels).__name__))
    if shift and labels.ndim < 2:
        rule = f"lead to labels [num_samples, length, ...] with shift={shift}"
        raise BatchError(message("num_labels", "key_or_path", rule, list(labels.shape)))
    counted = labels[:, shift:] if shift else labels
    return int(torch.count_nonzero(counted != ignore_index))


def _child(node: Any, key: Key, path: tuple[Key, ...]) -> Any:
    try:
        by_name = isinstance(key, str) and not isinstance(node, Mapping) and hasattr(node, str(key))
        return getattr(node, str(key)) if by_name else node[key]
    except (KeyError, IndexError, TypeError) as error:
        has = sorted(map(str, node)) if isinstance(node, Mapping) else type(node).__name__
        rule = f"be found in the batch, {path!r} is not: no {key!r}"
        raise BatchError(message("num_labels", "key_or_path", rule, has)) from error


def weigh(weight_fn: WeightFn | Mapping[str, WeightFn], batches: Sequence[Any]) -> Sequence[Weight]:
    """Return the checked weight of each batch: finite ints or floats >= 0, from any kind of number."""
    if isinstance(weight_fn, Mapping):
        return [_weights(weight_fn, batch) for batch in batches]
    return [_weight(weight_fn, batch) for batch in batches]


def _weights(weight_fns: Mapping[str, WeightFn], batch: Any) -> Weight:
    found = tuple([_weight(fn, batch, f"weight_fn[{name!r}]") for name, fn in weight_fns.items()])
    return found if any(found) else 0


def total_weight(weights: Sequence[Weight]) -> Weight:
    """Add up weights, term by term."""
    terms = [each for each in weights if isinstance(each, tuple)]
    plain = sum([each for each in weights if not isinstance(each, tuple)])
    # A plain one is 0, or the NaN of a rank that cannot count its batch.
    return tuple([sum(each) + plain for each in zip(*terms, strict=True)]) if terms else plain


def shares(weight: Weight, total: Weight, factor: int = 1) -> Weight:
    """Return `factor * weight / total`, term by term; 0 where nothing counts."""
    if isinstance(weight, tuple):
        assert isinstance(total, tuple)
        pairs = zip(weight, total, strict=True)
        return tuple([part * factor / whole if part else 0.0 for part, whole in pairs])
    if not weight:
        return 0.0
    assert not isinstance(total, tuple)
    return weight * factor / total


def _weight(weight_fn: WeightFn, batch: Any, name: str = "weight_fn") -> float:
    weight = weight_fn(batch)
    if type(weight) is int and 0 <= weight <= _EXACT:
        return weight
    value = weight.item() if isinstance(weight, Tensor) and weight.numel() == 1 else weight
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        rule = "return a number or a 0-dim tensor"
        raise BatchError(message("Plan", name, rule, value))
    plain = int(value) if isinstance(value, numbers.Integral) else float(value)
    if not 0 <= plain <= sys.float_info.max:  # a larger integer has no float
        raise BatchError(message("Plan", name, "return a finite count >= 0", value))
    if plain and not _SMALLEST <= plain <= _LARGEST:
        rule = f"return 0 or a count from {_SMALLEST:g} to {_LARGEST:g}, as losses in float32 go times it"
        raise BatchError(message("Plan", name, rule, value))
    return plain
