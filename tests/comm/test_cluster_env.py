"""The variables of Slurm and Open MPI for a process, as these programs set them."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_fn.comm.cluster_env import Task, first_host, read_task, tasks_per_node
from accel_fn.comm.world import Launch, read_launch
from tests.support.processes import ROOT

SRUN = {  # Slurm 22.05: srun -N2 -n4, the third task
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
SBATCH = {  # the script of a batch job, on the first of its nodes
    "SLURM_JOB_ID": "8",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
MPIRUN = {  # Open MPI 4.1: mpirun -n 2, the second process
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1360461825",
    "PMIX_NAMESPACE": "1360461825",
}


def test_a_task_of_srun():
    assert read_task(SRUN) == Task("Slurm", "1.0", 2, 4, 0, 2, 1, 2, "n1")


def test_a_process_of_mpirun():
    assert read_task(MPIRUN) == Task("Open MPI", "1360461825", 1, 2, 1, 2, 0, 1, "127.0.0.1")


def test_mpirun_inside_of_a_step_is_mpirun():
    """The daemons of mpirun are tasks of Slurm, and their children inherit Slurm's variables."""
    task = read_task({**SRUN, **MPIRUN})
    assert task is not None
    assert task.cluster == "Open MPI"


@pytest.mark.parametrize(
    "environment",
    [{}, SBATCH, {**SRUN, "SLURM_PTY_PORT": "42085"}],
    ids=["no cluster", "the script of a job", "a shell by srun --pty"],
)
def test_a_process_by_itself_is_no_task(environment):
    assert read_task(environment) is None
    assert read_launch(environment) is None


def test_all_tasks_of_a_job_meet_at_one_port_and_two_jobs_at_two():
    ports = {
        read_task({**SRUN, "SLURM_PROCID": rank, "SLURM_JOB_ID": job}).port
        for rank in "0123"
        for job in ("1", "2")
    }
    assert len(ports) == 2
    # below the ports that kernels assign by themselves
    assert all(20000 <= port < 32000 for port in ports)


def test_the_world_of_a_task():
    assert read_launch(SRUN) == Launch(2, 4, 0, 2, "n1", read_task(SRUN).port, False)
    assert read_launch({**SRUN, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}).serves


def test_an_address_that_is_given_wins():
    launch = read_launch({**SRUN, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234"})
    assert (launch.rank, launch.host, launch.port) == (2, "10.0.0.7", 1234)


def test_a_launcher_inside_of_a_step_wins():
    inside = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert read_launch({**SRUN, **inside}).world_size == 1


def test_open_mpi_on_several_machines_needs_an_address():
    spread = {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(
        RuntimeError, match=r"init: MASTER_ADDR must be set .*mpirun -x MASTER_ADDR"
    ):
        read_launch(spread)
    assert read_launch({**spread, "MASTER_ADDR": "node7"}).host == "node7"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"SLURM_LOCALID": ""}, "the cluster must set SLURM_LOCALID"),
        ({"SLURM_NODEID": "x"}, "SLURM_NODEID must be a number, got 'x'"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, r"tasks per node must read as 4\(x2\),3, got 'two'"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID must be below the 2 nodes .*, got 2"),
        ({"SLURM_LOCALID": "2"}, "LOCAL_RANK must be >= 0 and below LOCAL_WORLD_SIZE=2, got 2"),
        ({"SLURM_PROCID": "4"}, "RANK must be >= 0 and below WORLD_SIZE=4, got 4"),
    ],
)
def test_variables_that_cannot_be_are_refused(change, text):
    with pytest.raises(RuntimeError, match=f"init: .*{text}"):
        read_launch({**SRUN, **change})


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1))
def test_run_lengths_are_read_as_slurm_writes_them(runs):
    written = ",".join(f"{count}(x{times})" if times > 1 else f"{count}" for count, times in runs)
    assert tasks_per_node(written) == [count for count, times in runs for _ in range(times)]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("login", "login"),
        ("gpu[07-09,12],login", "gpu07"),
        ("gpu[12,07-09]", "gpu12"),
        ("rack[1-2]-node[003-004]", "rack1-node003"),
        ("a,b[1-2]", "a"),
        ("n1.cluster.example", "n1.cluster.example"),
    ],
)
def test_the_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.slow
def test_tasks_of_srun_find_each_other_without_a_launcher():
    """Two processes get the variables of two tasks on one machine."""
    script = (
        "import os, accel_fn as af; state = af.init(device='cpu', timeout_s=100);"
        "os.write(1, f'{state.rank}/{state.world_size} {af.reduce_sum(state.rank, state)}'.encode())"
    )
    alike = {**SRUN, "SLURM_JOB_ID": f"{os.getpid()}", "SLURM_STEP_NUM_NODES": "1"}
    alike |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **alike}
            | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    assert [task.communicate(timeout=150)[0] for task in tasks] == ["0/2 1", "1/2 1"]
