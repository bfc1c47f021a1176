"""The variables that a rank gets on top of the launcher's, and why."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from accel_fn.core.signed import TOKEN
from accel_fn.launcher.machines.cpus import Processors
from accel_fn.launcher.machines.machines import Machines
from accel_fn.launcher.machines.network import interface_towards
from accel_fn.launcher.settings.settings import Settings

ROLE, STORE = "rank", "ACCEL_FN_STORE"
_MMAP_THRESHOLD, _TRIM_THRESHOLD = 1 << 30, 1 << 32
_OLD_GLIBC_MMAP_THRESHOLD = 1 << 25
"""The largest value that every glibc before 2.36 accepts; one that refuses it maps large tensors again."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable, and why it is set."""

    name: str
    value: str | None
    """None: not known before the start."""
    why: str


def launch_variables(
    settings: Settings,
    machines: Machines,
    processors: Processors,
    environment: Mapping[str, str],
) -> list[Variable]:
    """Variables that are the same for all ranks of a machine."""
    return [
        threads_variable(settings, machines, processors, environment),
        *_allocator(environment),
        *settings_variables(settings),
        *_network(machines, environment),
    ]


def threads_variable(
    settings: Settings, machines: Machines, processors: Processors, environment: Mapping[str, str]
) -> Variable:
    """The threads of each rank: those of the setting, else of the variable, else a share of the cores."""
    name, threads = "OMP_NUM_THREADS", settings.threads_per_process
    if threads is not None:
        return Variable(name, str(threads), "threads_per_process")
    if environment.get(name):
        return Variable(name, environment[name], "set already")
    each = max(1, processors.cores // machines.num_local)
    why = f"cores: {processors.cores}, processes here: {machines.num_local}"
    return Variable(name, str(each), why)


def _allocator(environment: Mapping[str, str]) -> Iterator[Variable]:
    """Make glibc keep freed memory."""
    # By default it returns large tensors to the system at once, and each step faults them in again.
    version = glibc_version()
    if version is None or "malloc" in environment.get("LD_PRELOAD", ""):
        return
    mmap = _MMAP_THRESHOLD if version >= (2, 36) else _OLD_GLIBC_MMAP_THRESHOLD
    for name, value in (
        ("MALLOC_MMAP_THRESHOLD_", mmap),
        ("MALLOC_TRIM_THRESHOLD_", _TRIM_THRESHOLD),
    ):
        if environment.get(name):
            yield Variable(name, environment[name], "set already")
        else:
            yield Variable(name, str(value), "freed memory is used again, not given back")


def glibc_version() -> tuple[int, int] | None:
    """The version of the GNU C library of this process; None if it has another."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        major, minor, *_ = version.split(".")
        return (int(major), int(minor)) if name == "glibc" else None
    except (ValueError, OSError, AttributeError):
        return None


def settings_variables(settings: Settings) -> list[Variable]:
    """Variables that hold settings, on any machine."""
    found = [Variable("ACCEL_FN_DEVICE", "cpu", "cpu")] if settings.cpu else []
    if settings.gpu_ids is not None:
        ids = ",".join(map(str, settings.gpu_ids))
        found.append(Variable("CUDA_VISIBLE_DEVICES", ids, "gpu_ids"))
    for name in ("mixed_precision", "num_microbatches", "wrap", "timeout_s", "mesh"):
        value = getattr(settings, name)
        if value is not None:
            found.append(Variable(f"ACCEL_FN_{name.upper()}", f"{value}", name))
    return found


def _network(machines: Machines, environment: Mapping[str, str]) -> Iterator[Variable]:
    """The store of torch's rendezvous, and Gloo's interface."""
    # Torch would give the ranks of a restart the store that those before them wrote to.
    if machines.backend != "static":
        why = "a new store for each attempt"
        yield Variable("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1", why)
    if machines.num_machines == 1:
        return
    # Gloo would use the address of the host's name, which often is a loopback one.
    name = "GLOO_SOCKET_IFNAME"
    if environment.get(name):
        yield Variable(name, environment[name], "set already")
    elif interface := interface_towards(machines.host):
        yield Variable(name, interface, f"the way to {machines.host}")


def rank_variables(
    machines: Machines, local_rank: int, max_restarts: int, environment: Mapping[str, str]
) -> list[Variable]:
    """Variables that torch's agent sets for a rank at the first attempt, if known before the start."""
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
        (
            "TORCHELASTIC_USE_AGENT_STORE",
            machines.backend == "static" and machines.num_machines > 1,
            "if the launcher serves MASTER_PORT",
        ),
        ("TORCHELASTIC_ERROR_FILE", None, "where a rank writes what ended it"),
        (nccl, environment.get(nccl, 1), "torch's agent"),
    ]
    if machines.backend == "static" and machines.num_machines == 1:
        found += [
            (STORE, None, "a file of this user alone, in which the ranks meet"),
            (TOKEN, None, "ranks sign what they pickle for each other"),
        ]
    return [
        Variable(name, None if value is None else str(value), why) for name, value, why in found
    ]
