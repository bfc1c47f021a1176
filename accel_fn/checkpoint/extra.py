"""extra: the error for a library that is not installed names the extra that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accel_fn.errors import ExtraError


@contextmanager
def extra(function: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ExtraError(
            f"{function}: {error.name} must be installed; "
            'in a clone of accel_fn: pip install ".[checkpoint]"',
            name=error.name,
        ) from None
