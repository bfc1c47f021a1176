"""The variables that a rank gets on top of the launcher's own, and why."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from accel_fn.launcher.machines.cpus import Processors
from accel_fn.launcher.machines.machines import Machines
from accel_fn.launcher.machines.network import interface_towards
from accel_fn.launcher.settings.settings import Settings

ROLE = "rank"
_MMAP_THRESHOLD, _TRIM_THRESHOLD = 1 << 30, 1 << 32
_OLD_GLIBC_MMAP_THRESHOLD = 1 << 25
"""The most that a glibc before 2.36 is sure to take. One that refuses it maps each large tensor anew."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable, and why it is set; `kept` where the user had set it already."""

    name: str
    value: str | None
    """None: only the start will tell."""
    why: str
    kept: bool = False


def launch_variables(
    settings: Settings,
    machines: Machines,
    processors: Processors,
    environment: Mapping[str, str],
) -> list[Variable]:
    """What all ranks of a machine get alike."""
    return [
        *_threads(settings, machines, processors, environment),
        *_allocator(environment),
        *settings_variables(settings),
        *_network(machines, environment),
    ]


def _threads(
    settings: Settings, machines: Machines, processors: Processors, environment: Mapping[str, str]
) -> Iterator[Variable]:
    name, asked = "OMP_NUM_THREADS", settings.threads_per_process
    if asked is not None:
        yield Variable(name, str(asked), "threads_per_process")
    elif environment.get(name):
        yield Variable(name, environment[name], "set already", kept=True)
    else:
        each = max(1, processors.cores // machines.num_local)
        why = f"cores: {processors.cores}, processes here: {machines.num_local}"
        yield Variable(name, str(each), why)


def _allocator(environment: Mapping[str, str]) -> Iterator[Variable]:
    """Glibc gives freed memory back at once, and each step faults it in again: have it keep some."""
    version = glibc_version()
    if version is None or "malloc" in environment.get("LD_PRELOAD", ""):
        return
    mmap = _MMAP_THRESHOLD if version >= (2, 36) else _OLD_GLIBC_MMAP_THRESHOLD
    for name, value in (
        ("MALLOC_MMAP_THRESHOLD_", mmap),
        ("MALLOC_TRIM_THRESHOLD_", _TRIM_THRESHOLD),
    ):
        if environment.get(name):
            yield Variable(name, environment[name], "set already", kept=True)
        else:
            yield Variable(name, str(value), "freed memory is used again, not given back")


def glibc_version() -> tuple[int, int] | None:
    """The version of the GNU C library that this process runs on; None on another."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        major, minor, *_ = version.split(".")
        return (int(major), int(minor)) if name == "glibc" else None
    except (ValueError, OSError, AttributeError):
        return None


def settings_variables(settings: Settings) -> list[Variable]:
    """Those by which the settings alone are told to a rank, on any machine."""
    return [*_devices(settings), *_training(settings)]


def _devices(settings: Settings) -> Iterator[Variable]:
    if settings.cpu:
        yield Variable("ACCEL_FN_DEVICE", "cpu", "cpu")
    if settings.gpu_ids is not None:
        yield Variable("CUDA_VISIBLE_DEVICES", ",".join(map(str, settings.gpu_ids)), "gpu_ids")


def _training(settings: Settings) -> Iterator[Variable]:
    for name in ("mixed_precision", "num_microbatches", "wrap", "timeout_s"):
        value = getattr(settings, name)
        if value is not None:
            yield Variable(f"ACCEL_FN_{name.upper()}", f"{value}", name)


def _network(machines: Machines, environment: Mapping[str, str]) -> Iterator[Variable]:
    """Gloo would ask the machine's own name for an address, which often is a loopback one.

    Torch's rendezvous would give the ranks of a new attempt the store of those before.
    """
    if machines.backend != "static":
        why = "a new store for each attempt"
        yield Variable("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1", why)
    if machines.num_machines == 1:
        return
    name = "GLOO_SOCKET_IFNAME"
    if environment.get(name):
        yield Variable(name, environment[name], "set already", kept=True)
    elif interface := interface_towards(machines.host):
        yield Variable(name, interface, f"the way to {machines.host}")


def rank_variables(
    machines: Machines, local_rank: int, max_restarts: int, environment: Mapping[str, str]
) -> list[Variable]:
    """What torch's agent gives one rank at the first attempt, as far as it is known before."""
    machine = machines.machine_rank
    num_local, world_size = machines.num_local, machines.num_processes
    rank = None if machine is None else machine * num_local + local_rank
    nccl = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    found: list[tuple[str, object, str]] = [
        ("RANK", rank, "this process, among all"),
        ("LOCAL_RANK", local_rank, "among those of this machine"),
        ("WORLD_SIZE", world_size, machines.why["num_processes"]),
        ("LOCAL_WORLD_SIZE", num_local, "processes of this machine"),
        ("GROUP_RANK", machine, "this machine"),
        ("GROUP_WORLD_SIZE", machines.num_machines, machines.why["num_machines"]),
        ("ROLE_NAME", ROLE, "all processes do the same"),
        ("ROLE_RANK", rank, "as RANK"),
        ("ROLE_WORLD_SIZE", world_size, "as WORLD_SIZE"),
        ("MASTER_ADDR", machines.host, machines.why["host"]),
        ("MASTER_PORT", machines.port or None, machines.why["port"]),
        ("TORCHELASTIC_RUN_ID", machines.job, "this run"),
        ("TORCHELASTIC_RESTART_COUNT", 0, "failures so far"),
        ("TORCHELASTIC_MAX_RESTARTS", max_restarts, "max_restarts"),
        ("TORCHELASTIC_USE_AGENT_STORE", machines.backend == "static", "who serves MASTER_PORT"),
        ("TORCHELASTIC_ERROR_FILE", None, "where a rank writes what ended it"),
        (nccl, environment.get(nccl, 1), "torch's agent"),
    ]
    return [
        Variable(name, None if value is None else str(value), why) for name, value, why in found
    ]
