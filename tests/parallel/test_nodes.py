"""The variables that clusters set for each machine, on which `init` needs a launcher."""

import json

import pytest

from accel_fn.errors import WorldError
from accel_fn.parallel.clusters import Node, read_node
from accel_fn.parallel.world import Launch, read_launch
from tests.parallel.test_tasks import pbs

POD = {  # as Kubeflow sets them
    "PET_NNODES": "3",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_MASTER_ADDR": "first",
    "PET_MASTER_PORT": "23456",
}
JOBSET = {  # the index by Kubernetes, the others by the manifest
    "JOB_COMPLETION_INDEX": "1",
    "MASTER_ADDR": "train-machine-0-0.train",
    "PET_NNODES": "2",
}
LWS = {
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
    "LWS_LEADER_ADDRESS": "train-0.train.default",
}
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8"}
AZURE = {
    "AZUREML_NODE_COUNT": "2",
    "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000",
    "NODE_RANK": "1",
}


def vertex(pool, index, *, num_workers=2):
    workers = [f"pool1-{number}:2222" for number in range(num_workers)]
    cluster = {"workerpool0": ["pool0-0:2222"], "workerpool1": workers, "workerpool2": ["server:1"]}
    spec = {"cluster": cluster, "environment": "cloud", "task": {"type": pool, "index": index}}
    return {"CLUSTER_SPEC": json.dumps(spec)}


VERTEX = vertex("workerpool1", 1)


def node(environment):
    return read_node(environment, function="launch")


def pbs_machine(folder, *hosts, rank="1"):
    return {**pbs(folder, *hosts), "PBS_NODENUM": rank, "PBS_TASKNUM": "1"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (POD, Node("Kubernetes", ("PET_NNODES",), 3, 2, "first", 23456, 4)),
        (JOBSET, Node("Kubernetes", ("PET_NNODES",), 2, 1)),
        (LWS, Node("LeaderWorkerSet", tuple(LWS), 2, 1, "train-0.train.default")),
        (SAGEMAKER, Node("SageMaker", ("SM_HOSTS", "SM_CURRENT_HOST"), 2, 1, "algo-1")),
        (VERTEX, Node("Vertex AI", ("CLUSTER_SPEC",), 3, 2, "pool0-0", 2222)),
        (vertex("workerpool0", 0), Node("Vertex AI", ("CLUSTER_SPEC",), 3, 0, "pool0-0", 2222)),
        (AZURE, Node("Azure ML", ("AZUREML_NODE_COUNT",), 2, 1, "10.0.0.4")),
    ],
)
def test_the_machine_is_read_from_the_variables_of_its_cluster(environment, found):
    assert node(environment) == found


def test_a_machine_of_pbs(tmp_path):
    found = node(pbs_machine(tmp_path, "p1", "p2"))
    assert (found.num_machines, found.machine_rank, found.host) == (2, 1, "p1")
    assert (found.job, 20000 <= found.port < 32000) == ("17.server", True)


