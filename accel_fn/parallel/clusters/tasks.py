"""Clusters that start each process of a world: srun, jsrun, and mpirun of Open MPI, MPICH and Intel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from accel_fn.errors import WorldError
from accel_fn.parallel.clusters.hosts import first_host, read_rank_0_host
from accel_fn.parallel.clusters.variables import Variables, port_of


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
        return port_of(self.job)


def read_task(environment: Mapping[str, str], *, function: str = "init") -> Task | None:
    """Return the task that these variables describe; None if no cluster started this process.

    An MPI comes before Slurm: its daemons may themselves be a step of Slurm.
    """
    read = {
        name: reader(Variables(function, name, environment)) for name, reader in _READERS.items()
    }
    found = [task for task in read.values() if task is not None]
    if not found:
        return None
    for other in found[1:]:
        # With one task per machine, the tasks of Slurm may be the daemons of MPI.
        is_daemon = other.cluster == "Slurm" and other.local_world_size == 1
        if not is_daemon and _place(other) != _place(found[0]):
            raise WorldError(
                f"{function}: {_shown(found[0])} and {_shown(other)} must agree; start the "
                "processes by one of the two, or unset the variables of the other"
            )
    return found[0]


def _place(task: Task) -> tuple[int, int]:
    return task.rank, task.world_size


def _shown(task: Task) -> str:
    return f"{RANKS[task.cluster]}={task.rank} of {task.world_size}"


def _lsf(variables: Variables) -> Task | None:
    """LSF's jsrun."""
    if not {"JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"} & variables.values.keys():
        return None
    # Spectrum MPI, which it starts, is an Open MPI.
    local_size = "JSM_NAMESPACE_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"
    return _mpi(
        variables,
        rank=variables.number("JSM_NAMESPACE_RANK"),
        world_size=variables.number("JSM_NAMESPACE_SIZE", least=1),
        local_rank=variables.number("JSM_NAMESPACE_LOCAL_RANK"),
        local_world_size=variables.number(*local_size, least=1),
    )


def _open_mpi(variables: Variables) -> Task | None:
    if not {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"} & variables.values.keys():
        return None
    return _mpi(
        variables,
        rank=variables.number("OMPI_COMM_WORLD_RANK"),
        world_size=variables.number("OMPI_COMM_WORLD_SIZE", least=1),
        local_rank=variables.number("OMPI_COMM_WORLD_LOCAL_RANK"),
        local_world_size=variables.number("OMPI_COMM_WORLD_LOCAL_SIZE", least=1),
    )


def _hydra(variables: Variables) -> Task | None:
    """Hydra, the mpirun of MPICH and Intel MPI; PALS of Cray has other names for the local ones."""
    values = variables.values
    if not {"PMI_RANK", "PMI_SIZE"} & values.keys():
        return None
    local_rank = "MPI_LOCALRANKID", "PMI_LOCAL_RANK"
    if "SLURM_PROCID" in values and not any(map(values.get, local_rank)):
        return None  # srun --mpi=pmi2 sets the rank and the size for its tasks, and for a shell
    return _mpi(
        variables,
        rank=variables.number("PMI_RANK"),
        world_size=variables.number("PMI_SIZE", least=1),
        local_rank=variables.number(*local_rank),
        local_world_size=variables.number("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", least=1),
    )


def _mpi(
    variables: Variables, *, rank: int, world_size: int, local_rank: int, local_world_size: int
) -> Task:
    num_machines = -(-world_size // local_world_size)
    jobs = "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "LSB_JOBID", "PBS_JOBID", "SLURM_JOB_ID"
    return Task(
        cluster=variables.cluster,
        job=next((variables.values[name] for name in jobs if variables.values.get(name)), "0"),
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        machine_rank=rank // local_world_size,
        num_machines=num_machines,
        host=read_rank_0_host(variables.values, num_machines),
    )


def _is_slurm(values: Mapping[str, str]) -> bool:
    """Is this process one of a step's tasks?"""
    # A batch script, and a shell of salloc or `srun --pty`, have SLURM_PROCID too,
    # but stand alone: only a step without a terminal is one of many.
    return {"SLURM_STEP_ID", "SLURM_PROCID"} <= values.keys() and "SLURM_PTY_PORT" not in values


def _slurm(variables: Variables) -> Task | None:
    if not _is_slurm(variables.values):
        return None
    num_machines = variables.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    machine_rank = variables.number("SLURM_NODEID")
    layout = variables.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts = tasks_per_node(layout)
    if machine_rank >= len(counts):
        raise WorldError(
            f"{variables.function}: SLURM_NODEID must be below the {len(counts)} nodes of {layout!r}, "
            f"got {machine_rank}"
        )
    nodes = variables.text("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    job, step = variables.text("SLURM_JOB_ID", "SLURM_JOBID"), variables.text("SLURM_STEP_ID")
    return Task(
        cluster="Slurm",
        job=f"{job}.{step}",
        rank=variables.number("SLURM_PROCID"),
        world_size=variables.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=variables.number("SLURM_LOCALID"),
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


_READERS = {"LSF": _lsf, "Open MPI": _open_mpi, "MPICH": _hydra, "Slurm": _slurm}
RANKS = {
    "LSF": "JSM_NAMESPACE_RANK",
    "Open MPI": "OMPI_COMM_WORLD_RANK",
    "MPICH": "PMI_RANK",
    "Slurm": "SLURM_PROCID",
}
"""The variable of the rank, for errors."""
