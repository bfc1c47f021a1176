"""Reads the variables that clusters set for a process: Slurm's srun and Open MPI's mpirun."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from accel_fn.errors import WorldError

_FIRST_PORT, _NUM_PORTS = 20000, 12000  # below what kernels hand out by themselves


@dataclass(frozen=True, slots=True)
class Task:
    """One process of a cluster's job: its ranks, and where rank 0 runs."""

    cluster: str
    job: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    machine_rank: int
    num_machines: int
    host: str | None
    """The machine of rank 0; None if the cluster does not set it."""

    @property
    def port(self) -> int:
        """Return the port of the rendezvous: the same in all processes of a job."""
        return _FIRST_PORT + zlib.crc32(self.job.encode()) % _NUM_PORTS


def read_task(environment: Mapping[str, str]) -> Task | None:
    """Return the task that these variables describe; None if no cluster started this process.

    Open MPI comes first: its daemons may themselves be a step of Slurm.
    """
    if "OMPI_COMM_WORLD_RANK" in environment:
        return _open_mpi(environment)
    # A batch script, and a shell of salloc or `srun --pty`, have SLURM_PROCID too,
    # but stand alone: only a step without a terminal is one of many.
    if {"SLURM_STEP_ID", "SLURM_PROCID"} <= environment.keys() and (
        "SLURM_PTY_PORT" not in environment
    ):
        return _slurm(environment)
    return None


def read_number(
    function: str, name: str, text: str, *, least: int = 0, most: int | None = None
) -> int:
    """Return the number that a variable holds; refuse one outside the bounds in the function's name."""
    number = int(text) if text.isdecimal() else -1
    if number < least or (most is not None and number > most):
        bounds = f" >= {least}" if least else ""
        if most is not None:
            bounds = f" from {least} to {most}"
        raise WorldError(f"{function}: {name} must be a number{bounds}, got {text!r}")
    return number


def _open_mpi(environment: Mapping[str, str]) -> Task:
    def number(name: str) -> int:
        return _number(environment, f"OMPI_COMM_WORLD_{name}")

    rank, world_size = number("RANK"), number("SIZE")
    local_rank, local_world_size = number("LOCAL_RANK"), number("LOCAL_SIZE")
    job = next(
        (environment[name] for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
         if name in environment),
        "0",
    )  # fmt: skip
    return Task(
        cluster="Open MPI",
        job=job,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        machine_rank=rank // local_world_size,
        num_machines=-(-world_size // local_world_size),
        host="127.0.0.1" if local_world_size == world_size else None,
    )


def _slurm(environment: Mapping[str, str]) -> Task:
    world_size = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    num_machines = _number(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    machine_rank = _number(environment, "SLURM_NODEID")
    layout = _required(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts = tasks_per_node(layout)
    if machine_rank >= len(counts):
        raise WorldError(
            f"init: SLURM_NODEID must be below the {len(counts)} nodes of {layout!r}, "
            f"got {machine_rank}"
        )
    nodes = _required(environment, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    return Task(
        cluster="Slurm",
        job=f"{_required(environment, 'SLURM_JOB_ID', 'SLURM_JOBID')}.{environment['SLURM_STEP_ID']}",
        rank=_number(environment, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(environment, "SLURM_LOCALID"),
        local_world_size=counts[machine_rank],
        machine_rank=machine_rank,
        num_machines=num_machines,
        host="127.0.0.1" if num_machines == 1 else first_host(nodes),
    )


def tasks_per_node(layout: str) -> list[int]:
    """Expand Slurm's run lengths, `4(x2),3`, to one number a node: 4, 4, 3."""
    counts: list[int] = []
    for part in layout.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise WorldError(f"init: Slurm's tasks per node must read as 4(x2),3, got {layout!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """Return the first of Slurm's list of hosts: `gpu[07-09,12],login` begins with gpu07."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise WorldError(f"init: Slurm's list of nodes must name one, got {nodes!r}")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def _required(environment: Mapping[str, str], *names: str) -> str:
    """The value of the first of these variables that is set."""
    for name in names:
        if environment.get(name):
            return environment[name]
    raise WorldError(f"init: the cluster must set {' or '.join(names)}, got neither")


def _number(environment: Mapping[str, str], *names: str) -> int:
    text = _required(environment, *names)
    return read_number("init", names[0], text)
