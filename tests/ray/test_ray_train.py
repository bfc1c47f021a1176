"""examples/ray_train.py on one worker, on two, and with a worker that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.cli.launchers import is_running, until
from tests.examples.running import EXAMPLES
from tests.ray.drivers import Driver

PROGRAM = EXAMPLES / "ray_train.py"


def start(folder, num_workers):
    return Driver(folder, PROGRAM, "--num-workers", num_workers, "--out", folder / "run")


def losses(folder):
    """The losses that the run has logged up to now, by step."""
    path = folder / "run" / "checkpoints" / "log.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = map(json.loads, text[: text.rfind("\n") + 1].splitlines())
    return {line["step"]: line["loss"] for line in lines}


def results(printed):
    """The lines of evaluations, in order."""
    # Ray prints each line of a worker twice, and mixes the two copies.
    return [*dict.fromkeys(re.findall(r"(epoch \d loss .*)", printed))]


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory):
    """The folder of a run on one worker, and what it printed."""
    folder = tmp_path_factory.mktemp("one")
    with start(folder, 1) as driver:
        return folder, driver.wait()


def check_equal(folder, expected):
    found = losses(folder)
    assert list(found) == list(range(1, 139))  # each once, in order
    # Sums of float32 in another order.
    assert found == pytest.approx(losses(expected), rel=0, abs=1e-5)


def test_two_workers_have_the_losses_of_one(one_worker, tmp_path):
    expected, printed = one_worker
    with start(tmp_path, 2) as driver:
        assert results(driver.wait()) == results(printed)
    check_equal(tmp_path, expected)


def test_a_run_whose_worker_is_killed_resumes_and_ends_with_the_same_losses(one_worker, tmp_path):
    expected, printed = one_worker
    with start(tmp_path, 2) as driver:
        until(lambda: len(losses(tmp_path)) >= 60 or None, lambda: "60 updates")
        [worker] = re.findall(r"pid=(\d+)\) world_rank=1", driver.printed.read_text())
        os.kill(int(worker), signal.SIGKILL)
        text = driver.wait()
    groups = re.findall(r"pid=(\d+)\) world_rank=1", text)
    assert len(groups) == 2
    assert results(text)[-1] == results(printed)[-1]
    check_equal(tmp_path, expected)
    assert not any(is_running(int(pid)) for pid in groups)
    kept = sorted(path.name for path in Path(tmp_path, "run/checkpoints").glob("step_*"))
    resumed_from, *newest = kept
    assert "step_00000040" <= resumed_from < "step_00000120"
    assert newest == ["step_00000120", "step_00000130"]
