"""Load or export a model's weights from files or a checkpoint, without a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from accel_fn.checkpoint.files import dict_from_plain, hash_of_tensor
from accel_fn.checkpoint.init_weights import InitFn, fill_missing
from accel_fn.checkpoint.manifest import read_manifest
from accel_fn.checkpoint.names import COMMON, COMMON_KEYS
from accel_fn.checkpoint.run_state import prefix_of, with_prefix
from accel_fn.checkpoint.save_weights import write_set
from accel_fn.checkpoint.tensors import check_files, check_sizes, read_tensors
from accel_fn.checkpoint.weight_files import (
    Entries,
    Stored,
    check_dense,
    check_storable,
    check_writable,
    folder_of_set,
    open_set,
    read_entries,
)
from accel_fn.core.collectives import all_or_none
from accel_fn.core.dtensor import axes_of, fill, whole
from accel_fn.core.empty import note_filled
from accel_fn.core.primitives import bytes_of
from accel_fn.core.state import DistState
from accel_fn.core.zero import is_copied
from accel_fn.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    check_flag,
    message,
)
from accel_fn.observe.progress import bytes_bar

_MOST_SHOWN = 10
T = TypeVar("T")


def load_model(
    model: nn.Module,
    folder: str | os.PathLike[str] | None = None,
    *,
    rename: Callable[[str], str | None] | None = None,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    init: InitFn | None = None,
) -> list[str]:
    """Read weights that `save_model`, or a library of Hugging Face, wrote into a model, in place.

    Everything is checked before anything is overwritten: names, shapes, dtypes (none is cast without
    `dtype`), and that the files are whole. If both exist, `model.safetensors` is read, and not the
    index, as in other libraries. If `save_model(only="trained")` wrote the files, the rest of the
    model stays, and must equal what was left out. A name that the file ties to another gets its
    value, tied in the model or not. For names that are tied in the model, the file needs one of
    them; if it has several, they must be equal to the bit. Devices, `requires_grad` and ties of the
    model stay. With `wrap_fsdp` or `wrap_tp`, call it on every rank, which reads its part of each tensor: no
    rank holds more than its parts and one tensor. So it also fills a model that `empty` made, after `build`.
    An index may name only files in its folder, and links must stay in it or lead to the blobs of a hub's
    cache.

    Args:
        model: a model like the saved one: same names, shapes and dtypes; on any device.
        folder: a folder with `model.safetensors` or `model.safetensors.index.json`. None: read no files,
            and let `init` fill the model.
        rename: maps a name in the files to the name in the model, for example
            `lambda name: name.removeprefix("encoder.")`; None leaves that tensor of the files out.
        strict: False: load the tensors that both have, and leave the model's other tensors as they
            are. Tensors that both have must still agree in shape and dtype. Frozen parameters that
            the files leave out may have any values.
        dtype: the dtype of floating-point tensors in the files that have another one than the model's, such
            as `torch.bfloat16`: they are cast to the dtypes of the model.
        init: fills parameters that the files do not hold, such as a new head: `module -> None`, as
            `lambda module: module.reset_parameters()`, or `model._init_weights` of transformers. It is called
            for one module at a time that holds such parameters itself, whole on every rank. What it
            writes to the module's other tensors, or to modules inside, is not kept. Python's, NumPy's and
            torch's generators are seeded by the module's name, and restored: the values do not depend on the
            number of ranks, nor on a seed of yours. Buffers that no file holds keep their values.

    Returns:
        With `strict=False`, a line for each tensor that only the model or only the files have; else
        an empty list.

    Raises:
        TypeError: `rename` does not return text; `strict` is not True or False; `dtype` is not a
            floating-point dtype; `init` is not callable.
        ValueError: neither `folder` nor `init` is given; files and model differ (the message lists where),
            or have no name in common; `rename` returns one name twice; a file is missing or broken, or an
            index is not to be trusted; the model is in use by `wrap_deepspeed` from stage 1 on. The model
            does not change. After the files are read: `init` raises, or leaves a parameter without a value.

    Law: the model gets what `save_model` was given, for any model and any division into files.
    Tests: `tests/laws/law09_weights.py`.

    Cost: one read of the files, mapped, one tensor at a time, and of parameters that they leave out as
    frozen. For shards, two small collectives, and a gather of each of these parameters. With `init`, the
    memory of one module's own parameters, and for shards two more collectives and a gather of those of these
    parameters that files fill.

    >>> import tempfile, torch, accel_fn as af
    >>> folder, model, other = tempfile.mkdtemp(), torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    >>> af.save_model(model, folder)
    >>> af.load_model(other, folder)
    []
    >>> bool((other.weight == model.weight).all())
    True
    """
    check_flag("load_model", "strict", strict)
    _check_choices(folder, dtype, init)
    if is_copied(model):
        raise ArgumentError(
            "load_model: model must be loaded before build under wrap_deepspeed, whose engine would write "
            "its own copy of the parameters over it, got one in use; load first, or use load"
        )
    axes = axes_of(read_entries("load_model", model).tensors.values())
    with ExitStack() as stack:
        opened = matching_set(
            model, folder, rename, strict=strict, dtype=dtype, inits=init is not None
        )
        entries, stored, left_out = _on_all(lambda: stack.enter_context(opened), axes, "load_model")
        if strict and folder is not None:
            _check_frozen(folder_of_set("load_model", folder), entries, stored)
        missing = _missing(entries, stored)
        total = sum(each.nbytes for each in entries.tensors.values())
        with bytes_bar("load_model", total, is_main=all(axis.is_main for axis in axes)) as count:
            for first, tensor in entries.tensors.items():
                # The tensor is detached, so autograd does not record the write.
                for key in _keys_of(first, entries, stored)[:1]:
                    fill(tensor, stored.tensor(key))
                count(tensor.nbytes)
        note_filled(model, entries.tensors.keys() - missing)
    if init is not None:
        _on_all(fill_missing(model, missing, init), axes, "load_model")
        note_filled(model, missing)
    return left_out if not strict else []


def _check_choices(
    folder: str | os.PathLike[str] | None, dtype: torch.dtype | None, init: InitFn | None
) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        rule = "be a floating-point torch.dtype or None"
        raise ArgumentTypeError(message("load_model", "dtype", rule, dtype))
    if init is not None and not callable(init):
        rule = "be a function of a module, or None"
        raise ArgumentTypeError(message("load_model", "init", rule, type(init).__name__))
    if folder is None and init is None:
        repair = "give the folder of the files, or init=fn, which fills parameters without files"
        raise ArgumentError(message("load_model", "folder", "be given without init", None, repair))


def check_weights(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Refuse a folder that `load_model` would refuse on this rank; do not change the model."""
    with matching_set(model, folder):
        pass


