"""The command `env`: collect and print the facts for a bug report."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from accel_fn.cli.output import at_work, json_option, print_json, readable_bytes, wrapped
from accel_fn.launcher.hardware import read_processors
from accel_fn.launcher.settings import SETTINGS_FILE, user_file

_TORCH_WITHIN_S = 60
_PROBE = """
import json, torch
from torch.utils.collect_env import get_env_info
found = {name: value for name, value in get_env_info()._asdict().items() if value}
lines = (found.pop("cpu_info", None) or "").splitlines()
found["cpu"] = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)
                if not key.startswith(("Flags", "Vulnerab"))}
print(json.dumps(found))
"""
_DEVICES = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
_VARIABLES = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_(ADDR|PORT)"
    r"|(ACCEL_FN|ACCELERATE|TORCHELASTIC|TORCH|PYTORCH|NCCL|GLOO|OMP|MKL|KMP|GOMP)_\w+"
    r"|(CUDA|HIP|ROCR)_(VISIBLE_DEVICES|LAUNCH_BLOCKING|DEVICE_ORDER)"
    r"|SLURM_(JOB_ID|PROCID|LOCALID|NODEID|NTASKS|NNODES|JOB_NODELIST|STEP_\w+|TASKS_PER_NODE)"
    r"|OMPI_COMM_WORLD_\w+|PMI_(RANK|SIZE)|PMI_LOCAL_\w+|MPI_LOCAL\w+|JSM_NAMESPACE_\w+|LSB_(JOBID|MCPU_HOSTS)"
    r"|PBS_(JOBID|NODEFILE|NODENUM)|PET_\w+|JOB_COMPLETION_INDEX|LWS_\w+|SM_(HOSTS|CURRENT_HOST|NUM_GPUS)"
    r"|CLUSTER_SPEC|AZUREML_NODE_COUNT|AZ_BATCH_MASTER_NODE|NODE_RANK|MALLOC_\w+|LD_PRELOAD"
)
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD")
_NAME_WIDTH = 28


@click.command()
@json_option()
def env(*, as_json: bool) -> None:
    """Print the facts for a bug report: versions, machine, devices, variables.

    Torch is imported in another process, so that a broken torch is a line of the report. Only
    environment variables that launchers and torch read are shown.
    """
    with at_work("collecting"):
        report = collect()
    if as_json:
        print_json(report)
    else:
        click.echo("\n".join(_lines(report)))


def collect(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Collect the parts of the report as values for JSON; if a part fails, its error takes its place."""
    parts: dict[str, Callable[[], Any]] = {
        "versions": _versions,
        "requirements": _requirements,
        "torch": probe_torch,
        "processor": _processor,
        "memory": _memory,
        "driver": lambda: _nvidia_smi(*_DEVICES),
        "topology": lambda: _nvidia_smi("topo", "-m"),
        "network_interfaces": lambda: [name for _, name in socket.if_nameindex()],
        "variables": lambda: dict(sorted(_set_variables(environment))),
        "configuration": lambda: _configuration(environment),
    }
    return {name: _part(find) for name, find in parts.items()}


def _part(find: Callable[[], Any]) -> Any:
    try:
        return find()
    except Exception as error:
        # An incomplete report is better than no report.
        return {"error": repr(error)}


def _versions() -> dict[str, str | None]:
    names = ("accel-fn", "torch", "numpy")
    own = f"{platform.python_version()} ({sys.executable})"
    return {"python": own, **{name: version(name) for name in names}}


def version(distribution: str) -> str | None:
    """Read the installed version from its metadata, without an import; None if not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _requirements() -> dict[str, dict[str, str | None]]:
    """Return the requirements of the package and of each extra, with the installed versions."""
    try:
        lines = metadata.requires("accel-fn") or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, dict[str, str | None]] = {}
    for line in lines:
        [(name, extra)] = re.findall(r"^([\w.-]+)(?:.*\bextra\s*==\s*['\"]([\w-]+))?", line)
        # The extra `all` only repeats the other extras.
        if extra != "all":
            found.setdefault(extra or "accel-fn", {})[name] = version(name)
    return found


def probe_torch(python: str = sys.executable) -> dict[str, Any]:
    """Run torch.utils.collect_env in another Python, since torch may crash; return its report."""
    try:
        done = subprocess.run(
            [python, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_TORCH_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {_TORCH_WITHIN_S} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
        return {"error": f"{lines[-1]} ({how})" if lines else how}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _processor() -> dict[str, int]:
    usable = read_processors()
    return {
        "usable_cores": usable.cores,
        "usable_threads": sum(map(len, usable.nodes)),
        "numa_nodes": len(usable.nodes),
    }


def _memory() -> dict[str, int]:
    """Return the machine's memory, and the limit of the cgroup if there is one, in bytes."""
    found = {"total": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
    # Without a limit, the file holds "max".
    with contextlib.suppress(OSError, ValueError):
        found["limit"] = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8"))
    return found


def _nvidia_smi(*arguments: str) -> str | None:
    """Return the output or error of `nvidia-smi`, which works without torch; None if not installed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        command = [program, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi failed: {error}"
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).rstrip()


def _set_variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the variables that change how ranks start and run, without those that may be secret."""
    for name, value in environment.items():
        if _VARIABLES.fullmatch(name) and not _SECRET.search(name):
            yield name, value


def _configuration(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Return the settings files that `accel-fn launch` would read from here."""
    own = user_file(environment)
    files = (
        folder / name
        for folder in (Path.cwd(), *Path.cwd().parents)
        for name in (SETTINGS_FILE, "pyproject.toml")
        if (folder / name).is_file()
    )
    has_settings = (
        file
        for file in files
        if file.name == SETTINGS_FILE or "[tool.accel_fn]" in file.read_text(errors="replace")
    )
    return {
        "file": next(map(str, has_settings), None),
        "user_file": str(own) if own is not None and own.is_file() else None,
    }


def _lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the report, with a section for each part; a missing value is `-`."""
    for section, content in report.items():
        yield section.replace("_", " ")
        if isinstance(content, dict):
            for name, value in content.items():
                yield from _entry(name if section == "variables" else name.replace("_", " "), value)
        else:
            yield from (f"  {line}" for line in _shown(section, content).splitlines())
        yield ""


def _entry(name: str, value: Any) -> Iterator[str]:
    """Yield the lines for a name and its value. A value of several lines begins below the name."""
    if isinstance(value, dict):
        value = ", ".join(f"{each} {_shown(each, part)}" for each, part in value.items())
    lines = _shown(name, value).splitlines()
    if len(lines) > 1:
        yield f"  {name}"
        yield from (f"    {line}" for line in lines)
    else:
        yield wrapped(f"  {name:<{_NAME_WIDTH}} ", "".join(lines))


def _shown(name: str, value: Any) -> str:
    if value is None or value == []:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return readable_bytes(value) if name in ("total", "limit") else str(value)
