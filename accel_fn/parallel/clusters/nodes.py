"""Clusters that start one process on each machine: SageMaker, Kubernetes, Vertex AI, Azure ML, PBS."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from accel_fn.errors import WorldError, message
from accel_fn.parallel.clusters.hosts import pbs_hosts
from accel_fn.parallel.clusters.tasks import read_task
from accel_fn.parallel.clusters.variables import Variables, port_of, read_number


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of a cluster's job, on which the processes are still to be started."""

    cluster: str
    variables: tuple[str, ...]
    """Those by which the cluster is known: without them, the machine stands alone."""
    num_machines: int
    machine_rank: int = 0
    host: str | None = None
    """The first machine; None if another variable must hold it."""
    port: int | None = None
    num_local: int | None = None
    """Processes of this machine, if the cluster sets how many."""
    job: str | None = None


def read_node(environment: Mapping[str, str], *, function: str) -> Node | None:
    """Return the machine that these variables describe; None if no cluster started this process."""
    read = (reader(Variables(function, name, environment)) for name, reader in _READERS.items())
    found = [node for node in read if node is not None]
    for other in found[1:]:
        check_agree(function, found[0], other)
    return found[0] if found else None


def check_agree(function: str, node: Node, other: Node) -> None:
    """Refuse two clusters that number the machines differently."""
    places = [(each.num_machines, each.machine_rank) for each in (node, other)]
    if places[0] != places[1]:
        shown = [
            f"{each.variables[0]} (machine {each.machine_rank} of {each.num_machines})"
            for each in (node, other)
        ]
        raise WorldError(
            f"{function}: {' and '.join(shown)} must agree; unset the variables of one of the two"
        )


def check_alone(environment: Mapping[str, str]) -> None:
    """Refuse, in the name of `init`, a process that would be a world of one on each of several machines."""
    node = read_node(environment, function="init")
    if node is not None and node.num_machines > 1:
        raise WorldError(
            f"init: {node.cluster} has given this job {node.num_machines} machines, and starts no "
            "world on them; start the script by accel-fn launch on each machine, or unset "
            f"{' and '.join(node.variables)} to train on this one alone"
        )


def _kubernetes(variables: Variables) -> Node | None:
    """The variables of torchrun, as Kubeflow sets them, or the manifest of a JobSet."""
    values = variables.values
    count = values.get("PET_NNODES", "")
    if not count:
        return None
    least, _, most = count.partition(":")
    if most and least != most:
        raise WorldError(
            f"{variables.function}: PET_NNODES must be one number of machines, got {count!r}; "
            "a world that grows and shrinks is not supported"
        )
    num_machines = read_number(variables.function, "PET_NNODES", least, least=1)
    processes = values.get("PET_NPROC_PER_NODE", "")
    return Node(
        cluster=variables.cluster,
        variables=("PET_NNODES",),
        num_machines=num_machines,
        machine_rank=_rank(
            variables, num_machines, "PET_NODE_RANK", "RANK", "JOB_COMPLETION_INDEX"
        ),
        host=values.get("PET_MASTER_ADDR"),
        port=variables.port("PET_MASTER_PORT"),
        num_local=int(processes) if processes.isdecimal() else None,
        job=values.get("PET_RDZV_ID"),
    )


def _leader_worker_set(variables: Variables) -> Node | None:
    names = "LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"
    if not _any(variables, *names):
        return None
    num_machines = variables.number("LWS_GROUP_SIZE", least=1)
    return Node(
        cluster=variables.cluster,
        variables=names,
        num_machines=num_machines,
        machine_rank=_rank(variables, num_machines, "LWS_WORKER_INDEX"),
        host=variables.text("LWS_LEADER_ADDRESS") if num_machines > 1 else None,
    )