@contextmanager
def matching_set(
    model: nn.Module,
    folder: str | os.PathLike[str] | None,
    rename: Callable[[str], str | None] | None = None,
    *,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    inits: bool = False,
) -> Iterator[tuple[Entries, Stored, list[str]]]:
    """Open the files of a model, or raise if they do not match it.

    Also yield a line for each tensor that only the model has, or only the files.

    With `inits`, the model may have tensors that the files do not hold. Without a folder, no files
    are opened.
    """
    path = None if folder is None else folder_of_set("load_model", folder)
    entries = read_entries("load_model", model)
    check_writable(model, entries)
    with ExitStack() as stack:
        if path is None:
            yield entries, Stored({}, {}, {}, {}), []
            return
        stored = open_set(path, stack)
        if rename is not None:
            stored = stored.renamed(rename)
        only_here, only_there = _only_in_model(entries, stored), _only_in_files(entries, stored)
        differences = _differences(entries, stored, dtype)
        left_out = [*only_here, *only_there]
        refused = [*([] if inits else only_here), *only_there] if strict else []
        if len(_absent(entries, stored)) == len(entries.tensors):
            refused = left_out
        if differences or refused:
            raise ArgumentError(_report(path, [*differences, *refused]))
        yield entries, stored, left_out


def _on_all(fn: Callable[[], T], axes: list[DistState], function: str) -> T:
    """Run `fn`; if it raises on one rank of a sharded model, raise on all."""
    for axis in axes:
        # A failure reaches the peers along the first axis, then their peers along the next one.
        fn = partial(all_or_none, fn, axis, function)
    return fn()


def _check_frozen(path: Path, entries: Entries, stored: Stored) -> None:
    """Refuse a model whose frozen parameters differ from those that the files left out."""
    lines = []
    for first, tensor in entries.tensors.items():
        saved = {stored.frozen[name] for name in entries.names_of(first) if name in stored.frozen}
        if saved and saved != {hash_of_tensor(whole(tensor))}:
            lines.append(f"{first}: frozen and left out of the files, other values in the model")
    if lines:
        raise ArgumentError(_report(path, lines))


def _keys_of(first: str, entries: Entries, stored: Stored) -> list[str]:
    keys = (stored.key_of(name) for name in entries.names_of(first))
    return list(dict.fromkeys(key for key in keys if key is not None))


def _absent(entries: Entries, stored: Stored) -> list[str]:
    """List the tensors of the model that the files do not have."""
    return [first for first in entries.tensors if not _keys_of(first, entries, stored)]


