"""Find the processors and accelerators of this machine, if possible without an import of torch."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

# ---- processors


@dataclass(frozen=True, slots=True)
class Processors:
    """The processors that this process may run on."""

    cores: int
    """The number of physical cores, at most the quota of the container."""
    nodes: tuple[tuple[int, ...], ...]
    """The processors of each NUMA node."""


def read_processors(root: Path = Path("/"), allowed: Sequence[int] | None = None) -> Processors:
    """Read the machine's processors that are in `allowed` (default: those of this process)."""
    if allowed is None:
        allowed = _allowed()
    cores = {_siblings(root, cpu) for cpu in allowed}
    nodes = [
        tuple(cpu for cpu in allowed if cpu in parse_cpus(path.read_text()))
        for path in sorted((root / "sys/devices/system/node").glob("node*/cpulist"), key=_number)
    ]
    return Processors(
        cores=max(1, math.ceil(min(len(cores), _quota(root)))),
        nodes=tuple(node for node in nodes if node) or (tuple(allowed),),
    )


def _allowed() -> list[int]:
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def parse_cpus(text: str) -> set[int]:
    """Parse the kernel's list of processors.

    >>> from accel_fn.launcher.hardware import parse_cpus
    >>> sorted(parse_cpus("0-3,8"))
    [0, 1, 2, 3, 8]
    """
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def _number(path: Path) -> int:
    return int(path.parent.name.removeprefix("node"))


def _siblings(root: Path, cpu: int) -> str:
    """Return the list of processors that share a core with this one, as Linux writes it."""
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return path.read_text() if path.is_file() else str(cpu)


def _quota(root: Path) -> float:
    """Read how many processors this container may keep busy (cgroup 2); inf without a limit."""
    try:
        limit, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return int(limit) / int(period)
    except (OSError, ValueError):
        # Without a limit, the file holds "max".
        return math.inf


def bind_ranks(processors: Processors, num_local: int) -> tuple[tuple[int, ...], ...] | None:
    """Choose the processors of each local rank; None if there is nothing to choose.

    Each NUMA node gets consecutive ranks. If there are fewer ranks than nodes, each rank gets
    consecutive nodes.
    """
    num_nodes = len(processors.nodes)
    if num_nodes == 1 or num_local == 1:
        return None
    if num_local >= num_nodes:
        return tuple(processors.nodes[rank * num_nodes // num_local] for rank in range(num_local))
    bounds = [rank * num_nodes // num_local for rank in range(num_local + 1)]
    return tuple(
        tuple(cpu for node in processors.nodes[first:last] for cpu in node)
        for first, last in pairwise(bounds)
    )


# ---- accelerators

_DRIVER = Path("/proc/driver/nvidia/gpus")
_HINTS = ("/dev/kfd", "/dev/dri/renderD128", "/dev/davinci0", "/dev/accel/accel0")
"""Device files of makers other than NVIDIA. If one of them exists, torch is imported to count the
devices."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The cores and accelerators that a launch can use. `kind` is empty if there is no accelerator."""

    num_cores: int
    kind: str = ""
    num_installed: int = 0
    num_devices: int = 0
    """The number of installed devices that CUDA_VISIBLE_DEVICES does not hide."""

    @property
    def devices(self) -> str:
        if not self.num_devices:
            return "no accelerator"
        return f"{self.num_devices} {self.kind} device{'s' if self.num_devices > 1 else ''}"


def detect(environment: Mapping[str, str] = os.environ) -> Machine:
    """Detect the cores that this process may use, and the accelerators that torch could use."""
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
    """Return the ids of visible GPUs; `variable` is the value of CUDA_VISIBLE_DEVICES.

    CUDA reads each entry of the variable as an index or as the start of an id. The first entry that
    does not match exactly one GPU ends the list, and a repeated GPU empties it.
    """
    if variable is None:
        return ids
    # With MIG, a process can use only one part of a GPU.
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
    """List the ids of the GPUs that this process may open, as nvidia-smi prints them.

    Without nvidia-smi, list all GPUs of the driver by their PCI addresses.
    """
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
    """Read from torch's version file whether torch was built for CUDA. Torch is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return True
    return re.search(r"^cuda\b[^=]*= *None", text, re.MULTILINE) is None


def _count_by_torch(machine: Machine) -> Machine:
    """Count the accelerators of makers other than NVIDIA, by torch."""
    import torch

    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None:
        return machine
    count = torch.accelerator.device_count()
    return Machine(machine.num_cores, current.type.upper(), count, count)
