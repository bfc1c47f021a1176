"""Two launchers without a flag meet on loopback addresses by the variables of a cluster."""

import json

import pytest

from tests.parallel.test_tasks import pbs
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


_OPEN_MPI = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
_HYDRA = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
_JSRUN = [f"JSM_NAMESPACE_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]


def vertex(rank, port):
    cluster = {"workerpool0": [f"{HOSTS[0]}:{port}"], "workerpool1": [f"{HOSTS[1]}:{port}"]}
    task = {"type": f"workerpool{rank}", "index": 0}
    return {"CLUSTER_SPEC": json.dumps({"cluster": cluster, "task": task})}


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
    "JobSet": lambda rank, _port, _folder: {
        "PET_NNODES": "2",
        "JOB_COMPLETION_INDEX": rank,
        "MASTER_ADDR": HOSTS[0],
    },
    "LeaderWorkerSet": lambda rank, _port, _folder: {
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": rank,
        "LWS_LEADER_ADDRESS": HOSTS[0],
    },
    "Vertex AI": lambda rank, port, _folder: vertex(rank, port),
    "Azure ML": lambda rank, _port, _folder: {
        "AZUREML_NODE_COUNT": "2",
        "NODE_RANK": rank,
        "AZ_BATCH_MASTER_NODE": f"{HOSTS[0]}:6000",
    },
    "Azure ML by MPI": lambda rank, _port, _folder: {
        **mpi(_OPEN_MPI, rank, {"AZ_BATCH_MASTER_NODE": f"{HOSTS[0]}:6000"}),
        "AZUREML_NODE_COUNT": "2",
        "NODE_RANK": rank,
    },
    "PBS": lambda rank, _port, folder: {**pbs(folder, *HOSTS), "PBS_NODENUM": rank},
    "PBS by MPICH": lambda rank, _port, folder: mpi(_HYDRA, rank, pbs(folder, *HOSTS)),
    "Open MPI": lambda rank, _port, _folder: mpi(_OPEN_MPI, rank, {"MASTER_ADDR": HOSTS[0]}),
    "LSF": lambda rank, _port, _folder: mpi(
        _JSRUN, rank, {"LSB_MCPU_HOSTS": f"batch 1 {HOSTS[0]} 4 {HOSTS[1]} 4"}
    ),
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
