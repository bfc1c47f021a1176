"""Plan a launch on this machine: check the command, choose processors and variables of its ranks."""

from __future__ import annotations

import difflib
import os
import pkgutil
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from accel_fn.core.mesh_axes import mesh_shape
from accel_fn.core.signed import TOKEN
from accel_fn.errors import ArgumentError, WorldError, message
from accel_fn.launcher.hardware import Processors, bind_ranks, detect, read_processors
from accel_fn.launcher.machines import Machines, interface_towards, place
from accel_fn.launcher.settings import Resolved, Settings
from accel_fn.parallel.launch_options import parse_mesh

Kind = Literal["script", "module", "program"]


@dataclass(frozen=True, slots=True)
class Command:
    """A script, module or program to run, and its arguments."""

    kind: Kind
    target: str
    arguments: Sequence[str]

    def command_line(self) -> list[str]:
        """Return the command line that runs the program without a launcher."""
        start = {"script": ["python"], "module": ["python", "-m"], "program": []}[self.kind]
        return [*start, self.target, *self.arguments]


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The command, settings, machines, variables and processors of a launch, before its start."""

    command: Command
    settings: Settings
    machines: Machines
    variables: Sequence[Variable]
    """The variables that are equal for all ranks of this machine."""
    cpus: Sequence[Sequence[int]] | None
    """The processors to which each local rank is bound; None if ranks may use all of them."""


def plan_launch(
    resolved: Resolved,
    kind: Kind,
    target: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] = os.environ,
) -> LaunchPlan:
    """Plan a launch on this machine without starting it; raise the errors that are known already."""
    _CHECKS[kind](target)
    check_temporary_folder()
    settings, machines = resolved.settings, place(resolved, environment)
    check_mesh(settings, machines.num_processes)
    processors = read_processors()
    return LaunchPlan(
        command=Command(kind, target, arguments),
        settings=settings,
        machines=machines,
        variables=launch_variables(settings, machines, processors, environment),
        cpus=choose_processors(settings, processors, machines.num_local, environment),
    )


def check_mesh(settings: Settings, num_processes: int) -> None:
    """Refuse a mesh that `num_processes` ranks cannot form, before they start."""
    if settings.mesh is not None:
        mesh_shape("launch", parse_mesh("launch", "mesh", settings.mesh), num_processes)


def choose_processors(
    settings: Settings, processors: Processors, num_local: int, environment: Mapping[str, str]
) -> Sequence[Sequence[int]] | None:
    """Choose the processors of each local rank; None leaves them to the system."""
    cpus = bind_ranks(processors, num_local)
    # Do not bind ranks with accelerators: a rank should run near its accelerator, and only the
    # driver knows which processors are near.
    has_choice = cpus and (settings.cpu or not detect(environment).num_devices)
    return cpus if has_choice else None


def check_temporary_folder() -> None:
    """Refuse a machine on which no temporary file can be made."""
    # Ranks record their errors in the temporary folder. Without it, the launcher could not report
    # why they failed.
    try:
        tempfile.TemporaryFile().close()
    except OSError as error:
        raise WorldError(
            f"launch: temporary folder must be one to write to, got: {error}; set TMPDIR"
        ) from None


def _check_script(target: str) -> None:
    path = Path(target)
    if path.is_file() or (path / "__main__.py").is_file():
        return
    folder = path.parent if path.parent.is_dir() else Path()
    names = [each.name for each in folder.iterdir() if each.suffix == ".py"]
    near = difflib.get_close_matches(path.name, names, n=1)
    repair = f"did you mean {folder / near[0]}?" if near else "use -m for a module"
    raise ArgumentError(message("launch", "script", "be a file", target, repair))


def _check_module(target: str) -> None:
    """Check only that the outermost package exists: a search for its submodule would import it."""
    first, places = target.partition(".")[0], [os.getcwd(), *sys.path]
    if PathFinder.find_spec(first, places) or (first and find_spec(first)):
        return
    near = difflib.get_close_matches(
        first, [each.name for each in pkgutil.iter_modules(places)], n=1
    )
    repair = (
        f"did you mean {near[0]}?" if near else "it is looked for here, then where python looks"
    )
    raise ArgumentError(message("launch", "module", "be one that is found", target, repair))


def _check_program(target: str) -> None:
    if shutil.which(target) is None:
        rule = "be one that is found and may be run"
        raise ArgumentError(message("launch", "program", rule, target))


_CHECKS = {"script": _check_script, "module": _check_module, "program": _check_program}
"""The check for each kind of command, which refuses a target that does not exist."""


# ---- variables of ranks

ROLE, STORE = "rank", "ACCEL_FN_STORE"
_MMAP_THRESHOLD, _TRIM_THRESHOLD = 1 << 30, 1 << 32
_OLD_GLIBC_MMAP_THRESHOLD = 1 << 25
"""The largest threshold that glibc accepts before version 2.36. These versions ignore a larger
one."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable, and the reason why it is set."""

    name: str
    value: str | None
    """The value; None if it is not known before the start."""
    why: str