ON_ONE_MACHINE = {
    "PET": {"PET_NNODES": "1"},
    "LWS": {"LWS_GROUP_SIZE": "1", "LWS_LEADER_ADDRESS": "a", "LWS_WORKER_INDEX": "0"},
    "SageMaker": {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
    "Vertex AI": vertex("workerpool0", 0, num_workers=0),
    "Azure ML": {"AZUREML_NODE_COUNT": "1", "AZ_BATCHAI_MPI_MASTER_NODE": "localhost"},
    "PBS in a container": {"PBS_NODEFILE": "/not/mounted", "PBS_NODENUM": "0"},
    "an indexed job": {"JOB_COMPLETION_INDEX": "3"},
    "another program's": {"CLUSTER_SPEC": "gold"},
}


@pytest.mark.parametrize("environment", ON_ONE_MACHINE.values(), ids=ON_ONE_MACHINE)
def test_a_script_on_one_machine_needs_no_launcher(environment):
    assert read_launch(environment) is None


def test_a_script_on_one_machine_of_pbs_needs_no_launcher(tmp_path):
    assert read_launch(pbs_machine(tmp_path, "p1", rank="0")) is None


SEVERAL = {
    "PET_NNODES": POD,
    "LWS_GROUP_SIZE and LWS_WORKER_INDEX and LWS_LEADER_ADDRESS": LWS,
    "SM_HOSTS and SM_CURRENT_HOST": SAGEMAKER,
    "CLUSTER_SPEC": VERTEX,
    "AZUREML_NODE_COUNT": AZURE,
}


@pytest.mark.parametrize("names", SEVERAL)
def test_a_script_on_several_machines_needs_a_launcher(names):
    """Without one, each machine would silently train by itself."""
    text = (
        r"^init: .* has given this job \d machines, and starts no world on them; start the script by "
        rf"accel-fn launch on each machine, or unset {names} to train on this one alone$"
    )
    with pytest.raises(WorldError, match=text):
        read_launch(SEVERAL[names])
    unset = names.split(" and ")
    without = {name: value for name, value in SEVERAL[names].items() if name not in unset}
    assert read_launch(without) is None


def test_a_script_on_several_machines_of_pbs_needs_a_launcher(tmp_path):
    with pytest.raises(WorldError, match=r"^init: PBS has given this job 2 machines.*PBS_NODEFILE"):
        read_launch(pbs_machine(tmp_path, "p1", "p2"))


def test_a_world_of_mpi_on_each_of_several_machines_is_refused():
    one = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    with pytest.raises(WorldError, match=r"^init: SageMaker has given this job 2 machines"):
        read_launch({**SAGEMAKER, **one})
    all_hosts = {**one, "PMI_SIZE": "4", "MASTER_ADDR": "algo-1"}
    assert read_launch({**SAGEMAKER, **all_hosts}).world_size == 4


@pytest.mark.parametrize("names", SEVERAL)
def test_a_rank_of_a_launcher_does_not_ask_the_cluster(names):
    rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
    assert read_launch({**SEVERAL[names], **rank}) == Launch(1, 2, 0, 1, "a", 7, False)


@pytest.mark.parametrize(
    ("environment", "missing"),
    [
        (POD, "PET_NODE_RANK"),
        (JOBSET, "JOB_COMPLETION_INDEX"),
        (LWS, "LWS_GROUP_SIZE"),
        (LWS, "LWS_WORKER_INDEX"),
        (LWS, "LWS_LEADER_ADDRESS"),
        (SAGEMAKER, "SM_HOSTS"),
        (SAGEMAKER, "SM_CURRENT_HOST"),
        (AZURE, "NODE_RANK"),
        (AZURE, "AZ_BATCH_MASTER_NODE"),
    ],
)
def test_half_of_the_variables_is_refused_by_name(environment, missing):
    half = {name: value for name, value in environment.items() if name != missing}
    with pytest.raises(WorldError, match=f"^launch: .* must set .*{missing}.*, got none$"):
        node(half)


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (
            {**LWS, "LWS_WORKER_INDEX": "2"},
            "LWS_WORKER_INDEX must be a number from 0 to 1, got '2'",
        ),
        (
            {**SAGEMAKER, "SM_HOSTS": "algo-1"},
            "SM_HOSTS must be a JSON list of hosts, got 'algo-1'",
        ),
        ({**SAGEMAKER, "SM_HOSTS": "[]"}, r"SM_HOSTS must be a JSON list of hosts, got '\[\]'"),
        (
            {**SAGEMAKER, "SM_CURRENT_HOST": "b"},
            "SM_CURRENT_HOST must be one of SM_HOSTS=.*, got 'b'",
        ),
        ({"CLUSTER_SPEC": '{"workerpool0'}, "CLUSTER_SPEC must be Vertex AI's, .*, got "),
        (vertex("workerpool2", 0), "CLUSTER_SPEC must be .*in workerpool0 or workerpool1, got "),
        (vertex("workerpool1", 2), "CLUSTER_SPEC must be Vertex AI's, .*, got "),
        (
            {"PBS_NODEFILE": "/not/there", "PBS_NODENUM": "1"},
            "PBS_NODEFILE must be a file that lists",
        ),
        (
            {**LWS, **SAGEMAKER, "SM_CURRENT_HOST": "algo-1"},
            r"LWS_GROUP_SIZE \(machine 1 of 2\) and SM_HOSTS \(machine 0 of 2\) must agree; unset",
        ),
    ],
)
def test_variables_that_cannot_be_are_refused(environment, text):
    with pytest.raises(WorldError, match=f"^launch: {text}"):
        node(environment)


def test_clusters_that_agree_are_one():
    assert node({**LWS, **SAGEMAKER}) == node(LWS)


def test_azure_ml_leaves_the_local_world_size_to_be_divided():
    process = {"RANK": "5", "LOCAL_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "8"}
    process |= {"MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "6105", "AZUREML_NODE_COUNT": "2"}
    assert read_launch(process) == Launch(5, 8, 1, 4, "10.0.0.4", 6105, False)
