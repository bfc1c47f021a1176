"""The machines that a scheduler has given to a job, in the order in which MPI fills them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from accel_fn.errors import WorldError
from accel_fn.parallel.clusters.variables import read_number


def read_rank_0_host(environment: Mapping[str, str], num_machines: int) -> str | None:
    """Return the machine of rank 0 of an MPI world; None if no scheduler names it.

    Rank 0 is on the first machine, if the world fills all that the job has.
    """
    if num_machines == 1:
        return "127.0.0.1"
    azure = environment.get("AZ_BATCH_MASTER_NODE")
    if azure:
        return azure.partition(":")[0]
    return dict(_allocations(environment)).get(num_machines)


def _allocations(environment: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Number of machines and the first of them, by each scheduler."""
    lsf = environment.get("LSB_MCPU_HOSTS", "").split()[::2]
    # jsrun starts no task on the first machine of LSF, its launch node; other starters do.
    for hosts in (pbs_hosts(environment), lsf, lsf[1:]):
        if hosts:
            yield len(hosts), hosts[0]
    nodes, count = environment.get("SLURM_JOB_NODELIST"), environment.get("SLURM_JOB_NUM_NODES")
    if nodes and count:
        yield read_number("init", "SLURM_JOB_NUM_NODES", count), first_host(nodes)


def pbs_hosts(environment: Mapping[str, str]) -> list[str]:
    """Return the machines of a PBS job, each once; none if its file cannot be read."""
    path = environment.get("PBS_NODEFILE")
    try:
        return list(dict.fromkeys(Path(path).read_text().split())) if path else []
    except OSError:  # as in a container that does not mount the folder of PBS
        return []


def first_host(nodes: str) -> str:
    """Return the first of Slurm's list of hosts: `gpu[07-09,12],login` begins with gpu07."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise WorldError(f"init: Slurm's list of nodes must name one, got {nodes!r}")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])
