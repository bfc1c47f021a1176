"""Unpickles what another rank has pickled: its tensors come to the device of this rank."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


def unpickled(data: bytes, device: torch.device) -> Any:
    """Restore a value whose tensors on an accelerator go to `device`, and all others to the host."""
    return _Unpickler(data, device).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, device: torch.device) -> None:
        super().__init__(io.BytesIO(data))
        self._device = str(device)

    def find_class(self, module: str, name: str) -> Any:
        # A pickled tensor holds its storage as bytes beside the name of a device. torch would put it
        # there again, so every rank would have memory, and a context, on the device of the sender.
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return self._storage
        return super().find_class(module, name)

    def _storage(self, data: bytes) -> Any:
        return torch.load(io.BytesIO(data), map_location=self._placed, weights_only=False)

    def _placed(self, storage: Any, location: str) -> Any:
        if location == "cpu":
            return storage
        return torch.serialization.default_restore_location(storage, self._device)  # type: ignore[no-untyped-call]
