"""`accel-fn env`: the facts for a bug report, on a working machine and on a broken one."""

import json
import os
import platform
import re
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.cli.commands import ROOT, command


def with_torch(folder, source):
    """Return a path on which torch is this file, in place of the real one."""
    package = folder / "broken" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source)
    return os.pathsep.join([str(package.parent), str(ROOT)])


# as torch.utils.collect_env answers
WHOLE = """
from collections import namedtuple

info = namedtuple("Info", ["torch_version", "cpu_info", "empty"])("2.0", "CPU(s): 3\\nFlags: sse", None)
sys.modules["torch.utils.collect_env"] = types.SimpleNamespace(get_env_info=lambda: info)
sys.modules["torch.utils"] = types.ModuleType("torch.utils")
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("env")
    (folder / "accel_fn.yaml").write_text("cpu: true\n")
    done = command(
        folder, "env", "--json", PYTHONPATH=with_torch(folder, f"import sys, types\n{WHOLE}"),
        RANK="1", NCCL_DEBUG="INFO", ACCEL_FN_CPU="1", TORCH_TOKEN="t0ps3cret", UNRELATED="kept out",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout) | {"folder": folder, "text": done.stdout}


def test_versions_are_those_that_are_installed(report):
    python = report["versions"].pop("python")
    assert python == f"{platform.python_version()} ({sys.executable})"
    assert report["versions"] == {
        name: metadata.version(name) for name in ("accel-fn", "torch", "numpy")
    }
    assert report["requirements"]["accel-fn"]["click"] == metadata.version("click")
    extras = re.findall(r"extra == .(\w+)", "\n".join(metadata.requires("accel-fn")))
    assert set(report["requirements"]) == {"accel-fn", *extras} - {"all"}


def test_the_report_is_of_this_machine(report):
    assert report["torch"] == {"torch_version": "2.0", "cpu": {"CPU(s)": "3"}}
    usable = report["processor"]
    assert 1 <= usable["usable_cores"] <= usable["usable_threads"] <= os.cpu_count()
    assert usable["numa_nodes"] >= 1
    assert report["memory"]["total"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert report["network_interfaces"] == [name for _, name in socket.if_nameindex()]


def test_variables_of_a_launch_are_shown_and_neither_secrets_nor_others(report):
    shown = {"RANK": "1", "NCCL_DEBUG": "INFO", "ACCEL_FN_CPU": "1"}
    assert shown.items() <= report["variables"].items()
    assert "t0ps3cret" not in report["text"]
    assert "UNRELATED" not in report["text"]


def test_the_file_of_settings_is_named(report):
    assert Path(report["configuration"]["file"]) == report["folder"] / "accel_fn.yaml"
    assert report["configuration"]["user_file"] is None


BROKEN = "raise ImportError('libcudart.so.12: cannot open')\n"


def test_a_report_has_80_columns_with_hanging_indents_and_a_line_for_a_broken_torch(tmp_path):
    driver = tmp_path / "nvidia-smi"
    driver.write_text(
        '#!/bin/sh\n[ "$1" != topo ] || printf "\\033[4m     GPU0\\033[0m\\nGPU0  X\\n"\n'
    )
    driver.chmod(0o755)
    paths = {"PYTHONPATH": with_torch(tmp_path, BROKEN), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = command(tmp_path, "env", **paths)
    assert done.exit_code == 0, done.stderr
    words = " ".join(done.stdout.split())  # a long path of this Python wraps its line
    assert "ImportError: libcudart.so.12: cannot open (exit 1)" in words
    assert f" python {platform.python_version()} (" in words
    lines = done.stdout.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("  examples   "))
    assert lines[start][31:32].isalpha()
    assert lines[start + 1].startswith(" " * 31) != lines[start + 1].startswith(" " * 32)
    assert max(len(line) for line in lines if "/" not in line) <= 80  # a path is not broken
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    assert f"  total                        {total:.2f} GiB" in lines
    assert "network interfaces" in lines
    assert lines[lines.index("topology") + 1 :][:2] == ["       GPU0", "  GPU0  X"]
    assert "  user file                    -" in lines
    assert "  OMP_NUM_THREADS              1" in lines


def test_a_torch_that_crashes_is_a_line_too(tmp_path):
    paths = with_torch(tmp_path, "import os; os.kill(os.getpid(), 11)\n")
    found = json.loads(command(tmp_path, "env", "--json", PYTHONPATH=paths).stdout)
    assert found["torch"] == {"error": "signal 11"}


def test_a_part_that_cannot_be_found_out_is_its_error(tmp_path, monkeypatch):
    def never(given, **options):
        assert options["timeout"] in (20, 60)
        raise subprocess.TimeoutExpired(given, options["timeout"])

    def refuse(pid):
        raise PermissionError("no /proc here")

    monkeypatch.setattr(subprocess, "run", never)
    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    found = json.loads(command(tmp_path, "env", "--json").stdout)
    assert found["torch"] == {"error": "no answer within 60 s"}
    assert found["processor"] == {"error": "PermissionError('no /proc here')"}
    assert found["memory"]["total"] > 0
