"""Two launchers without a flag meet on loopback addresses by the variables of a cluster."""

import json

import pytest

from tests.comm.test_tasks import pbs
from tests.support.processes import free_port

HOSTS = "127.0.0.2", "127.0.0.3"
SCRIPT = """
    import os, accel_fn as af
    state = af.init(device="cpu", timeout_s=100)
    shown = f"{state.rank}/{state.world_size} on {os.environ['GROUP_RANK']}"
    print(shown, af.reduce_sum(state.rank + 1, state), flush=True)
"""


def slurm(rank, port):
    return {
        "SLURM_JOB_ID": str(port),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "127.0.0.[2-3]",
        "SLURM_PROCID": rank,
        "SLURM_NODEID": rank,
        "SLURM_LOCALID": "0",
    }


def mpi(names, rank, host):
    """Return the variables of an MPI with one process a machine, and those that name the first."""
    return {
        **dict(zip(names, (rank, "2", "0", "1"), strict=True)),
        **host,
    }


_HYDRA = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
CLUSTERS = {
    "SageMaker": lambda rank, _port, _folder: {
        "SM_HOSTS": json.dumps(HOSTS),
        "SM_CURRENT_HOST": HOSTS[int(rank)],
    },
    "Kubeflow": lambda rank, port, _folder: {
        "PET_NNODES": "2",
        "PET_NODE_RANK": rank,
        "PET_MASTER_ADDR": HOSTS[0],
        "PET_MASTER_PORT": str(port),
    },
    "PBS by MPICH": lambda rank, _port, folder: mpi(_HYDRA, rank, pbs(folder, *HOSTS)),
    "Slurm": lambda rank, port, _folder: slurm(rank, port),
}
"""The variables of the machine of a rank. Where these hold no port, the test gives one."""


@pytest.mark.slow
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_launchers_of_a_cluster_meet_without_a_flag(launchers, tmp_path, cluster):
    port, folder = free_port(), tmp_path
    machines = [
        launchers.start(
            tmp_path / rank,
            "-n",
            2,
            "--cpu",
            "script.py",
            script=SCRIPT,
            MASTER_PORT=str(port),
            **CLUSTERS[cluster](rank, port, folder),
        )
        for rank in "01"
    ]
    ended = [machine.wait() for machine in machines]
    assert [each.exit_code for each in ended] == [0, 0], ended
    assert [each.stdout for each in ended] == ["0/2 on 0 3\n", "1/2 on 1 3\n"]