def launch_variables(
    settings: Settings,
    machines: Machines,
    processors: Processors,
    environment: Mapping[str, str],
) -> list[Variable]:
    """Return the variables that are equal for all ranks of a machine."""
    return [
        threads_variable(settings, machines, processors, environment),
        *_allocator(environment),
        *settings_variables(settings),
        *_network(machines, environment),
    ]


def threads_variable(
    settings: Settings, machines: Machines, processors: Processors, environment: Mapping[str, str]
) -> Variable:
    """Return OMP_NUM_THREADS for a rank: the setting, else the set value, else its share of the cores."""
    name, threads = "OMP_NUM_THREADS", settings.threads_per_process
    if threads is not None:
        return Variable(name, str(threads), "threads_per_process")
    if environment.get(name):
        return Variable(name, environment[name], "set already")
    each = max(1, processors.cores // machines.num_local)
    why = f"cores: {processors.cores}, processes here: {machines.num_local}"
    return Variable(name, str(each), why)


def _allocator(environment: Mapping[str, str]) -> Iterator[Variable]:
    """Yield the variables that make glibc keep freed memory for the next step."""
    # By default, glibc returns the memory of a large tensor to the system when the tensor is freed,
    # and each step pays for page faults to get it back.
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
    """Return the version of the GNU C library of this process; None if it has another library."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        major, minor, *_ = version.split(".")
        return (int(major), int(minor)) if name == "glibc" else None
    except (ValueError, OSError, AttributeError):
        return None


def settings_variables(settings: Settings) -> list[Variable]:
    """Return the variables through which ranks get the settings of the launch."""
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
    """Yield the variables for the store of torch's rendezvous and the network interface of Gloo."""
    # By default, torch gives restarted ranks the store of the previous attempt, with its old keys.
    if machines.backend != "static":
        why = "a new store for each attempt"
        yield Variable("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1", why)
    if machines.num_machines == 1:
        return
    # By default, Gloo uses the address to which the host's own name resolves, often a loopback
    # address.
    name = "GLOO_SOCKET_IFNAME"
    if environment.get(name):
        yield Variable(name, environment[name], "set already")
    elif interface := interface_towards(machines.host):
        yield Variable(name, interface, f"the way to {machines.host}")


def rank_variables(
    machines: Machines, local_rank: int, max_restarts: int, environment: Mapping[str, str]
) -> list[Variable]:
    """Return the variables that torch's agent and our launcher set for one rank.

    A value that is not known before the start is None.
    """
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


# ---- the store of ranks

_NETWORKS = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gfs2", "glusterfs", "gpfs", "lustre", "nfs"),
    *("ocfs2", "panfs", "smb", "virtiofs", "wekafs"),
)


def parent_of_store(environment: Mapping[str, str]) -> str:
    """Choose a folder for the store: XDG_RUNTIME_DIR, else the temporary folder, else /dev/shm.

    The folder must be writable and on no network file system. If no folder is, return the temporary
    folder.
    """
    memory = "/dev/shm"  # noqa: S108 - a folder of mode 0700 is made in it
    for each in (environment.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), memory):
        if each and os.access(each, os.W_OK | os.X_OK) and not _is_in_network(each):
            return each
    return tempfile.gettempdir()


def store_variables(
    folder: Path, attempt: int, port: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables with which ranks of an attempt find their store and sign its values."""
    token = environment.get(TOKEN) or secrets.token_hex(32)
    return {STORE: str(folder / f"store_{attempt}_{port}"), TOKEN: token}


def _is_in_network(folder: str) -> bool:
    """Return whether a folder is on a network file system, whose locks a store should not use."""
    real, found, kind = os.path.realpath(folder), "", ""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return False
    for _, mounted, name, *_ in map(str.split, mounts):
        is_above = mounted == "/" or real == mounted or real.startswith(f"{mounted}/")
        if is_above and len(mounted) >= len(found):
            found, kind = mounted, name
    return kind.startswith(_NETWORKS)
