"""The cores and accelerators of this machine are detected."""

import os

import pytest
import torch

from accel_fn.launcher.hardware import (
    detect,
    list_gpus,
    visible_devices,
)

TWO_LISTED = ["GPU-aaaa", "GPU-abbb"]
LISTING = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 1g.5gb      Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 1g.5gb      Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-80e1a4a1-7a33-4b0e-a3b5-f1a5d2f0b0a1)
"""


@pytest.mark.parametrize(("code", "found"), [(0, ["GPU-5d5b", "GPU-80e1"]), (9, [])])
def test_the_listing_of_the_driver_is_read_unless_it_fails(tmp_path, monkeypatch, code, found):
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n[ "$1" = -L ] && /bin/cat <<END\n{LISTING}END\nexit {code}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [each[:8] for each in list_gpus()] == found


@pytest.mark.parametrize(
    ("variable", "visible"),
    [
        (None, ["GPU-aaaa", "GPU-abbb"]),
        ("", []),
        ("-1", []),
        ("1", ["GPU-abbb"]),
        ("1,0", ["GPU-abbb", "GPU-aaaa"]),
        ("0,7,1", ["GPU-aaaa"]),
        ("GPU-ab", ["GPU-abbb"]),
        ("GPU-a", []),
        ("1,1", []),
        ("0,GPU-aa", []),
        ("0, 1", ["GPU-aaaa", "GPU-abbb"]),
        ("MIG-cba6", ["MIG-cba6"]),
    ],
)
def test_visible_devices_are_those_that_cuda_would_show(variable, visible):
    assert visible_devices(TWO_LISTED, variable) == visible


def test_detection_agrees_with_torch_on_this_machine():
    machine = detect()
    assert machine.num_cores == len(os.sched_getaffinity(0))
    present = torch.accelerator.current_accelerator()
    if present is None or present.type == "mps":
        assert (machine.num_devices, machine.devices) == (0, "no accelerator")
    else:
        assert machine.num_devices == torch.accelerator.device_count()
