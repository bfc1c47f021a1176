"""The stores of a rendezvous: one in a file, and one that signs its values on torch's server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from accel_fn.core.signed import signed, verified

_POLL_S = 0.01


class FolderStore(FileStore):
    """Torch's store in a file, whose `wait` raises the same error as the store on a server.

    This store opens no port: the permissions of the folder decide who may read the store.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__(path)
        self._timeout_s = timeout_s
        self.set_timeout(timedelta(seconds=timeout_s))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + timeout_s
        while not self.check([*keys]):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"Wait timeout for {', '.join(keys)}")
            time.sleep(_POLL_S)


class SignedStore(Store):
    """A store that signs each value with the run's token, and refuses values that no rank has signed.

    Torch's server has no password. Strangers who reach it can still read values, delete them, and
    change its counters, which are plain numbers. They cannot forge a value of a rank. A signature
    covers the key too, so a value cannot be moved to another key.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._clones: list[SignedStore] = []

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, _text(key, value))

    def get(self, key: str) -> bytes:
        return _value(key, self._store.get(key))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a value if the present value is the expected one; return the value afterwards."""
        # The server compares the signed values, since equal values of one key have equal
        # signatures.
        before, after = _text(key, expected), _text(key, desired)
        return _value(key, self._store.compare_set(key, before, after))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        found: int = self._store.add(key, amount)
        return found

    def check(self, keys: Sequence[str]) -> bool:
        found: bool = self._store.check([*keys])
        return found

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._store.wait([*keys])
        else:
            self._store.wait([*keys], timeout)

    def delete_key(self, key: str) -> bool:
        found: bool = self._store.delete_key(key)
        return found

    def num_keys(self) -> int:
        found: int = self._store.num_keys()
        return found

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    def clone(self) -> SignedStore:
        # Keep a reference to the clone: torch keeps only the C++ part of it, which needs the Python
        # part.
        self._clones.append(SignedStore(self._store.clone()))
        return self._clones[-1]

    @property
    def served(self) -> Any:
        """Return the store that holds the signed values."""
        return self._store


def _text(key: str, value: Any) -> str:
    """Return a signed value as text; keep an empty value, which means that the key is missing."""
    data = value.encode() if isinstance(value, str) else bytes(value)
    return signed(data, key).hex() if data else ""


def _value(key: str, found: bytes) -> bytes:
    if not found:
        return found
    try:
        data = bytes.fromhex(found.decode())
    except ValueError:
        data = b""
    return verified(data, "init", key)


def address_of(store: Store) -> tuple[str, int] | None:
    """Return the host and port of a store's server; None for a file."""
    served: Any = store
    while isinstance(served, PrefixStore):
        served = served.underlying_store
    if isinstance(served, SignedStore):
        served = served.served
    return (served.host, served.port) if isinstance(served, TCPStore) else None
