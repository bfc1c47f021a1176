"""The variables that srun, jsrun and the mpirun of three MPIs set for a process, and their worlds."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_fn.errors import WorldError
from accel_fn.parallel.clusters import Task, first_host, read_task, tasks_per_node
from accel_fn.parallel.world import Launch, read_launch
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
HYDRA = {  # MPICH 5.0: mpiexec -n 4 -ppn 2, the fourth process; Intel MPI sets the same
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PBS_JOBID": "17.server",
}
PALS = {  # mpiexec of Cray
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
JSRUN = {  # LSF: jsrun on two machines, beside the one that launches
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "LSB_JOBID": "29",
    "LSB_MCPU_HOSTS": "batch1 1 h1 42 h2 42",
}


@pytest.mark.parametrize(
    ("environment", "task"),
    [
        (SRUN, Task("Slurm", "1.0", 2, 4, 0, 2, 1, 2, "n1")),
        (MPIRUN, Task("Open MPI", "1360461825", 1, 2, 1, 2, 0, 1, "127.0.0.1")),
        (HYDRA, Task("MPICH", "17.server", 3, 4, 1, 2, 1, 2, None)),
        (PALS, Task("MPICH", "0", 3, 4, 1, 2, 1, 2, None)),
        (JSRUN, Task("LSF", "29", 3, 4, 1, 2, 1, 2, "h1")),
    ],
)
def test_the_task_is_read_from_the_variables_of_its_launcher(environment, task):
    assert read_task(environment) == task


def test_a_task_with_other_variables_is_read_too():
    alone = {**HYDRA, "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "3"}
    assert read_task(alone).host == "127.0.0.1"
    all_compute = {**JSRUN, "LSB_MCPU_HOSTS": "h1 42 h2 42"}
    assert read_task(all_compute).host == "h1"
    without = {name: value for name, value in JSRUN.items() if name != "JSM_NAMESPACE_LOCAL_SIZE"}
    by_open_mpi = {**without, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", **_OPEN_MPI}
    assert read_task(by_open_mpi) == read_task(JSRUN)


_OPEN_MPI = {  # the same process as JSRUN's and HYDRA's
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
}


def pbs(folder, *hosts):
    """Return the variables of a PBS job on these machines, one line for each processor."""
    (folder / "nodes").write_text("".join(f"{host}\n" * 2 for host in hosts))
    return {"PBS_JOBID": "17.server", "PBS_NODEFILE": str(folder / "nodes")}


@pytest.mark.parametrize("process", [HYDRA, _OPEN_MPI], ids=["MPICH", "Open MPI"])
@pytest.mark.parametrize(
    ("scheduler", "host"),
    [
        ({"LSB_MCPU_HOSTS": "h1 4 h2 4"}, "h1"),
        ({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}, "n1"),
        ({"AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}, "10.0.0.4"),
        ({"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3"}, None),
    ],
    ids=["LSF", "Slurm", "Azure ML", "fewer machines than the job has"],
)
def test_the_scheduler_names_the_machine_of_rank_0_of_mpi(process, scheduler, host):
    assert read_task({**process, **scheduler}).host == host


def test_the_file_of_pbs_names_the_machine_of_rank_0_of_mpi(tmp_path):
    assert read_task({**HYDRA, **pbs(tmp_path, "p1", "p2")}).host == "p1"
    assert read_task({**HYDRA, "PBS_NODEFILE": "/not/mounted"}).host is None


def test_mpirun_inside_of_a_step_is_mpirun():
    """The daemons of mpirun are tasks of Slurm, and their children inherit Slurm's variables."""
    daemon = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NUM_TASKS": "2"}
    for process in (MPIRUN, HYDRA):
        assert read_task({**daemon, **process}).world_size == int(
            process.get("OMPI_COMM_WORLD_SIZE") or process["PMI_SIZE"]
        )


def test_launchers_that_agree_are_one():
    assert read_task({**HYDRA, **_OPEN_MPI}).cluster == "Open MPI"
    by_srun = {"PMI_RANK": "2", "PMI_SIZE": "4"}  # srun --mpi=pmi2
    assert read_task({**SRUN, **by_srun}) == read_task(SRUN)


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({**SRUN, **MPIRUN}, "OMPI_COMM_WORLD_RANK=1 of 2 and SLURM_PROCID=2 of 4 must agree"),
        ({**MPIRUN, **HYDRA}, "OMPI_COMM_WORLD_RANK=1 of 2 and PMI_RANK=3 of 4 must agree"),
        ({**JSRUN, **HYDRA, "PMI_RANK": "0"}, "JSM_NAMESPACE_RANK=3 of 4 and PMI_RANK=0 of 4 must"),
        (
            {**SRUN, "RANK": "0"},
            "RANK must be 2, as Slurm has set SLURM_PROCID=2 of 4, got 0; unset",
        ),
        (
            {**MPIRUN, "WORLD_SIZE": "1"},
            "WORLD_SIZE must be 2, as Open MPI has set .*, got 1; unset",
        ),
    ],
)
def test_launchers_that_disagree_are_refused_by_name(environment, text):
    with pytest.raises(WorldError, match=f"^init: {text}"):
        read_launch(environment)


@pytest.mark.parametrize(
    ("environment", "missing"),
    [
        (MPIRUN, "OMPI_COMM_WORLD_RANK"),
        (MPIRUN, "OMPI_COMM_WORLD_SIZE"),
        (MPIRUN, "OMPI_COMM_WORLD_LOCAL_RANK"),
        (MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        (HYDRA, "PMI_RANK"),
        (HYDRA, "PMI_SIZE"),
        (HYDRA, "MPI_LOCALRANKID"),
        (HYDRA, "MPI_LOCALNRANKS"),
        (JSRUN, "JSM_NAMESPACE_SIZE"),
        (JSRUN, "JSM_NAMESPACE_LOCAL_SIZE"),
    ],
)
def test_half_of_the_variables_is_refused_by_name(environment, missing):
    half = {name: value for name, value in environment.items() if name != missing}
    with pytest.raises(
        WorldError, match=f"^init: (Open MPI|MPICH|LSF) must set {missing}.*, got none"
    ):
        read_launch(half)


def test_a_script_may_export_the_rank_that_the_cluster_has_set():
    exported = read_launch({**SRUN, "RANK": "2", "WORLD_SIZE": "4", "MASTER_PORT": "7"})
    assert exported == Launch(2, 4, 0, 2, "n1", 7, False)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        SBATCH,
        {**SRUN, "SLURM_PTY_PORT": "42085"},
        {**SRUN, "SLURM_PTY_PORT": "42085", "PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
    ids=["no cluster", "the script of a job", "a shell by srun --pty", "with --mpi=pmi2"],
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
    inside |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert read_launch({**SRUN, **inside}).world_size == 1


def test_open_mpi_on_several_machines_needs_an_address():
    spread = {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(
        RuntimeError,
        match=r"init: MASTER_ADDR must be set .*mpirun -x MASTER_ADDR.*-genv MASTER_ADDR",
    ):
        read_launch(spread)
    assert read_launch({**spread, "MASTER_ADDR": "node7"}).host == "node7"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"SLURM_LOCALID": ""}, "Slurm must set SLURM_LOCALID, got none"),
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
