"""Detect this machine's cores and accelerators, without importing torch if possible."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/gpus")
_HINTS = ("/dev/kfd", "/dev/dri/renderD128", "/dev/davinci0", "/dev/accel/accel0")
"""Devices of other makers: torch is imported to count them if one of these exists."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices that a launch can use. `kind` is empty if there is no accelerator that ranks can share."""

    num_cores: int
    kind: str = ""
    num_installed: int = 0
    num_devices: int = 0
    """Installed devices that CUDA_VISIBLE_DEVICES leaves visible."""

    @property
    def devices(self) -> str:
        if not self.num_devices:
            return "no accelerator"
        return f"{self.num_devices} {self.kind} device{'s' if self.num_devices > 1 else ''}"


def detect(environment: Mapping[str, str] = os.environ) -> Machine:
    """Detect the cores that this process may use, and the accelerators that torch could."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = Machine(num_cores=cores or 1)
    if built_for_cuda():
        listed = list_gpus()
        devices = visible_devices(listed, environment.get("CUDA_VISIBLE_DEVICES"))
        return Machine(machine.num_cores, "CUDA" if listed else "", len(listed), len(devices))
    if any(map(os.path.exists, _HINTS)):
        return _count_by_torch(machine)
    return machine


def visible_devices(ids: list[str], variable: str | None) -> list[str]:
    """Select the GPUs that CUDA shows of those with these ids.

    CUDA reads the variable as indices or starts of ids; the first entry that matches nothing
    ends the list, and a repeated entry empties it.
    """
    if variable is None:
        return ids
    # Of MIG parts, CUDA shows one to a process.
    if variable.startswith("MIG-"):
        return [variable]
    chosen: list[str] = []
    for entry in (each.strip() for each in variable.split(",")):
        if entry.isdecimal():
            found = ids[int(entry) : int(entry) + 1]
        else:
            found = [each for each in ids if entry and each.startswith(entry)]
        if len(found) != 1:
            break
        if found[0] in chosen:
            return []
        chosen += found
    return chosen


def list_gpus() -> list[str]:
    """List the ids of the GPUs that this process may open, by nvidia-smi; else those that the driver has."""
    program = shutil.which("nvidia-smi")
    if program:
        try:
            done = subprocess.run(
                [program, "-L"], capture_output=True, text=True, timeout=20, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return []
        return re.findall(r"^GPU .*\(UUID: (GPU-[^)]+)\)", done.stdout, re.MULTILINE)
    try:
        return [f"GPU-{each.name}" for each in sorted(_DRIVER.iterdir())]
    except OSError:
        return []


def built_for_cuda() -> bool:
    """Was torch built for CUDA? Read from its version file, without an import."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return True
    return re.search(r"^cuda\b[^=]*= *None", text, re.MULTILINE) is None


def _count_by_torch(machine: Machine) -> Machine:
    """Count accelerators of other makers by torch."""
    import torch

    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None:
        return machine
    count = torch.accelerator.device_count()
    return Machine(machine.num_cores, current.type.upper(), count, count)
