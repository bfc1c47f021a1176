"""`accel-fn env`: the facts for a bug report, on a working machine and on a broken one."""

import json
import os
import platform
import resource
import socket
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from accel_fn.cli import env as command
from tests.cli.commands import ROOT, run_command


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("env")
    (folder / "accel_fn.yaml").write_text("cpu: true\n")
    done = run_command(
        folder, "env", "--json",
        RANK="1", NCCL_DEBUG="INFO", ACCEL_FN_CPU="1", TORCH_TOKEN="t0ps3cret", UNRELATED="kept out",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"folder": folder, "text": done.stdout}


def test_versions_are_those_that_are_installed(report):
    python = report["versions"].pop("python")
    assert python == f"{platform.python_version()} ({sys.executable})"
    assert report["versions"] == {
        name: metadata.version(name) for name in ("accel-fn", "torch", "numpy")
    }
    assert report["requirements"]["accel-fn"]["click"] == metadata.version("click")
    extras = {"deepspeed", "examples", "float8", "migrate", "plots", "testing", "transformers"}
    assert set(report["requirements"]) == {"accel-fn", *extras}


def test_the_report_has_what_torch_collects(report):
    assert report["torch"]["torch_version"] == torch.__version__
    assert report["torch"]["is_cuda_available"] == str(torch.cuda.is_available())
    assert int(report["torch"]["cpu"]["CPU(s)"]) == os.cpu_count()


def test_the_machine_is_this_one(report):
    usable = report["processor"]
    assert 1 <= usable["usable_cores"] <= usable["usable_threads"] <= os.cpu_count()
    assert usable["numa_nodes"] >= 1
    assert report["memory"]["total"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert report["network_interfaces"] == [name for _, name in socket.if_nameindex()]


def test_variables_of_a_launch_are_shown_and_neither_secrets_nor_others(report):
    assert {"RANK": "1", "NCCL_DEBUG": "INFO", "ACCEL_FN_CPU": "1"}.items() <= report[
        "variables"
    ].items()
    assert "t0ps3cret" not in report["text"]
    assert "UNRELATED" not in report["text"]


def test_the_file_of_settings_is_named(report):
    assert Path(report["configuration"]["file"]) == report["folder"] / "accel_fn.yaml"
    assert report["configuration"]["user_file"] is None


def test_a_torch_that_is_broken_is_a_line_of_the_report(tmp_path):
    broken = tmp_path / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libcudart.so.12: cannot open')\n")
    paths = os.pathsep.join([str(broken.parent), str(ROOT)])
    done = run_command(tmp_path, "env", PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())  # a long path of this Python wraps its line
    assert "ImportError: libcudart.so.12: cannot open (exit 1)" in words
    assert f" python {platform.python_version()} (" in words


def test_a_torch_that_crashes_or_hangs_is_a_line_too(tmp_path, monkeypatch):
    def python(script):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    assert command.probe_torch(python("kill -SEGV $$")) == {"error": "signal 11"}
    monkeypatch.setattr(command, "_TORCH_WITHIN_S", 0.2)
    assert command.probe_torch(python("exec sleep 5")) == {"error": "no answer within 0.2 s"}


def test_a_part_that_cannot_be_found_out_is_its_error(monkeypatch):
    def refuse():
        raise PermissionError("no /proc here")

    monkeypatch.setattr(command, "_processor", refuse)
    monkeypatch.setattr(command, "probe_torch", dict)
    found = command.collect({})
    assert found["processor"] == {"error": "PermissionError('no /proc here')"}
    assert found["memory"]["total"] > 0


def test_the_report_is_printed_in_80_columns_with_hanging_indents():
    report = {
        "requirements": {"examples": {f"package{number}": "1.0" for number in range(9)}},
        "memory": {"total": 3 * 2**30},
        "topology": "     GPU0\nGPU0  X",
        "network_interfaces": [],
        "variables": {"OMP_NUM_THREADS": "1"},
    }
    lines = list(command._lines(report))
    assert lines[0] == "requirements"
    assert lines[1].splitlines()[0].startswith("  examples                     package0 1.0, ")
    assert lines[1].splitlines()[1].startswith(" " * 31 + "package")
    assert max(map(len, "\n".join(lines).splitlines())) <= 80
    assert "  total                        3.00 GiB" in lines
    assert "  GPU0  X" in lines
    assert lines[lines.index("network interfaces") + 1] == "  -"
    assert "  OMP_NUM_THREADS              1" in lines


@pytest.mark.parametrize(
    "command", ["checkpoints", "config", "env", "estimate", "explain", "export", "test"]
)
def test_help_is_quick_and_needs_no_torch(tmp_path, command):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_command(tmp_path, command, "--help", PYTHONPATH=paths)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: accel-fn {command} [OPTIONS]")
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used_s < 0.5  # CPU time, since other processes may keep the machine busy


def test_settings_are_shown_without_torch_or_pydantic_in_the_help(tmp_path):
    modules = "torch.py", "pydantic.py"
    for name, arguments in zip(modules, (["--show"], ["--help"]), strict=True):
        (tmp_path / name).write_text("raise SystemExit('it was imported')\n")
        paths = os.pathsep.join([str(tmp_path), str(ROOT)])
        done = run_command(tmp_path, "config", *arguments, PYTHONPATH=paths)
        assert done.returncode == 0, done.stderr
