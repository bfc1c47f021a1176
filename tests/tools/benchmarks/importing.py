"""Measures what `import accel_fn` adds to `import torch`, in new interpreters."""

from __future__ import annotations

import compileall
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import accel_fn

_TIMED = """
import time, torch
{before}
start = time.process_time()
import accel_fn
{names}
print((time.process_time() - start) * 1e3)
"""
_OPTIMIZER = "torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)"
"""What every script does, and what makes torch import its compiler, DTensor and FSDP."""
_ALONE = "import sys, accel_fn; print('torch' in sys.modules)"
TARGET_MS = 20.0


@dataclass(frozen=True, slots=True)
class ImportCost:
    """Milliseconds of CPU time on top of `import torch`."""

    package_ms: float
    names_ms: float
    """Of `from accel_fn import *` in a script that has made an optimizer."""
    optimizer_ms: float
    """Of the first optimizer of torch, without accel_fn."""
    brings_torch: bool


def measure_import(rounds: int) -> ImportCost:
    codes = {
        "package": _TIMED.format(before="", names=""),
        "names": _TIMED.format(before=_OPTIMIZER, names="from accel_fn import *"),
        "optimizer": _TIMED.format(before="", names=_OPTIMIZER),
    }
    times: dict[str, list[float]] = {name: [] for name in codes}
    with tempfile.TemporaryDirectory() as folder:
        install_copy(Path(folder))
        for code in codes.values():  # the first run reads the files from the disk
            run(code, folder)
        for _ in range(rounds):
            for name, code in codes.items():
                times[name].append(float(run(code, folder)))
        medians = {name: statistics.median(values) for name, values in times.items()}
        return ImportCost(
            medians["package"],
            medians["names"],
            medians["optimizer"],
            run(_ALONE, folder) == "True",
        )


def install_copy(folder: Path) -> None:
    """Copy the package with its byte code, as pip installs it."""
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(accel_fn.__file__).parent, folder / "accel_fn", ignore=skip)
    compileall.compile_dir(folder, quiet=1)


def run(code: str, path: str) -> str:
    env = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env=env, cwd=path
    ).stdout.strip()