def _sagemaker(variables: Variables) -> Node | None:
    names = "SM_HOSTS", "SM_CURRENT_HOST"
    if not _any(variables, *names):
        return None
    text = variables.text("SM_HOSTS")
    hosts = _json(text)
    if not isinstance(hosts, list) or not hosts:
        _refuse(variables, "SM_HOSTS", "be a JSON list of hosts", text)
    if len(hosts) == 1:
        return Node(variables.cluster, names, 1)
    current = variables.text("SM_CURRENT_HOST")
    if current not in hosts:
        _refuse(variables, "SM_CURRENT_HOST", f"be one of SM_HOSTS={text}", current)
    return Node(variables.cluster, names, len(hosts), hosts.index(current), hosts[0])


def _vertex(variables: Variables) -> Node | None:
    """The first two pools of workers train; the others are of servers and evaluators."""
    text = variables.values.get("CLUSTER_SPEC", "")
    if "workerpool0" not in text:  # other programs have variables of this name
        return None
    spec = _json(text)
    try:
        pools = [spec["cluster"].get(pool, []) for pool in ("workerpool0", "workerpool1")]
        pool = ("workerpool0", "workerpool1").index(spec["task"]["type"])
        rank = pool * len(pools[0]) + range(len(pools[pool]))[int(spec["task"]["index"])]
        host, _, port = pools[0][0].partition(":")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        rule = "be Vertex AI's, with this task in workerpool0 or workerpool1"
        _refuse(variables, "CLUSTER_SPEC", rule, text)
    num_machines = sum(map(len, pools))
    return Node(
        variables.cluster,
        ("CLUSTER_SPEC",),
        num_machines,
        rank,
        host,
        int(port) if port.isdecimal() else None,
    )


def _azure(variables: Variables) -> Node | None:
    if not variables.values.get("AZUREML_NODE_COUNT"):
        return None
    num_machines = variables.number("AZUREML_NODE_COUNT", least=1)
    if num_machines == 1:
        return Node(variables.cluster, ("AZUREML_NODE_COUNT",), 1)
    host = variables.text("MASTER_ADDR", "AZ_BATCH_MASTER_NODE").partition(":")[0]
    rank = _rank(variables, num_machines, "NODE_RANK")
    return Node(variables.cluster, ("AZUREML_NODE_COUNT",), num_machines, rank, host)


def _pbs(variables: Variables) -> Node | None:
    # Processes that an MPI starts inherit the variables of its own machine, and may fill fewer.
    if read_task(variables.values, function=variables.function) is not None:
        return None
    hosts, job = pbs_hosts(variables.values), variables.values.get("PBS_JOBID")
    if not hosts and variables.values.get("PBS_NODENUM", "0") != "0":
        file = variables.text("PBS_NODEFILE")
        _refuse(variables, "PBS_NODEFILE", "be a file that lists the machines", file)
    if len(hosts) < 2:
        return None
    return Node(
        cluster=variables.cluster,
        variables=("PBS_NODEFILE",),
        num_machines=len(hosts),
        machine_rank=_rank(variables, len(hosts), "PBS_NODENUM"),
        host=hosts[0],
        port=port_of(job) if job else None,
        job=job,
    )


def azure_local_world_size(environment: Mapping[str, str], world_size: str) -> dict[str, str]:
    """Return LOCAL_WORLD_SIZE, which Azure ML's PyTorch distribution leaves out; none elsewhere."""
    count = environment.get("AZUREML_NODE_COUNT", "")
    if not count.isdecimal() or not world_size.isdecimal() or not int(count):
        return {}
    return {"LOCAL_WORLD_SIZE": str(int(world_size) // int(count))}


_READERS = {
    "Kubernetes": _kubernetes,
    "LeaderWorkerSet": _leader_worker_set,
    "SageMaker": _sagemaker,
    "Vertex AI": _vertex,
    "Azure ML": _azure,
    "PBS": _pbs,
}


def _any(variables: Variables, *names: str) -> bool:
    return any(map(variables.values.get, names))


def _rank(variables: Variables, num_machines: int, *names: str) -> int:
    """The rank of this machine; a single one needs no variable for it."""
    return variables.number(*names, most=num_machines - 1) if num_machines > 1 else 0


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _refuse(variables: Variables, name: str, rule: str, value: str) -> NoReturn:
    raise WorldError(message(variables.function, name, rule, value))
