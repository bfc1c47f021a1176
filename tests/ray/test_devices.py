"""The device of a worker is the first that Ray gave to it."""

import json
from pathlib import Path

import pytest

from tests.ray.drivers import Driver

DEVICES = {
    0: [["cpu", None, "cpu"], ["cpu", None, "cpu"]],
    1: [["cuda:0", "0,1"], ["cuda:1", "0,1"]],
    2: [["cuda:0", "0,1,2,3"], ["cuda:2", "0,1,2,3"]],
}
"""By the number of GPUs of a worker: the device, CUDA_VISIBLE_DEVICES and that of the state."""


@pytest.mark.parametrize("gpus", DEVICES)
def test_a_worker_takes_the_first_of_its_gpus_or_the_cpu_if_it_has_none(gpus, tmp_path):
    with Driver(tmp_path, Path(__file__).with_name("devices.py"), gpus) as driver:
        driver.wait()
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1)]
    assert found == DEVICES[gpus]