def _missing(entries: Entries, stored: Stored) -> list[str]:
    """List the tensors of the model that the files neither hold nor leave out as frozen."""
    return [
        first
        for first in _absent(entries, stored)
        if stored.frozen.keys().isdisjoint(entries.names_of(first))
    ]


def _only_in_model(entries: Entries, stored: Stored) -> list[str]:
    """Describe the tensors that only the model has."""
    return [
        f"{first}: {_spec(entries.tensors[first])} in the model, nothing in the files"
        for first in _missing(entries, stored)
    ]


def _only_in_files(entries: Entries, stored: Stored) -> list[str]:
    """Describe the tensors that only the files have."""
    known = entries.tensors.keys() | entries.tied.keys()
    unknown = {key: _spec(stored.tensor(key)) for key in stored.handles if key not in known}
    unknown |= {name: f"tied to {key}" for name, key in stored.tied.items() if name not in known}
    return [f"{key}: nothing in the model, {there} in the files" for key, there in unknown.items()]


def _differences(entries: Entries, stored: Stored, dtype: torch.dtype | None) -> list[str]:
    """Describe tensors whose shapes or dtypes in model and files differ.

    A tensor of `dtype` in the files is no difference, since the load casts it.
    """
    lines = []
    for first, tensor in entries.tensors.items():
        keys, here = _keys_of(first, entries, stored), _spec(tensor)
        fits = {here, *([_spec(tensor, dtype)] if tensor.is_floating_point() else [])}
        there = {key: _spec(stored.tensor(key)) for key in keys}
        wrong = [key for key in keys if there[key] not in fits]
        lines += [f"{key}: {here} in the model, {there[key]} in the files" for key in wrong]
        if not wrong and not all(_same(stored, keys[0], key) for key in keys[1:]):
            lines.append(f"{', '.join(keys)}: one tensor in the model, several in the files")
    return lines


def _spec(tensor: Tensor, dtype: torch.dtype | None = None) -> str:
    return f"{str(dtype or tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _same(stored: Stored, one: str, other: str) -> bool:
    first, second = (stored.tensor(key).contiguous() for key in (one, other))
    return torch.equal(bytes_of(first), bytes_of(second))


def _report(path: Path, differences: list[str]) -> str:
    shown = differences[:_MOST_SHOWN]
    if len(differences) > len(shown):
        shown.append(f"and {len(differences) - len(shown)} more")
    count = f"{len(differences)} difference" + "s" * (len(differences) > 1)
    return "\n  ".join([f"load_model: model must be the one saved in {path}, got {count}:", *shown])


def export_model(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    step: str,
    max_shard_size: int,
) -> int:
    """Write a checkpoint step's model as `save_model` would; return the number of tensors.

    Cost: one read of the checkpoint to check it, then one of the model, which is held on the host.
    """
    path, prefix = Path(checkpoint), prefix_of("model", step)
    with _named_export():
        manifest = read_manifest(path)
        if step not in manifest.plans:
            names = ", ".join(name or "(no name)" for name in manifest.plans)
            raise CheckpointError(
                f"export: step must be one of {path}, got {step!r}; there are {names}"
            )
        check_sizes(path, manifest)
        with bytes_bar("check", manifest.size) as count:
            check_files(path, manifest, manifest.files, count)
    extra_state = dict_from_plain(path / COMMON, COMMON_KEYS, "export")["steps"][step]["model"]
    for name, value in extra_state.items():
        check_dense("export", name, value)
    tensors = {
        f"{prefix}{name}": torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for name, entry in with_prefix(prefix, manifest.entries).items()
    }
    with bytes_bar("read", sum(each.nbytes for each in tensors.values())) as count:
        read_tensors(path, tensors, manifest.entries, count)
    tied = with_prefix(prefix, manifest.tied)
    entries = Entries(
        with_prefix(prefix, tensors),
        {name: first.removeprefix(prefix) for name, first in tied.items()},
        frozen={name: each.hash for name, each in with_prefix(prefix, manifest.frozen).items()},
    )
    with _named_export():
        check_storable(entries)
    try:
        write_set(Path(folder), entries, max_shard_size)
    except OSError as error:
        rule, reason = "be one that can be written to", error.strerror or str(error)
        raise ArgumentError(message("export", "folder", rule, str(folder), reason)) from error
    return len(tensors)


@contextmanager
def _named_export() -> Iterator[None]:
    """Name `export` in errors of code that `load` and `save_model` share."""
    try:
        yield
    except (ArgumentError, CheckpointError) as error:
        raise type(error)(f"export: {str(error).partition(': ')[2]}") from None
