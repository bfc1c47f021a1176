"""Write and read the files of a model's weights, in which tied names share a tensor."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path, PureWindowsPath
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from accel_fn.checkpoint.files import memory_of, sync, write_all
from accel_fn.checkpoint.names import rename
from accel_fn.checkpoint.run_state import is_expanded, split_tied, view_key
from accel_fn.core.dtensor import is_sharded, local
from accel_fn.core.plan import unwrapped
from accel_fn.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointWriteError,
    check_folder,
    message,
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TIED = "accel_fn.tied"
"""The key of a file's metadata that lists the other names of its tensors."""
FROZEN = "accel_fn.frozen"
"""The key of a file's metadata that lists the omitted parameters with their hashes."""
_WRITTEN_HERE = re.compile(
    r"model(\.new-[0-9a-f]{8})?\.safetensors"
    r"|model-\d{5,}-of-\d{5,}(\.new-[0-9a-f]{8})?\.safetensors"
    r"|model\.safetensors\.index(\.new-[0-9a-f]{8})?\.json"
    r"|model\.new-[0-9a-f]{8}-\d{5,}\.(json|half)"
)


@dataclass(frozen=True, slots=True)
class Entries:
    """The tensors of a module, each under its first name, and the other names of tied ones."""

    tensors: Mapping[str, Tensor]
    tied: Mapping[str, str]
    """A map from another name of a tied tensor to the tensor's first name."""
    dtype: torch.dtype | None = None
    """The dtype in which floating-point tensors are written. None: the dtype of each tensor."""
    frozen: Mapping[str, str] = field(default_factory=dict)
    """A map from the name of an omitted parameter to the hash of its bytes."""

    def written_dtype(self, name: str) -> torch.dtype:
        own = self.tensors[name].dtype
        return self.dtype if self.dtype is not None and own.is_floating_point else own

    def num_bytes(self, name: str) -> int:
        return self.tensors[name].numel() * self.written_dtype(name).itemsize

    def names_of(self, first: str) -> list[str]:
        return [first, *(name for name, other in self.tied.items() if other == first)]


def folder_of_set(function: str, folder: str | os.PathLike[str]) -> Path:
    """Return the path of the folder of a set of files, which need not exist."""
    path = check_folder(function, folder)
    if path.exists() and not path.is_dir():
        raise ArgumentError(message(function, "folder", "be the path of a folder", str(path)))
    return path


def read_entries(function: str, model: nn.Module) -> Entries:
    """Collect the persistent tensors of a module in its form before wrapping and compiling."""
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(message(function, "model", "be a torch.nn.Module", model))
    plain = unwrapped(model)
    saved = plain.state_dict()
    for name, value in saved.items():
        check_dense(function, name, value)
    tensors, tied = split_tied(saved, plain)
    _check_disjoint(function, {name: local(tensor) for name, tensor in tensors.items()})
    return Entries({name: tensor.detach() for name, tensor in tensors.items()}, tied)


def check_dense(function: str, name: str, value: object) -> None:
    """Refuse an entry of a `state_dict` that safetensors files cannot hold."""
    if name == "__metadata__":
        # A safetensors file stores its metadata under this name.
        raise _model_refusal(function, "not use that name", name, "a tensor")
    if not isinstance(value, Tensor):
        kind = f"a {type(value).__name__}"
        raise _model_refusal(function, "hold nothing but tensors in state_dict", name, kind)
    if nn.parameter.is_lazy(value):
        raise _model_refusal(function, "hold values", name, "a parameter without a shape")
    value = local(value)
    if value.layout is not torch.strided or hasattr(value, "__tensor_flatten__"):
        kind = f"a {type(value).__name__} of layout {value.layout}"
        raise _model_refusal(function, "hold dense tensors", name, kind)
    if value.is_meta:
        refused = _model_refusal(function, "hold values", name, "a tensor on the meta device")
        raise ArgumentError(f"{refused}; call it after build with wrap_fsdp or wrap_tp")


def check_storable(entries: Entries) -> None:
    for name, tensor in entries.tensors.items():
        dtype = entries.written_dtype(name)
        if _code_of(dtype, is_number=not tensor.ndim) is None:
            rule = "hold tensors of the dtypes that safetensors knows"
            raise _model_refusal("save_model", rule, name, dtype)


def check_writable(model: nn.Module, entries: Entries) -> None:
    plain = unwrapped(model)
    own = {view_key(tensor) for tensor in [*plain.parameters(), *plain.buffers()]}
    for name, tensor in entries.tensors.items():
        if tensor.numel() and view_key(tensor) not in own:
            rule = "give its own parameters and buffers in state_dict, no copies"
            raise _model_refusal("load_model", rule, name, "a copy")
        if is_expanded(tensor):
            rule = "hold tensors that can be written, none that was expanded"
            raise _model_refusal("load_model", rule, name, f"strides {tensor.stride()}")


