"""Reads variables of the environment: numbers and texts, refused by their names."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from accel_fn.errors import WorldError

_FIRST_PORT, _NUM_PORTS = 20000, 12000  # below what kernels hand out by themselves


@dataclass(frozen=True, slots=True)
class Variables:
    """The variables that a cluster has set, read for the function that a user has called."""

    function: str
    cluster: str
    values: Mapping[str, str]

    def text(self, *names: str) -> str:
        """Return the first of these variables that is not empty."""
        for name in names:
            if self.values.get(name):
                return self.values[name]
        raise WorldError(f"{self.function}: {self.cluster} must set {' or '.join(names)}, got none")

    def number(self, *names: str, least: int = 0, most: int | None = None) -> int:
        """Return the number in the first of these variables that is not empty."""
        text = self.text(*names)
        name = next(each for each in names if self.values.get(each))
        return read_number(self.function, name, text, least=least, most=most)

    def port(self, name: str) -> int | None:
        """Return the port in this variable; None if it is empty."""
        return self.number(name, least=1, most=65535) if self.values.get(name) else None


def read_number(
    function: str, name: str, text: str, *, least: int = 0, most: int | None = None
) -> int:
    """Return the number that a variable holds; refuse one outside the bounds in the function's name."""
    number = int(text) if text.isdecimal() else -1
    if number < least or (most is not None and number > most):
        bounds = f" >= {least}" if least else ""
        if most is not None:
            bounds = f" from {least} to {most}"
        raise WorldError(f"{function}: {name} must be a number{bounds}, got {text!r}")
    return number


def port_of(job: str) -> int:
    """Return the port of a job's rendezvous: the same on all machines, and another for most jobs."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS
