"""The plan of a launch, from settings, environment and machine."""

import tempfile

import pytest

from accel_fn.errors import WorldError
from accel_fn.launcher.hardware import Processors
from accel_fn.launcher.machines import Machines, place
from accel_fn.launcher.plan_launch import glibc_version, launch_variables, plan_launch
from tests.cli.commands import run_python
from tests.parallel.test_tasks import MPIRUN, SBATCH, SRUN, pbs
from tests.support.launch_settings import Machine, Settings, resolve

ONE_A_NODE = {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
ONE_A_NODE |= {"SLURM_PROCID": "1", "MASTER_ADDR": "127.0.0.1"}
POD = {  # as Kubeflow's PyTorchJob sets them
    "PET_NNODES": "3",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_MASTER_ADDR": "127.0.0.1",
    "PET_MASTER_PORT": "23456",
}


def placed(tmp_path, environment=None, **flags):
    variables = {"HOME": str(tmp_path), **(environment or {})}
    machine = Machine(num_cores=4)
    found = resolve(flags, environment=variables, folder=tmp_path, machine=machine)
    return place(found, variables)


def seen(machines):
    return machines.num_machines, machines.machine_rank, machines.num_local, machines.host


def test_alone_it_is_one_process_at_a_free_port(tmp_path):
    machines = placed(tmp_path)
    assert (*seen(machines), machines.port) == (1, 0, 1, "127.0.0.1", 0)
    assert seen(placed(tmp_path, SBATCH)) == seen(machines)  # a batch script is a world of one


def test_a_launch_without_a_temporary_folder_is_refused_before_torch_is_imported(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    (tmp_path / "script.py").touch()
    found = resolve({}, environment={}, folder=tmp_path, machine=Machine(num_cores=4))
    text = r"^launch: temporary folder must be one to write to, got: .*missing.*; set TMPDIR$"
    with pytest.raises(WorldError, match=text):
        plan_launch(found, "script", str(tmp_path / "script.py"), (), {})


def test_processes_are_counted_over_all_machines(tmp_path):
    flags = {"num_processes": 6, "num_machines": 2, "machine_rank": 1}
    machines = placed(tmp_path, main_process_ip="127.0.0.2", **flags)
    assert seen(machines) == (2, 1, 3, "127.0.0.2")
    assert (machines.num_processes, machines.port) == (6, 29500)


def test_slurm_needs_no_flag(tmp_path):
    machines = placed(tmp_path, ONE_A_NODE, num_processes=4)
    assert seen(machines) == (2, 1, 2, "127.0.0.1")
    assert machines.job == "1.0"
    assert 20000 <= machines.port < 32000
    assert machines.why["num_machines"] == "Slurm"


def test_kubernetes_needs_no_flag(tmp_path):
    machines = placed(tmp_path, POD)
    assert (*seen(machines), machines.port) == (3, 2, 4, "127.0.0.1", 23456)
    assert seen(placed(tmp_path, {**POD, "PET_NPROC_PER_NODE": "auto"}))[2] == 1
    assert seen(placed(tmp_path, POD, num_processes=3))[2] == 1  # the flag overrides the variable


def test_the_index_of_a_pod_may_be_passed_by_flags(tmp_path):
    environment = {"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "127.0.0.1"}
    machines = placed(tmp_path, environment, num_machines=2, machine_rank=1, num_processes=2)
    assert seen(machines) == (2, 1, 1, "127.0.0.1")


def test_two_jobs_of_pbs_with_a_machine_each_may_be_one_launch(tmp_path):
    flags = {"num_processes": 2, "num_machines": 2, "machine_rank": 1}
    machines = placed(tmp_path, pbs(tmp_path, "p1"), main_process_ip="127.0.0.2", **flags)
    assert seen(machines) == (2, 1, 1, "127.0.0.2")


def test_an_mpi_may_leave_machines_out_that_pbs_has_given(tmp_path):
    alone = {**MPIRUN, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}
    alone |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    job = {**pbs(tmp_path, "p1", "p2"), "PBS_NODENUM": "0"}
    assert seen(placed(tmp_path, {**job, **alone}))[:2] == (1, 0)


@pytest.mark.parametrize(
    ("environment", "flags", "text"),
    [
        (SRUN, {}, "Slurm must start one launcher on each machine, got 2 on this one"),
        (MPIRUN, {}, "Open MPI must start one launcher on each machine, got 2"),
        (
            ONE_A_NODE,
            {"num_machines": 3, "num_processes": 3},
            r"num_machines must be 2, as Slurm has set it, got 3 \(flag --num-machines\)",
        ),
        (
            ONE_A_NODE,
            {"num_machines": 2, "machine_rank": 0},
            r"machine_rank must be 1, as Slurm has set it, got 0 \(flag --machine-rank\)",
        ),
        (ONE_A_NODE, {"num_processes": 3}, "num_processes must be a multiple of the 2 machines, got 3"),
        ({**ONE_A_NODE, "MASTER_ADDR": "no-such.invalid"}, {},
         r"main_process_ip must be a host that resolves, got 'no-such.invalid' \(MASTER_ADDR; "),
        (
            {**ONE_A_NODE, **POD},
            {},
            r"SLURM_PROCID \(machine 1 of 2\) and PET_NNODES \(machine 2 of 3\) must agree; unset",
        ),
        (
            POD,
            {"num_machines": 1},
            r"num_machines must be 3, as Kubernetes has set it, got 1 .*; leave it out, or unset PET_NNODES",
        ),
        (
            {"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "127.0.0.1"},
            {},
            "PET_NNODES must be set with JOB_COMPLETION_INDEX and MASTER_ADDR, got none; it is the number",
        ),
        ({**POD, "PET_NNODES": "1:3"}, {}, "PET_NNODES must be one number of machines, got '1:3'"),
        ({**POD, "PET_NNODES": "abc"}, {}, "PET_NNODES must be a number >= 1, got 'abc'"),
        ({"PET_NNODES": "2"}, {}, "Kubernetes must set PET_NODE_RANK or .*, got none"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1"}, {},
         "main_process_ip must be given if no variable holds it, with 2 machines"),
        ({"PET_NNODES": "0"}, {}, "PET_NNODES must be a number >= 1, got '0'"),
        ({**POD, "PET_NODE_RANK": "x"}, {}, "PET_NODE_RANK must be a number from 0 to 2, got 'x'"),
        ({**POD, "PET_NODE_RANK": "3"}, {}, "PET_NODE_RANK must be a number from 0 to 2, got '3'"),
        ({**POD, "PET_NODE_RANK": "", "RANK": "-1"}, {}, "RANK must be a number from 0 to 2, got '-1'"),
        ({**POD, "PET_MASTER_PORT": "zz"}, {}, "PET_MASTER_PORT must be a number from 1 to 65535, got 'zz'"),
        ({**POD, "MASTER_PORT": "65536"}, {}, "MASTER_PORT must be a number from 1 to 65535, got '65536'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path, environment, flags, text):
    with pytest.raises(RuntimeError, match=f"launch: {text}"):
        placed(tmp_path, environment, **flags)


def given(environment=None, *, cores=8, num_local=2, num_machines=1, host="127.0.0.1", **settings):
    machines = Machines(num_machines, 0, num_local, host, 0, "static", None, {})
    processors = Processors(cores, (tuple(range(cores)),))
    found = launch_variables(Settings(**settings), machines, processors, environment or {})
    return {each.name: each.value for each in found}


@pytest.mark.parametrize(
    ("cores", "num_local", "threads"), [(8, 2, "4"), (7, 2, "3"), (2, 4, "1"), (8, 1, "8")]
)
def test_processes_share_the_cores(cores, num_local, threads):
    assert given(cores=cores, num_local=num_local)["OMP_NUM_THREADS"] == threads


def test_threads_are_those_of_the_setting_else_of_the_variable():
    assert given({"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"
    asked = given({"OMP_NUM_THREADS": "3"}, threads_per_process=5)
    assert asked["OMP_NUM_THREADS"] == "5"


def test_the_allocator_keeps_memory_unless_its_variables_are_set():
    found = given()
    assert found["MALLOC_TRIM_THRESHOLD_"] == str(2**32)
    assert int(found["MALLOC_MMAP_THRESHOLD_"]) >= 2**25
    assert given({"MALLOC_TRIM_THRESHOLD_": "7"})["MALLOC_TRIM_THRESHOLD_"] == "7"
    other = given({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"})
    assert not any(name.startswith("MALLOC") for name in other)


@pytest.mark.skipif(glibc_version() is None, reason="only glibc reads these variables")
def test_the_allocator_takes_these_values(tmp_path):
    """If one value is refused, the other one is harmful."""
    found = given()
    code = (
        "import ctypes, sys; libc = ctypes.CDLL(None);"
        "assert libc.mallopt(-3, int(sys.argv[1])) == 1 and libc.mallopt(-1, 2**31 - 1) == 1"
    )
    done = run_python(tmp_path, "-c", code, found["MALLOC_MMAP_THRESHOLD_"])
    assert done.returncode == 0, done.stderr


def test_settings_of_training_and_devices_are_variables():
    found = given(
        mixed_precision="bf16",
        num_microbatches=4,
        wrap="fsdp",
        timeout_s=2.5,
        cpu=True,
        mesh="tp=2",
    )
    assert found["ACCEL_FN_MESH"] == "tp=2"
    assert found["ACCEL_FN_WRAP"] == "fsdp"
    assert found["ACCEL_FN_MIXED_PRECISION"] == "bf16"
    assert found["ACCEL_FN_NUM_MICROBATCHES"] == "4"
    assert found["ACCEL_FN_TIMEOUT_S"] == "2.5"
    assert found["ACCEL_FN_DEVICE"] == "cpu"
    assert given(gpu_ids=(2, 0))["CUDA_VISIBLE_DEVICES"] == "2,0"
    assert not any(name.startswith(("ACCEL_FN", "CUDA")) for name in given())


def test_several_machines_use_the_interface_towards_the_first():
    assert given(num_machines=2)["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in given(num_machines=1)
    set_already = given({"GLOO_SOCKET_IFNAME": "ib0"}, num_machines=2)
    assert set_already["GLOO_SOCKET_IFNAME"] == "ib0"
