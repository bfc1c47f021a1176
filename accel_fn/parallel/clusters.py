"""Read the ranks of a process, or the rank of a machine, from the variables that a cluster sets.

srun, jsrun and the mpirun of Open MPI, MPICH and Intel start every process of a world: `read_task`
returns a `Task`. SageMaker, Kubernetes, Vertex AI, Azure ML and PBS start one process on each
machine: `read_node` returns a `Node`, on which `accel-fn launch` starts the ranks. This module does
not import torch, since the launcher reads these variables too.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from accel_fn.errors import WorldError, message

# Stay below the ports that kernels assign to connections.
_FIRST_PORT, _NUM_PORTS = 20000, 12000


@dataclass(frozen=True, slots=True)
class Variables:
    """Environment variables, and the names of the public function and the cluster for errors."""

    function: str
    cluster: str
    values: Mapping[str, str]

    def any_of(self, *names: str) -> bool:
        """Return whether one of these variables is set and not empty."""
        return any(map(self.values.get, names))

    def text(self, *names: str) -> str:
        """Return the first of these variables that is not empty; raise a WorldError if all are."""
        for name in names:
            if self.values.get(name):
                return self.values[name]
        raise WorldError(f"{self.function}: {self.cluster} must set {' or '.join(names)}, got none")

    def number(
        self, *names: str, least: int = 0, most: int | None = None, text: str | None = None
    ) -> int:
        """Parse `text` as a number; without it, the first variable that is not empty."""
        found = self.text(*names) if text is None else text
        number = int(found) if found.isdecimal() else -1
        if number < least or (most is not None and number > most):
            name = next((each for each in names if self.values.get(each)), names[0])
            bounds = f" >= {least}" if least else ""
            if most is not None:
                bounds = f" from {least} to {most}"
            raise WorldError(f"{self.function}: {name} must be a number{bounds}, got {found!r}")
        return number

    def port(self, name: str) -> int | None:
        """Return the port in this variable; None if it is empty."""
        return self.number(name, least=1, most=65535) if self.values.get(name) else None

    def refuse(self, name: str, rule: str) -> NoReturn:
        """Raise a WorldError about the value of a variable."""
        raise WorldError(message(self.function, name, rule, self.values.get(name)))


def _port_of(job: str) -> int:
    """Return the port of a job's rendezvous: the same on all machines, and different for most jobs."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS


# ---- clusters that start each process


@dataclass(frozen=True, slots=True)
class Task:
    """One process of a cluster's job: its ranks, and the machine of rank 0."""

    cluster: str
    job: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    machine_rank: int
    num_machines: int
    host: str | None
    """The host name of rank 0's machine; None if the cluster does not set it."""

    @property
    def port(self) -> int:
        """Return the port of the rendezvous: equal in all processes of a job."""
        return _port_of(self.job)


class _Mpi(NamedTuple):
    """The names of the variables that an MPI launcher sets.

    If there are several names for one value, the first variable that is set counts.
    """

    rank: str
    world_size: str
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]


