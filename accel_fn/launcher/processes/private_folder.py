"""The folder of a launch's store: of this user alone, and on a disk or in the memory of this machine."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

from accel_fn.core.signed import TOKEN
from accel_fn.launcher.processes.environment import STORE

_NETWORKS = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gfs2", "glusterfs", "gpfs", "lustre", "nfs"),
    *("ocfs2", "panfs", "smb", "virtiofs", "wekafs"),
)


def parent_of_store(environment: Mapping[str, str]) -> str:
    """Return the folder to make it in: XDG_RUNTIME_DIR, else TMPDIR, unless that is in a network."""
    memory = "/dev/shm"  # noqa: S108 - a folder of mode 0700 is made in it
    for each in (environment.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), memory):
        if each and os.access(each, os.W_OK | os.X_OK) and not _is_in_network(each):
            return each
    return tempfile.gettempdir()


def store_variables(
    folder: Path, attempt: int, port: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables by which the ranks of an attempt find their store, and sign for each other."""
    token = environment.get(TOKEN) or secrets.token_hex(32)
    return {STORE: str(folder / f"store_{attempt}_{port}"), TOKEN: token}


def _is_in_network(folder: str) -> bool:
    """Is the folder on a network file system, whose locks a store should not depend on?"""
    real, found, kind = os.path.realpath(folder), "", ""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return False
    for _, place, name, *_ in map(str.split, mounts):
        is_above = place == "/" or real == place or real.startswith(f"{place}/")
        if is_above and len(place) >= len(found):
            found, kind = place, name
    return kind.startswith(_NETWORKS)
