"""Values of settings, with the source and the line of each."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from accel_fn.errors import SettingsError, message


@dataclass(frozen=True, slots=True)
class Given:
    """One value of one setting, not checked yet."""

    value: object
    source: str
    line: int | None = None

    @property
    def where(self) -> str:
        """The source, with the line if there is one."""
        return self.source if self.line is None else f"{self.source}:{self.line}"

    def becomes(self, value: object) -> Given:
        """The same place with another value."""
        return replace(self, value=value)

    def refuse(self, name: str, rule: str, repair: str = "") -> NoReturn:
        raise SettingsError(message(self.where, name, rule, self.value, repair))


@dataclass(frozen=True, slots=True)
class Layer:
    """The settings of one source."""

    values: Mapping[str, Given]
    accelerators: Given | None = None
    """The value that needs accelerators, if the source does not name them."""
    sagemaker: Given | None = None
    """The value that is for jobs of SageMaker alone."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that was probably meant; empty if none is near."""
    found = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.7)
    return found[0] if found else ""


def check_names(names: Mapping[str, str], known: Iterable[str]) -> None:
    """Refuse unknown names, a line for each; `names` maps each to its place."""
    known = list(known)
    unknown = [
        f"{where}: {_unknown(name, known)}" for name, where in names.items() if name not in known
    ]
    if unknown:
        raise SettingsError("\n".join(unknown))


def _unknown(name: str, known: list[str]) -> str:
    meant = nearest(name, known)
    if meant:
        return f"key must be a setting, got {name}: did you mean {meant}?"
    return f"key must be a setting, got {name}; there are {', '.join(known)}"
