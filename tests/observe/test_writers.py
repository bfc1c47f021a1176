"""Writers of TensorBoard and functions; `nox -s trackers` runs those of the other libraries."""

import math
import re
import subprocess
import sys
from importlib import import_module

import pytest
import tensorboard
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from accel_fn.errors import ArgumentError
from accel_fn.observe.log_writers import as_writer, write_settings

BOTH = pytest.mark.parametrize("library", ["torch.utils.tensorboard", "tensorboardX"])


def events(folder):
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def scalars(folder):
    found = events(folder)
    return {
        name: [(each.step, each.value) for each in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    }


@BOTH
def test_tensorboard_has_the_values_of_each_step(library, tmp_path):
    with import_module(library).SummaryWriter(str(tmp_path)) as writer:
        write = as_writer(writer)
        write(10, {"loss": 0.5, "loss/head": math.inf})
        write(20, {"loss": 0.25})
    assert scalars(tmp_path) == {"loss": [(10, 0.5), (20, 0.25)], "loss/head": [(10, math.inf)]}


@BOTH
def test_tensorboard_shows_the_plan_and_the_launch_line_by_line(library, tmp_path):
    with import_module(library).SummaryWriter(str(tmp_path)) as writer:
        write_settings(writer, "one step\n  split  nothing", {"world_size": 2})
    [shown] = events(tmp_path).Tensors("accel_fn/text_summary")
    text = b"    one step\n      split  nothing\n    world_size: 2"
    assert shown.tensor_proto.string_val == [text]


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("closes", ["", "writer.close()"], ids=["open", "closed before"])
def test_tensorboard_has_what_is_written_as_the_process_ends(library, tmp_path, closes):
    program = f"""
import atexit
from {library} import SummaryWriter
from accel_fn.observe.log_writers import as_writer

writer = SummaryWriter({str(tmp_path)!r})
write = as_writer(writer)
atexit.register(write, 1, {{"loss": 2.0}})
{closes}
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    folders = [path.parent for path in tmp_path.rglob("events*") if b"loss" in path.read_bytes()]
    assert [scalars(folder) for folder in folders] == [{"loss": [(1, 2.0)]}]


def test_a_subclass_of_a_run_is_written_to(tmp_path):
    class Mine(SummaryWriter):
        pass

    with Mine(tmp_path) as writer:
        as_writer(writer)(1, {"loss": 2.0})
    assert scalars(tmp_path) == {"loss": [(1, 2.0)]}


def test_a_function_is_its_own_writer_and_has_no_settings():
    seen = []

    def write(step, values):
        seen.append((step, values))

    write_settings(write, "one step", {"world_size": 1})
    as_writer(write)(1, {"loss": 2.0})
    assert seen == [(1, {"loss": 2.0})]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("log.txt", "'log.txt'"),
        (None, "None"),
        (SummaryWriter, "<class 'torch.utils.tensorboard.writer.SummaryWriter'>"),
        (tensorboard, "<module 'tensorboard' from "),
    ],
    ids=["path", "None", "class", "module"],
)
def test_other_writers_are_refused(given, shown):
    rule = (
        "log_to: writers must be a path that ends in .jsonl or .csv, a run of tensorboard, "
        "tensorboardX, wandb, mlflow, trackio, aim or swanlab, or a function (step, values), got "
    )
    with pytest.raises(ArgumentError, match=re.escape(rule + shown)):
        as_writer(given)
