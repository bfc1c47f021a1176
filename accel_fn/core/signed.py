"""Sign pickles with the token of the run, if it has one, so that ranks unpickle no forged bytes."""

from __future__ import annotations

import hmac
import os

from accel_fn.errors import WorldError

TOKEN = "ACCEL_FN_TOKEN"  # noqa: S105 - the name of the variable
_SIZE = 32


def run_token() -> bytes:
    """Return the secret that the ranks of this run share; empty if the variable is not set."""
    # Read the variable each time: a process may be in several worlds, and this module has no state.
    return os.environ.get(TOKEN, "").encode()


def signed(data: bytes, about: str = "") -> bytes:
    """Prepend a signature of `about` and the data; without a token, return the data unchanged."""
    token = run_token()
    return _signature(token, about, data) + data if token else data


def verified(data: bytes, function: str, about: str = "") -> bytes:
    """Check and remove the signature of `signed`; raise a WorldError if no rank of this run made it."""
    token = run_token()
    if not token:
        return data
    signature, rest = data[:_SIZE], data[_SIZE:]
    if not hmac.compare_digest(signature, _signature(token, about, rest)):
        raise WorldError(
            f"{function}: ranks must send what they have signed with {TOKEN}, got other bytes; is it the "
            "same on every machine, and does another user reach the ports of this run?"
        )
    return rest


def _signature(token: bytes, about: str, data: bytes) -> bytes:
    return hmac.digest(token, len(about).to_bytes(4, "little") + about.encode() + data, "sha256")