def _model_refusal(function: str, rule: str, name: str, found: object) -> ArgumentError:
    return ArgumentError(f"{function}: model must {rule}, got {found} for {name!r}")


@cache
def _code_of(dtype: torch.dtype, *, is_number: bool) -> tuple[str, list[int]] | None:
    """Return a dtype's name in safetensors, and the shape that one element has there, or None."""
    try:
        data = save({"": torch.empty(() if is_number else 1, dtype=dtype)})
    except Exception:
        # safetensors raises errors of different classes in different versions.
        return None
    entry = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])[""]
    return entry["dtype"], entry["shape"]


def _code_and_shape(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, list[int]]:
    found = _code_of(dtype, is_number=not shape)
    assert found is not None
    code, one = found
    # safetensors counts two elements of float4 where torch counts one.
    return code, [*shape[:-1], shape[-1] * one[0]] if shape else []


def _check_disjoint(function: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that overlap in memory. `tensors` holds a tied tensor once, by its first name."""
    spans = sorted(
        (str(each.device), *_span(each), name) for name, each in tensors.items() if each.numel()
    )
    for (device, _, end, name), (other_device, start, _, other) in pairwise(spans):
        if device == other_device and start < end:
            rule = "hold tensors that are one or do not overlap in memory"
            pair = f"{name!r} and {other!r}, which overlap"
            raise ArgumentError(f"{function}: model must {rule}, got {pair}; clone one of them")


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first element, and that of the end of its last."""
    steps = ((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (1 + sum(steps)) * tensor.itemsize


# -- writing


class NewSet:
    """A set of files that is being written, under spare names until `commit`."""

    def __init__(
        self, folder: Path, entries: Entries, shards: Sequence[Sequence[str]], token: str
    ) -> None:
        self.folder, self.entries = folder, entries
        self._shards, self._token, count = shards, token, len(shards)
        names = [f"model-{at:05d}-of-{count:05d}.safetensors" for at in range(1, count + 1)]
        self._names = [SINGLE] if count == 1 else names
        self._spares = [_spare(name, token) for name in self._names]

    @property
    def num_files(self) -> int:
        return len(self._names)

    def num_bytes(self) -> int:
        return sum(map(self.entries.num_bytes, self.entries.tensors))

    def order(self) -> Iterator[tuple[int, str]]:
        """Yield the number of the file and the key of each tensor, in the order of the files."""
        for place, shard in enumerate(self._shards):
            for key in self._in_file(shard):
                yield place, key

    def prepared(self, key: str) -> Tensor:
        """Return a tensor in the dtype that the files use for it."""
        tensor = self.entries.tensors[key]
        if not is_sharded(tensor):
            tensor = tensor.as_subclass(Tensor).resolve_conj().resolve_neg()
        return tensor.to(self.entries.written_dtype(key))

    def write(self, places: Iterable[int], values: Iterator[Tensor]) -> None:
        """Write these files; `values` yields their tensors in order."""
        for place in places:
            path = self.folder / self._spares[place]
            keys = self._in_file(self._shards[place])
            try:
                with path.open("xb", buffering=0) as file:
                    write_all(file, memoryview(self._header(keys)))
                    for _ in keys:
                        write_all(file, memory_of(next(values).cpu().contiguous()))
            except OSError as error:
                rule = f"save_model: {path} could not be written: {error}"
                raise CheckpointWriteError(rule) from error

    def sync(self, places: Iterable[int]) -> None:
        """Wait until these files are on the disk."""
        for place in places:
            sync(self.folder / self._spares[place])

    def acknowledgement(self, rank: int) -> Path:
        """Return the path of the file by which a rank reports that it has written."""
        return self.folder / f"model.new-{self._token}-{rank:05d}.json"

    def discard(self, places: Iterable[int] | None = None) -> None:
        """Remove files of this set that still have spare names, by default all."""
        for place in range(self.num_files) if places is None else places:
            (self.folder / self._spares[place]).unlink(missing_ok=True)

    def commit(self) -> None:
        """Rename the files when all are on the disk; remove the files of earlier sets.

        At no time does an index list the shards of another set.
        """
        folder = self.folder
        sync(folder)
        if self.num_files == 1:
            rename(folder / self._spares[0], folder / SINGLE)
            sync(folder)
            _remove_others(folder, {SINGLE})
            return
        place: Callable[[Path, Path], None] = rename
        # Files of an earlier set may have the same names. Then the index lists the spare names
        # until these files are replaced.
        if (folder / INDEX).exists() and any((folder / name).exists() for name in self._names):
            self._put_index(self._spares)
            place = _put_copy
        for spare, name in zip(self._spares, self._names, strict=True):
            place(folder / spare, folder / name)
        sync(folder)
        self._put_index(self._names)
        _remove_others(folder, {INDEX, *self._names})

    def _in_file(self, keys: Iterable[str]) -> list[str]:
        """Sort keys by the size of an element, largest first, which aligns tensors, and then by name."""
        return sorted(keys, key=lambda key: (-self.entries.written_dtype(key).itemsize, key))

    def _header(self, keys: Sequence[str]) -> bytes:
        entries = self.entries
        own = set(keys)
        tied = {name: first for name, first in entries.tied.items() if first in own}
        listed = {TIED: tied, FROZEN: entries.frozen}
        notes = {"format": "pt"} | {key: json.dumps(each) for key, each in listed.items() if each}
        header: dict[str, object] = {"__metadata__": notes}
        start = 0
        for key in keys:
            end = start + entries.num_bytes(key)
            code, shape = _code_and_shape(entries.written_dtype(key), entries.tensors[key].shape)
            header[key] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
            start = end
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def _put_index(self, files: Sequence[str]) -> None:
        spare = self.folder / _spare(INDEX, secrets.token_hex(4))
        pairs = zip(self._shards, files, strict=True)
        places = {key: name for keys, name in pairs for key in keys}
        content = {"metadata": {"total_size": self.num_bytes()}, "weight_map": places}
        spare.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        sync(spare)
        rename(spare, self.folder / INDEX)
        sync(self.folder)


def new_token() -> str:
    """Return a text for the spare names of one set."""
    return secrets.token_hex(4)


def probe_of(token: str) -> str:
    """Return the name of an empty file, with which ranks find out whether all see the same folder."""
    return _spare(SINGLE, token)


def split(entries: Entries, limit: int) -> list[list[str]]:
    """Divide the keys among files of at most `limit` bytes; a larger tensor gets a file for itself."""
    shards: list[list[str]] = [[]]
    size = 0
    for key in entries.tensors:
        num_bytes = entries.num_bytes(key)
        if shards[-1] and size + num_bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(key)
        size += num_bytes
    return shards


def _spare(name: str, token: str) -> str:
    stem, _, kind = name.rpartition(".")
    return f"{stem}.new-{token}.{kind}"


def _put_copy(new: Path, path: Path) -> None:
    """Put a file at a second path, atomically: by a link, or by a copy if links do not work."""
    spare = path.with_name(_spare(path.name, secrets.token_hex(4)))
    try:
        os.link(new, spare)
    except OSError:
        shutil.copy(new, spare)
        sync(spare)
    rename(spare, path)


def _remove_others(folder: Path, kept: set[str]) -> None:
    """Remove the files of earlier sets. Readers would read an old single file instead of a new index."""
    for path in list(folder.iterdir()):
        if _WRITTEN_HERE.fullmatch(path.name) and path.name not in kept:
            path.unlink()
    sync(folder)


# -- reading


@dataclass(frozen=True, slots=True)
class Stored:
    """The opened files of a set. Their lists of names are checked; no tensor is read yet."""

    handles: Mapping[str, Any]
    """A map from a tensor's key to the open file that holds the tensor."""
    keys: Mapping[str, str]
    """A map from a tensor's key to its name in that file, which differs if keys were renamed."""
    tied: Mapping[str, str]
    """A map from another name of a tied tensor to the key that holds its value."""
    frozen: Mapping[str, str]
    """A map from an omitted parameter to the hash of its bytes."""

    def key_of(self, name: str) -> str | None:
        return name if name in self.handles else self.tied.get(name)

    def tensor(self, key: str) -> Tensor:
        """Map a tensor [...] from its file into memory; bytes are read when they are used."""
        return cast("Tensor", self.handles[key].get_tensor(self.keys[key]))

    def renamed(self, rename: Callable[[str], str | None]) -> Stored:
        """Return the same set with renamed tensors, without tensors whose new name is None."""
        names: dict[str, str] = {}
        olds: dict[str, str] = {}
        for name in [*self.handles, *self.tied, *self.frozen]:
            new = rename(name)
            if new is None:
                continue
            names[name] = new
            if not isinstance(new, str):
                rule = f"return the name of {name!r} in the model, or None to leave it out"
                raise ArgumentTypeError(message("load_model", "rename", rule, new))
            if olds.setdefault(new, name) != name:
                rule = f"return different names for {olds[new]!r} and {name!r}"
                raise ArgumentError(message("load_model", "rename", rule, new))
        for name, first in self.tied.items():
            if name in names and first not in names:
                rule = f"leave out {name!r}, too, which the files tie to {first!r}"
                raise ArgumentError(message("load_model", "rename", rule, names[name]))
        return Stored(
            {names[key]: file for key, file in self.handles.items() if key in names},
            {names[key]: name for key, name in self.keys.items() if key in names},
            {names[name]: names[first] for name, first in self.tied.items() if name in names},
            {names[name]: each for name, each in self.frozen.items() if name in names},
        )


def open_set(folder: Path, stack: ExitStack) -> Stored:
    """Open the set in a folder, which another program may have written."""
    if (folder / SINGLE).exists():
        return _stored(folder, {SINGLE: _open(folder, SINGLE, stack)})
    if not (folder / INDEX).is_file():
        raise _refusal(folder, f"hold {SINGLE} or {INDEX}", "neither")
    before = _identity(folder / INDEX)
    index = _read_index(folder)
    files = {name: _open(folder, name, stack) for name in sorted(set(index.values()))}
    if _identity(folder / INDEX) != before:
        # A changed index means that `save_model` may be replacing the shards: it replaces the index
        # first.
        raise _refusal(folder, "stay as it is while it is read", "a new set; load again")
    stored = _stored(folder, files)
    for key, name in index.items():
        if stored.handles.get(key) is not files[name]:
            raise _refusal(folder / INDEX, "name the file that holds each key", (key, name))
    for key in stored.handles:
        if key not in index:
            raise _refusal(folder / INDEX, "list every key of its files", f"no {key!r}")
    return stored


def _refusal(path: Path, rule: str, found: object) -> ArgumentError:
    found = found if isinstance(found, str) else repr(found)
    return ArgumentError(f"load_model: {path} must {rule}, got {found}")


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def _read_index(folder: Path) -> dict[str, str]:
    path = _inside(folder, INDEX)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _refusal(path, "be JSON", f"{type(error).__name__}: {error}") from error
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict):
        raise _refusal(path, "have a weight_map from keys to file names", files)
    for key, name in files.items():
        if not isinstance(name, str) or not _is_plain(name):
            rule = "name .safetensors files beside it, without any path"
            raise _refusal(path, rule, f"{name!r} for {key!r}")
    return files


def _is_plain(name: str) -> bool:
    # `PureWindowsPath` splits at \ and at /.
    plain = name == PureWindowsPath(name).name
    return plain and name.endswith(".safetensors") and name.isprintable()


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a file; refuse a link that leads out of its folder."""
    real, home = Path(os.path.realpath(folder / name)), Path(os.path.realpath(folder))
    homes = [home]
    if home.parent.name == "snapshots":
        # In the hub's cache, snapshots link to files in blobs.
        homes.append(home.parent.parent / "blobs")
    if real.parent not in homes:
        raise _refusal(folder / name, "be a file of its folder", f"a link to {real}")
    if not real.is_file():
        raise _refusal(folder / name, "be a file", "none")
    return folder / name


def _open(folder: Path, name: str, stack: ExitStack) -> Any:
    path = _inside(folder, name)
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise _refusal(path, "be a whole safetensors file", str(error)) from error


def _stored(folder: Path, files: Mapping[str, Any]) -> Stored:
    handles: dict[str, Any] = {}
    tied: dict[str, str] = {}
    frozen: dict[str, str] = {}
    for name, file in files.items():
        keys = set(file.keys())
        twice = sorted(keys & handles.keys())
        if twice:
            raise _refusal(folder / name, "hold no key of another file", twice[0])
        handles.update(dict.fromkeys(file.keys(), file))
        path, rule = folder / name, f"tie names to its own keys in {TIED}"
        tied |= _listed(path, file, TIED, rule, keys.__contains__)
        frozen |= _listed(path, file, FROZEN, f"list a hash of each parameter in {FROZEN}", bool)
    for name in sorted(tied.keys() & handles.keys()):
        raise _refusal(folder, "hold a tied name once", f"{name!r} as a tensor too")
    return Stored(handles, {key: key for key in handles}, tied, frozen)


def _listed(
    path: Path, file: Any, key: str, rule: str, fits: Callable[[str], bool]
) -> dict[str, str]:
    """Read a map of names to texts from a file's metadata; raise if `fits` is false for a text."""
    text = (file.metadata() or {}).get(key, "{}")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(
        isinstance(each, str) and fits(each) for each in found.values()
    ):
        raise _refusal(path, rule, text)
    return found
