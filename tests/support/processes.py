"""Runs scripts on several real processes, as a launcher would start them."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.forked_ranks import ROOT, run_worlds

__all__ = ["ROOT", "free_port", "from_lists", "launch"]


def free_port() -> int:
    """Return a port that is free right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def launch(
    script: str,
    *,
    num_processes: int = 2,
    expect: Sequence[str] = (),
    timeout_s: float = 500,
    imports: tuple[str, ...] = (),
) -> str:
    """Run a script on several processes; the lines that they `say` must be exactly these, in any
    order."""
    with tempfile.TemporaryDirectory() as folder:
        (ranks,) = run_worlds(
            {"script": script},
            Path(folder),
            num_processes=num_processes,
            timeout_s=timeout_s,
            imports=imports,
        ).values()
    said = "".join(rank.stdout for rank in ranks)
    all_said = said + "".join(rank.stderr for rank in ranks)
    assert not any(rank.exit_code for rank in ranks), all_said
    if expect:
        assert sorted(said.splitlines()) == sorted(expect), all_said
    return said


def from_lists(lists: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that a process printed as lists of numbers, by name, in float64."""
    return {name: torch.tensor(each, dtype=torch.float64) for name, each in lists.items()}
