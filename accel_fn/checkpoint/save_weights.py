"""Save the weights of a model, without a run: save_model, whole_state_dict."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_fn.checkpoint.files import hash_of_tensor
from accel_fn.checkpoint.run_state import read_whole, split_tied
from accel_fn.checkpoint.weight_files import (
    Entries,
    check_storable,
    folder_of_set,
    read_entries,
    write_set,
)
from accel_fn.checkpoint.weights import _on_all
from accel_fn.core.collectives import all_or_none, barrier
from accel_fn.core.dtensor import axes_of
from accel_fn.core.plan import unwrapped
from accel_fn.core.state import DistState, check_state
from accel_fn.core.zero import gathered, world_of
from accel_fn.errors import ArgumentError, ArgumentTypeError, check_count, check_only, message

_UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}


def save_model(
    model: nn.Module,
    folder: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    *,
    dtype: torch.dtype | None = None,
    only: str | None = None,
) -> None:
    """Write parameters and persistent buffers as safetensors files, in Hugging Face's layout.

    The folder gets `model.safetensors`, or, above `max_shard_size`,
    `model-00001-of-0000N.safetensors` ... and `model.safetensors.index.json`. Keys are those
    of the model's `state_dict()`; a model in DDP or `torch.compile` is saved as the one inside. A
    tensor with several names (tied weights) is written once, under the first; the file's
    metadata list the other names.

    A process that is killed at any moment leaves the old set or the new one, and a reader gets one of
    the two, or an error. The files of earlier saves are removed at the end; no other file of the
    folder is touched. Only one process at a time may write to a folder. Without hard links,
    replacing a set by one of as many shards copies its files.

    Call it on one rank: `af.on_main(lambda: af.save_model(model, folder), state)`. With `wrap_fsdp`,
    `wrap_tp`, or stage 3 of `wrap_deepspeed`, call it on every rank: the first rank gathers the
    model, and writes it.
    Plain tensors count as whole, even if your own strategy gives each rank a part of them.

    Args:
        model: a model with dense tensors of the dtypes that safetensors knows, on any device.
        folder: the folder for the files; made if it does not exist.
        max_shard_size: the size of the tensors in one file, in bytes or as "5GB" (10**9) or
            "512MiB" (2**20); a larger tensor gets a separate file.
        dtype: the dtype of the floating-point tensors in the files, such as `torch.bfloat16`; the
            model does not change. Default: the dtype of each tensor.
        only: "trained": leave out parameters that require no gradient, such as the base of adapters. The
            files list them, each with a hash. Default: write all.

    Raises:
        TypeError: `dtype` is not a floating-point dtype.
        ValueError: `max_shard_size` is not a size, or the model holds something other than dense
            tensors with values, or two tensors that share a part of their memory, or, with `only`,
            no parameter that requires a gradient.
        OSError: the files cannot be written; earlier files stay.

    Cost: one write of the model, and a wait for the disk; on the host, a copy of one shard if the model
    is on an accelerator, and of its non-contiguous and converted tensors otherwise. With `only`, one read
    of what is left out.

    >>> import os, tempfile, torch, accel_fn as af
    >>> folder = tempfile.mkdtemp()
    >>> af.save_model(torch.nn.Linear(2, 1), folder)
    >>> os.listdir(folder)
    ['model.safetensors']
    """
    limit = parse_size("save_model", max_shard_size)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        rule = "be a floating-point torch.dtype or None"
        raise ArgumentTypeError(message("save_model", "dtype", rule, dtype))
    check_only("save_model", only)
    path = folder_of_set("save_model", folder)
    with gathered(model):
        entries = replace(read_entries("save_model", model), dtype=dtype)
        axes = axes_of(entries.tensors.values()) or world_of(model)
        frozen = _frozen(model, entries) if only else {}
        tensors = {name: each for name, each in entries.tensors.items() if name not in frozen}
        entries = replace(entries, tensors=tensors)
        check_storable(entries)
        if axes:
            _write_gathered(path, entries, frozen, limit, axes)
        else:
            hashes = {name: hash_of_tensor(each) for name, each in frozen.items()}
            write_set(path, replace(entries, frozen=hashes), limit)


def whole_state_dict(model: nn.Module, state: DistState) -> dict[str, Any]:
    """Copy the whole `state_dict` of a model to the host of the main rank. Every rank calls it.

    Use it for uploads, conversions and your own checks; `save_model` writes the weights to files.
    Keys are those of the model before it was wrapped or compiled.

    Args:
        model: the plan's model, under any strategy. (Under `local_sgd`, and for plain tensors into
            which your own strategy splits a tensor, the values of the main rank are copied.)
        state: this rank's state.

    Returns:
        On the main rank, copies of all tensors on the host: later steps do not change them. Tied
        tensors are one tensor. On the other ranks, an empty dict.

    Raises:
        TypeError: `model` is not a `torch.nn.Module`.
        RuntimeError: another rank failed, for example out of memory.

    Cost: one gather of each sharded tensor, one after another, and a copy of the model in the memory of
    the main rank; in a world of several, four small collectives.

    >>> import accel_fn as af
    >>> whole = af.checkpoint.whole_state_dict(model, af.DistState())
    >>> {name: list(value.shape) for name, value in whole.items()}
    {'weight': [1, 4], 'bias': [1]}
    """
    check_state("whole_state_dict", state)
    with gathered(model):
        return _copied(model, state)


def _copied(model: nn.Module, state: DistState) -> dict[str, Any]:
    saved = all_or_none(lambda: _read(model), state, "whole_state_dict")
    tensors = {name: each for name, each in saved.items() if isinstance(each, Tensor)}
    firsts, tied = split_tied(tensors, unwrapped(model))
    own = firsts if state.is_main else ()
    copies = read_whole(firsts, own, lambda _, gathered: gathered.to("cpu", copy=True))
    saved |= all_or_none(copies, state, "whole_state_dict")
    saved |= {name: saved[first] for name, first in tied.items()}
    return saved if state.is_main else {}


def _read(model: nn.Module) -> dict[str, Any]:
    if not isinstance(model, nn.Module):
        rule, got = "be a torch.nn.Module", type(model).__name__
        raise ArgumentTypeError(message("whole_state_dict", "model", rule, got))
    return dict(unwrapped(model).state_dict())


def _write_gathered(
    path: Path,
    entries: Entries,
    frozen: Mapping[str, Tensor],
    limit: int,
    axes: list[DistState],
) -> None:
    """Gather on all ranks, one tensor after another, and write on the first."""
    barrier(axes[0])
    every = {**entries.tensors, **frozen}
    is_writer = all(axis.is_main for axis in axes)

    def read(name: str, gathered: Tensor) -> Tensor | str:
        return hash_of_tensor(gathered) if name in frozen else gathered.cpu()

    gathered = read_whole(every, every if is_writer else (), read)

    def write() -> None:
        found = gathered()
        if is_writer:
            tensors = {name: each for name, each in found.items() if isinstance(each, Tensor)}
            hashes = {name: each for name, each in found.items() if isinstance(each, str)}
            write_set(path, replace(entries, tensors=tensors, frozen=hashes), limit)

    _on_all(write, axes, "save_model")


def _frozen(model: nn.Module, entries: Entries) -> dict[str, Tensor]:
    """Select the parameters that require no gradient."""
    parameters = dict(unwrapped(model).named_parameters())
    if not any(each.requires_grad for each in parameters.values()):
        rule = 'have a parameter that requires a gradient with only="trained"'
        raise ArgumentError(message("save_model", "model", rule, type(model).__name__))
    names = [name for name, each in parameters.items() if not each.requires_grad]
    return {name: entries.tensors[name] for name in names if name in entries.tensors}


def parse_size(function: str, size: int | str) -> int:
    if not isinstance(size, str):
        return check_count(function, "max_shard_size", size, repair='or give "5GB"')
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)", size)
    if found and found[2] in _UNITS:
        num_bytes = int(Decimal(found[1]) * _UNITS[found[2]])
        if num_bytes >= 1:
            return num_bytes
    rule = f"be a number of bytes >= 1, or one with a unit of {', '.join(_UNITS)}"
    raise ArgumentError(message(function, "max_shard_size", rule, size))
