"""A world of `mpiexec`, the one that is found first, by `init` and by a launcher on each machine."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.support.processes import ROOT, free_port

MPIEXEC = shutil.which("mpiexec") or "mpiexec"
VERSION = subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True).stdout
IS_OPEN_MPI = "Open MPI" in VERSION
IS_MPICH = "HYDRA" in VERSION
SCRIPT = """
import os, accel_fn as af
state = af.init(device="cpu", timeout_s=100)
total = af.reduce_sum(state.rank + 1, state)
line = f"{state.rank} {state.world_size} {state.local_rank} {total}\\n"
os.write(1, line.encode())  # at once: mpiexec mixes the pieces of processes
"""
LAUNCH = ["-m", "accel_fn", "launch", "-n", "2", "--cpu", "script.py"]
HOSTS = ["-launcher", "fork", "-hosts", "127.0.0.2,127.0.0.3", "-ppn", "1"]
"""Options of MPICH, which starts the processes of two machines on this one."""


@pytest.fixture
def mpiexec(tmp_path):
    """Run python on some processes; return the lines that they print, and their errors."""
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(*options, count=2, python=("script.py",), **variables):
        beyond = ["--oversubscribe"] if IS_OPEN_MPI else []
        as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        done = subprocess.run(
            [MPIEXEC, *beyond, *options, "-n", str(count), sys.executable, *python],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), **as_root, **variables},
            capture_output=True,
            text=True,
            timeout=200,
        )
        return sorted(done.stdout.splitlines()), done.stderr

    return run


def test_processes_of_mpiexec_are_a_world(mpiexec):
    assert mpiexec()[0] == ["0 2 0 3", "1 2 1 3"]


def test_a_launcher_may_be_the_only_process_of_mpiexec(mpiexec):
    assert mpiexec(count=1, python=LAUNCH)[0] == ["0 2 0 3", "1 2 1 3"]


@pytest.mark.skipif(not IS_MPICH, reason="only MPICH starts several machines without ssh")
def test_processes_on_two_machines_need_the_address_of_the_first(mpiexec):
    assert "init: MASTER_ADDR must be set for 2 processes on several machines" in mpiexec(*HOSTS)[1]
    address = {"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(free_port())}
    assert mpiexec(*HOSTS, **address)[0] == ["0 2 0 3", "1 2 0 3"]


@pytest.mark.skipif(not IS_MPICH, reason="only MPICH starts several machines without ssh")
def test_launchers_on_two_machines_need_the_address_of_the_first(mpiexec):
    address = {"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(free_port())}
    assert mpiexec(*HOSTS, python=LAUNCH, **address)[0] == ["0 2 0 3", "1 2 0 3"]


@pytest.mark.skipif(not IS_MPICH, reason="only MPICH starts several machines without ssh")
def test_the_file_of_pbs_has_the_address_of_the_first(mpiexec, tmp_path):
    (tmp_path / "nodes").write_text("127.0.0.2\n127.0.0.3\n")
    job = {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_JOBID": "1", "PBS_NODENUM": "0"}
    port = {"MASTER_PORT": str(free_port())}
    assert mpiexec(*HOSTS, **job, **port)[0] == ["0 2 0 3", "1 2 0 3"]
