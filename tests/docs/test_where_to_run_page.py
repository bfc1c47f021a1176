"""docs/where-to-run.md: its files start worlds, with programs in the place of srun and ssh that
start the processes on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from tests.cli.commands import ROOT, surroundings
from tests.support.processes import free_port

PAGE = (ROOT / "docs" / "where-to-run.md").read_text(encoding="utf-8")
HOSTS = "127.0.0.2", "127.0.0.3"
TRAIN = """
import os, sys, accel_fn as af
state = af.init(device="cpu", timeout_s=100)
total = af.reduce_sum(state.rank + 1, state)
line = f"{state.rank} {state.world_size} {state.local_rank} {total} {sys.argv[1:]}\\n"
with open(os.path.join(os.environ["SEEN"], str(state.rank)), "w") as file:
    file.write(line)
"""
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
command = [each for each in sys.argv[1:] if not each.startswith(("--cpus", "--kill"))]
num_nodes, per_node = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
tasks = []
for rank in range(num_nodes * per_node):
    variables = {{
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "127.0.0.[2-3]",
        "SLURM_STEP_NUM_NODES": num_nodes,
        "SLURM_STEP_NUM_TASKS": num_nodes * per_node,
        "SLURM_STEP_TASKS_PER_NODE": f"{{per_node}}(x{{num_nodes}})",
        "SLURM_PROCID": rank,
        "SLURM_NODEID": rank // per_node,
        "SLURM_LOCALID": rank % per_node,
    }}
    text = {{name: str(value) for name, value in variables.items()}}
    tasks.append(subprocess.Popen(command, env={{**os.environ, **text}}))
sys.exit(max(task.wait() for task in tasks))
"""
SSH = """#!/bin/sh
shift 2
exec sh -c "$*"
"""
"""As ssh does, it has a shell run its arguments, joined: here, after `-tt` and the host."""


def section(heading: str) -> str:
    """Return the text below a heading, up to the next one of any depth."""
    text = PAGE[PAGE.index(f"# {heading}\n") :]
    return re.split(r"^##+ ", text.partition("\n")[2], flags=re.MULTILINE)[0]


def block(heading: str, language: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```$", section(heading), re.DOTALL | re.MULTILINE)
    (text,) = found
    return str(text)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with train.py, an environment to activate, and programs for srun, ssh and accel-fn."""
    folder = tmp_path / "project"
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    (tmp_path / "seen").mkdir()
    (folder / "train.py").write_text(TRAIN)
    (programs / "activate").write_text("")
    for name, text in (
        ("srun", SRUN),
        ("ssh", SSH),
        ("accel-fn", f'#!/bin/sh\nexec "{sys.executable}" -m accel_fn "$@"\n'),
        ("python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return folder


def run(project: Path, command: Sequence[str], *machines: Mapping[str, str]) -> list[str]:
    """Run a command on each machine, with its variables; return what each rank has written, in order."""
    home = project.parent
    path = f"{project / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": path, "SEEN": str(home / "seen"), "ACCEL_FN_NUM_PROCESSES": "2"}
    own |= {"ACCEL_FN_CPU": "true", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            command,
            cwd=project,
            env=surroundings(home, **own, **variables),
            stderr=subprocess.PIPE,
            text=True,
        )
        for variables in machines
    ]
    errors = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0] * len(machines), errors
    return [file.read_text().rstrip() for file in sorted((home / "seen").iterdir())]


def run_batch_script(project: Path, heading: str, tasks_per_node: str) -> list[str]:
    script = project / "train.sbatch"
    script.write_text(block(heading, "bash"))
    slurm = {"SLURM_SUBMIT_DIR": str(project), "SLURM_CPUS_PER_TASK": "1", "SLURM_NNODES": "2"}
    slurm |= {"SLURM_JOB_ID": "7", "SLURM_NTASKS_PER_NODE": tasks_per_node}
    return run(project, ["bash", str(script)], slurm)


@pytest.mark.slow
def test_the_batch_script_of_launchers_starts_one_world(project: Path) -> None:
    assert run_batch_script(project, "One task per machine", "1") == ["0 2 0 3 []", "1 2 0 3 []"]


@pytest.mark.slow
def test_the_batch_script_of_ranks_starts_one_world(project: Path) -> None:
    seen = run_batch_script(project, "One task per rank", "2")
    assert seen == ["0 4 0 10 []", "1 4 1 10 []", "2 4 0 10 []", "3 4 1 10 []"]


@pytest.mark.slow
def test_the_script_by_ssh_starts_one_world(project: Path) -> None:
    script = block("Machines by ssh", "bash").replace("cd project", f"cd {project}")
    (project / "by_ssh.sh").write_text(script)
    seen = run(project, ["bash", "by_ssh.sh", *HOSTS], {})
    assert seen == ["0 2 0 3 []", "1 2 0 3 []"]


@pytest.mark.slow
def test_each_pod_of_the_manifest_is_a_machine(project: Path) -> None:
    manifest = yaml.safe_load(block("Kubernetes", "yaml"))
    (job,) = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    name = manifest["metadata"]["name"]
    assert variables["MASTER_ADDR"] == f"{name}-{job['name']}-0-0.{name}"
    assert spec["completions"] == spec["parallelism"] == int(variables["PET_NNODES"])
    variables["MASTER_ADDR"] = HOSTS[0]
    pods = [{"JOB_COMPLETION_INDEX": index, **variables} for index in "01"]
    seen = run(project, container["command"], *pods)
    assert seen == ["0 2 0 3 []", "1 2 0 3 []"]


@pytest.mark.slow
def test_the_entry_point_of_sagemaker_is_a_machine(project: Path) -> None:
    (project / "launch.sh").write_text(block("SageMaker", "sh"))
    hosts = [{"SM_HOSTS": json.dumps(HOSTS), "SM_CURRENT_HOST": host} for host in HOSTS]
    seen = run(project, ["sh", "launch.sh", "--epochs", "3"], *hosts)
    arguments = "['--epochs', '3']"
    assert seen == [f"0 2 0 3 {arguments}", f"1 2 0 3 {arguments}"]