# Read MPI's variables before Slurm's. Slurm may have started only MPI's daemons, as one job step.
# SLURM_PROCID then is the rank of a daemon.
_MPIS = {
    "LSF": _Mpi(
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        ("JSM_NAMESPACE_LOCAL_RANK",),
        # jsrun starts Spectrum MPI, which is based on Open MPI and sets the same variables.
        ("JSM_NAMESPACE_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    "Open MPI": _Mpi(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    # Hydra (of MPICH and Intel MPI) sets the first of the local names, Cray's PALS the second.
    "MPICH": _Mpi(
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
}
RANKS = {cluster: names.rank for cluster, names in _MPIS.items()} | {"Slurm": "SLURM_PROCID"}
"""The variable that holds the rank in each cluster, for errors."""


def read_task(environment: Mapping[str, str], *, function: str = "init") -> Task | None:
    """Return the task that these variables describe; None if no cluster started this process."""
    read = [_read_mpi(Variables(function, name, environment)) for name in _MPIS]
    read.append(_read_slurm(Variables(function, "Slurm", environment)))
    found = [task for task in read if task is not None]
    for other in found[1:]:
        # With one task per machine, Slurm's tasks may be MPI's daemons, whose ranks differ.
        is_daemon = other.cluster == "Slurm" and other.local_world_size == 1
        places = {(task.rank, task.world_size) for task in (found[0], other)}
        if not is_daemon and len(places) > 1:
            shown = [f"{RANKS[t.cluster]}={t.rank} of {t.world_size}" for t in (found[0], other)]
            raise WorldError(
                f"{function}: {' and '.join(shown)} must agree; start the processes by one of the two, "
                "or unset the variables of the other"
            )
    return found[0] if found else None


def _read_mpi(variables: Variables) -> Task | None:
    names, values = _MPIS[variables.cluster], variables.values
    if not {names.rank, names.world_size} & values.keys():
        return None
    # srun --mpi=pmi2 sets MPI's rank and size, but no local rank, for its tasks and for a shell.
    # Slurm's own variables describe these processes.
    if "SLURM_PROCID" in values and not variables.any_of(*names.local_rank):
        return None
    rank = variables.number(names.rank)
    world_size = variables.number(names.world_size, least=1)
    local_rank = variables.number(*names.local_rank)
    local_world_size = variables.number(*names.local_world_size, least=1)
    num_machines = -(-world_size // local_world_size)
    jobs = "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "LSB_JOBID", "PBS_JOBID", "SLURM_JOB_ID"
    return Task(
        cluster=variables.cluster,
        job=variables.text(*jobs) if variables.any_of(*jobs) else "0",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        machine_rank=rank // local_world_size,
        num_machines=num_machines,
        host=_rank_0_host(variables, num_machines),
    )


def _rank_0_host(variables: Variables, num_machines: int) -> str | None:
    """Return the machine of rank 0 of an MPI world; None if no scheduler names it.

    Rank 0 is on the first machine if the world fills all machines of the job. So a scheduler's list
    is used only if it has as many machines as the world.
    """
    values = variables.values
    if num_machines == 1:
        return "127.0.0.1"
    if values.get("AZ_BATCH_MASTER_NODE"):
        return values["AZ_BATCH_MASTER_NODE"].partition(":")[0]
    lsf = values.get("LSB_MCPU_HOSTS", "").split()[::2]
    # The first machine of LSF is the launch node, where jsrun starts no task, but other launchers
    # do. So try the machines with and without the first one.
    firsts = {len(hosts): hosts[0] for hosts in (_pbs_hosts(values), lsf, lsf[1:]) if hosts}
    nodes = values.get("SLURM_JOB_NODELIST")
    if nodes and values.get("SLURM_JOB_NUM_NODES"):
        firsts[variables.number("SLURM_JOB_NUM_NODES")] = first_host(nodes)
    return firsts.get(num_machines)


def _read_slurm(variables: Variables) -> Task | None:
    # A batch script and a shell of salloc or `srun --pty` are single processes, although
    # SLURM_PROCID is set. Only a job step without a terminal may have many processes.
    values = variables.values
    if not {"SLURM_STEP_ID", "SLURM_PROCID"} <= values.keys() or "SLURM_PTY_PORT" in values:
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
    """Expand Slurm's run lengths, `4(x2),3`, to one number per node: 4, 4, 3."""
    counts: list[int] = []
    for run in layout.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", run)
        if match is None:
            raise WorldError(f"init: Slurm's tasks per node must read as 4(x2),3, got {layout!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list: gpu07 for `gpu[07-09,12],login`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise WorldError(f"init: Slurm's list of nodes must name one, got {nodes!r}")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


# ---- clusters that start one process on each machine


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of a cluster's job, on which no process has been started yet."""

    cluster: str
    variables: tuple[str, ...]
    """The variables that identify the cluster. If you unset them, `init` trains on one machine."""
    num_machines: int
    machine_rank: int = 0
    host: str | None = None
    """The host name of the first machine; None if the cluster does not set it."""
    port: int | None = None
    num_local: int | None = None
    """The number of processes on this machine, if the cluster sets it."""
    job: str | None = None


def read_node(environment: Mapping[str, str], *, function: str) -> Node | None:
    """Return the machine that these variables describe; None if no cluster started this process."""
    read = [reader(Variables(function, name, environment)) for name, reader in _PLATFORMS.items()]
    found = [node for node in read if node is not None]
    for other in found[1:]:
        check_agree(function, found[0], other)
    return found[0] if found else None


def check_agree(function: str, node: Node, other: Node) -> None:
    """Refuse two clusters that number the machines differently."""
    if (node.num_machines, node.machine_rank) != (other.num_machines, other.machine_rank):
        shown = [
            f"{each.variables[0]} (machine {each.machine_rank} of {each.num_machines})"
            for each in (node, other)
        ]
        raise WorldError(
            f"{function}: {' and '.join(shown)} must agree; unset the variables of one of the two"
        )


def check_alone(environment: Mapping[str, str]) -> None:
    """Refuse `init` if a cluster gives a job several machines, on which no launcher starts a world.

    Otherwise each machine would train alone.
    """
    node = read_node(environment, function="init")
    if node is not None and node.num_machines > 1:
        raise WorldError(
            f"init: {node.cluster} has given this job {node.num_machines} machines, and starts no "
            "world on them; start the script by accel-fn launch on each machine, or unset "
            f"{' and '.join(node.variables)} to train on this one alone"
        )


def _by_names(
    variables: Variables,
    *,
    known_by: tuple[str, ...],
    num_machines: str,
    machine_rank: str,
    host: tuple[str, ...],
) -> Node | None:
    """Read a cluster that sets one variable for each fact.

    For one machine, the variable with the number of machines is enough.
    """
    if not variables.any_of(*known_by):
        return None
    count = variables.number(num_machines, least=1)
    if count == 1:
        return Node(variables.cluster, known_by, 1)
    rank = variables.number(machine_rank, most=count - 1)
    return Node(variables.cluster, known_by, count, rank, variables.text(*host).partition(":")[0])


def _kubernetes(variables: Variables) -> Node | None:
    """Read torchrun's variables, which Kubeflow or the manifest of a JobSet sets."""
    values = variables.values
    if not values.get("PET_NNODES"):
        return None
    least, _, most = values["PET_NNODES"].partition(":")
    if most and least != most:
        raise WorldError(
            f"{variables.function}: PET_NNODES must be one number of machines, got "
            f"{values['PET_NNODES']!r}; a world that grows and shrinks is not supported"
        )
    count = variables.number("PET_NNODES", least=1, text=least)
    ranks = "PET_NODE_RANK", "RANK", "JOB_COMPLETION_INDEX"
    processes = values.get("PET_NPROC_PER_NODE", "")
    return Node(
        cluster=variables.cluster,
        variables=("PET_NNODES",),
        num_machines=count,
        machine_rank=variables.number(*ranks, most=count - 1) if count > 1 else 0,
        host=values.get("PET_MASTER_ADDR"),
        port=variables.port("PET_MASTER_PORT"),
        num_local=int(processes) if processes.isdecimal() else None,
        job=values.get("PET_RDZV_ID"),
    )


def _sagemaker(variables: Variables) -> Node | None:
    names = "SM_HOSTS", "SM_CURRENT_HOST"
    if not variables.any_of(*names):
        return None
    text = variables.text("SM_HOSTS")
    hosts = _json(text)
    if not isinstance(hosts, list) or not hosts:
        variables.refuse("SM_HOSTS", "be a JSON list of hosts")
    if len(hosts) == 1:
        return Node(variables.cluster, names, 1)
    current = variables.text("SM_CURRENT_HOST")
    if current not in hosts:
        variables.refuse("SM_CURRENT_HOST", f"be one of SM_HOSTS={text}")
    return Node(variables.cluster, names, len(hosts), hosts.index(current), hosts[0])


def _vertex(variables: Variables) -> Node | None:
    """Read Vertex AI's spec: the first two worker pools train, other pools serve and evaluate."""
    text = variables.values.get("CLUSTER_SPEC", "")
    # Other programs also use a variable of this name, so look for a pool of Vertex AI.
    if "workerpool0" not in text:
        return None
    spec = _json(text)
    try:
        pools = [spec["cluster"].get(pool, []) for pool in ("workerpool0", "workerpool1")]
        pool = ("workerpool0", "workerpool1").index(spec["task"]["type"])
        rank = pool * len(pools[0]) + range(len(pools[pool]))[int(spec["task"]["index"])]
        host, _, port = pools[0][0].partition(":")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        rule = "be Vertex AI's, with this task in workerpool0 or workerpool1"
        variables.refuse("CLUSTER_SPEC", rule)
    number = int(port) if port.isdecimal() else None
    count = sum(map(len, pools))
    return Node(variables.cluster, ("CLUSTER_SPEC",), count, rank, host, number)


def _pbs(variables: Variables) -> Node | None:
    # Processes that MPI starts inherit PBS's variables, but may use only some of its machines.
    if read_task(variables.values, function=variables.function) is not None:
        return None
    hosts, job = _pbs_hosts(variables.values), variables.values.get("PBS_JOBID")
    if not hosts and variables.values.get("PBS_NODENUM", "0") != "0":
        variables.text("PBS_NODEFILE")
        variables.refuse("PBS_NODEFILE", "be a file that lists the machines")
    if len(hosts) < 2:
        return None
    return Node(
        cluster=variables.cluster,
        variables=("PBS_NODEFILE",),
        num_machines=len(hosts),
        machine_rank=variables.number("PBS_NODENUM", most=len(hosts) - 1),
        host=hosts[0],
        port=_port_of(job) if job else None,
        job=job,
    )


def _pbs_hosts(values: Mapping[str, str]) -> list[str]:
    """Return the machines of a PBS job without repeats; an empty list if their file cannot be read."""
    path = values.get("PBS_NODEFILE")
    try:
        return list(dict.fromkeys(Path(path).read_text().split())) if path else []
    except OSError:
        # A container may lack PBS's folder. The machines are then unknown.
        return []


def azure_local_world_size(environment: Mapping[str, str], world_size: str) -> dict[str, str]:
    """Return LOCAL_WORLD_SIZE, which Azure ML's PyTorch distribution leaves out; {} elsewhere."""
    count = environment.get("AZUREML_NODE_COUNT", "")
    if not count.isdecimal() or not world_size.isdecimal() or not int(count):
        return {}
    return {"LOCAL_WORLD_SIZE": str(int(world_size) // int(count))}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


_PLATFORMS: dict[str, Callable[[Variables], Node | None]] = {
    "Kubernetes": _kubernetes,
    "LeaderWorkerSet": partial(
        _by_names,
        known_by=("LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"),
        num_machines="LWS_GROUP_SIZE",
        machine_rank="LWS_WORKER_INDEX",
        host=("LWS_LEADER_ADDRESS",),
    ),
    "SageMaker": _sagemaker,
    "Vertex AI": _vertex,
    "Azure ML": partial(
        _by_names,
        known_by=("AZUREML_NODE_COUNT",),
        num_machines="AZUREML_NODE_COUNT",
        machine_rank="NODE_RANK",
        host=("MASTER_ADDR", "AZ_BATCH_MASTER_NODE"),
    ),
    "PBS": _pbs,
}
