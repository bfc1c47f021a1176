"""docs/machines.md: the batch script, the manifest, and the script that resumes after a restart
work."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.commands import ROOT, SRUN, run_command, surroundings

PAGE = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
SRUN_HERE = {**SRUN, "SLURM_STEP_NODELIST": "localhost,other"}


def block(language: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return str(text)


def run_in_shell(command: str, folder: Path, **variables: str) -> str:
    """Run a command in a shell in which `accel-fn` is this one; return what it prints."""
    command = command.replace("accel-fn ", f"{sys.executable} -m accel_fn.cli ")
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=folder,
        env=surroundings(folder, **variables),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_batch_script_is_one_and_its_launch_finds_its_place_in_the_job(tmp_path: Path) -> None:
    script = block("bash")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    launch = script[script.index("accel-fn launch") :].replace("launch", "launch --cpu --dry-run")
    (tmp_path / "train.py").touch()
    told = run_in_shell(launch, tmp_path, **SRUN_HERE)
    assert re.search(r"\bRANK +1\b", told)
    assert re.search(r"\bWORLD_SIZE +2\b", told)
    assert re.search(r"\bMASTER_ADDR +localhost\b", told)


@pytest.mark.parametrize("index", [0, 1])
def test_the_command_of_the_manifest_makes_each_pod_a_machine(tmp_path: Path, index: int) -> None:
    manifest = yaml.safe_load(block("yaml"))
    (job,) = manifest["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    shell, _, command = container["command"]
    assert (shell, pods["completions"]) == ("sh", 2)
    first = f"{manifest['metadata']['name']}-{job['name']}-0-0.{manifest['metadata']['name']}"
    assert f" {first} " in command
    (tmp_path / "train.py").touch()
    command = command.replace(first, "localhost").replace("launch ", "launch --cpu --dry-run ")
    told = run_in_shell(command, tmp_path, JOB_COMPLETION_INDEX=str(index))
    assert re.search(rf"\bGROUP_RANK +{index}\b", told)
    assert re.search(r"\bWORLD_SIZE +2\b", told)


@pytest.mark.slow
def test_a_run_that_is_killed_and_restarted_ends_as_one_that_was_not(tmp_path: Path) -> None:
    script = next(text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    killed = script.replace("import torch\n", "import os\nimport torch\n", 1) + (
        "        if state.step == 5 and state.rank and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        f"            os.kill(os.getpid(), {signal.SIGKILL:d})\n"
    )
    ends = []
    for name, text in (("whole", script), ("killed", killed)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(text)
        options = ["-n", "2", "--cpu", "--max-restarts", "1"]
        done = run_command(folder, "launch", *options, "train.py", timeout_s=250)
        assert done.returncode == 0, done.stderr
        (file,) = folder.glob("saved/step_00000008/tensors_00000.bin")
        ends.append((done.stderr, file.read_bytes()))
    (quiet, whole), (told, kept) = ends
    assert quiet == ""
    restarted = r"accel-fn launch: restart 1 of 1: rank 1 .*: SIGKILL: .*\n"
    assert re.fullmatch(rf"{restarted}the run resumes at step 5, from .*step_00000005\n", told)
    assert kept == whole
