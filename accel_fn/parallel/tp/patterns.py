"""Patterns of module names, in which `*` matches one name between dots."""

from __future__ import annotations

from fnmatch import fnmatchcase


def matches(name: str, pattern: str) -> bool:
    """Return whether each part of the name matches the same part of the pattern."""
    parts, wanted = name.split("."), pattern.split(".")
    # The whole model has an empty name, which `*` does not match.
    if not name or len(parts) != len(wanted):
        return name == pattern
    return all(map(fnmatchcase, parts, wanted))


def starred(name: str) -> str:
    """Return a pattern for the same module in every block: `layers.*.up` for `layers.0.up`."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))
