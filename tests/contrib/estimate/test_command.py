"""`accel-fn estimate`, called as a user would."""

import json
import re
import sys

import pytest

from tests.cli.commands import command, surroundings
from tests.cli.terminal import Terminal

SCRIPT = """
import torch, torch.nn.functional as F
from torch import nn

def model():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

def batch():
    return torch.randn(12, 16), torch.randn(12, 8)

def loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])

if __name__ == "__main__":
    raise SystemExit("a file is imported, not run")
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "net.py").write_text(SCRIPT)
    return tmp_path


def test_the_command_prints_a_column_for_each_world_and_number_of_microbatches(script):
    done = command(
        script, "estimate", "net.py:model", "--batch", "net:batch", "--loss", "net.py:loss",
        "-n", "1,2", "--num-microbatches", "1,3", "--device", "cpu",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert done.stderr == ""
    rows = [re.split(r"\s\s+", line) for line in done.stdout.splitlines()]
    assert rows[0] == ["ranks", "1", "1", "2", "2"]
    assert rows[1] == ["micro-batches", "1", "3", "1", "3"]
    assert rows[2] == ["parameters", *["3.16 KiB"] * 4]  # 808 numbers
    assert rows[-2][:2] == ["activations", "1.88 KiB"]  # 12 * 40 * 4 + 4 bytes


@pytest.mark.slow
def test_a_terminal_of_80_columns_shows_that_it_works_then_whole_words(script):
    estimate = [
        sys.executable,
        "-m",
        "accel_fn",
        "estimate",
        "net.py:model",
        "-n",
        "1,2,4,8,16",
    ]
    environment = surroundings(script, TERM="xterm-256color", COLUMNS="80")
    with Terminal(estimate, script, environment) as screen:
        screen.read_until("estimating, 0 of 5 done").read_until("ranks")
        assert screen.end() == 0
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.text).splitlines()
    names = ["ranks", "micro-batches", "parameters", "activations", "peak"]
    assert [name for name in names if sum(line.split()[:1] == [name] for line in lines) != 2] == []
    assert [line for line in lines if "estimating" not in line and len(line) > 80] == []


def test_the_command_gives_bytes_to_programs(script):
    done = command(
        script, "estimate", "net.py:model", "--optimizer", "SGD", "--json", "--mesh", "tp=1"
    )
    assert done.exit_code == 0, done.stderr
    [found] = json.loads(done.stdout)
    assert found == {
        "world_size": 1,
        "num_microbatches": 1,
        "parameters": 808 * 4,
        "buffers": 0,
        "gradients": 808 * 4,
        "optimizer": 0,
        "batch": None,
        "activations": None,
        "peak": None,
        "frozen": 0,
    }


@pytest.mark.parametrize(
    ("shard", "parts"),
    [(["fsdp"], (2, 2, 2)), (["zero1"], (1, 1, 2)), (["zero2"], (1, 2, 2)), (["zero3"], (2, 2, 2))],
)
def test_the_command_divides_a_model_by_its_option(script, shard, parts):
    options = [each for name in shard for each in ("--shard", name)]
    done = command(
        script, "estimate", "net.py:model", *options, "-n", "2", "--optimizer", "SGD", "--json"
    )
    assert done.exit_code == 0, done.stderr
    [found] = json.loads(done.stdout)
    # ZeRO has a copy of the parameters, and SGD no state.
    copied = 0 if shard == ["fsdp"] else 808 * 4
    assert found["parameters"] == 808 * 4 // parts[0]
    assert found["gradients"] == 808 * 4 // parts[1]
    assert found["optimizer"] == copied // parts[2]


def test_mistakes_of_the_command_are_one_line(script):
    done = command(script, "estimate", "net.py:modle")
    assert (done.exit_code, done.stdout) == (1, "")
    expected = (
        "Error: estimate: target must name something in net.py, got 'modle'; did you mean model?"
    )
    assert done.stderr.strip() == expected
    done = command(script, "estimate", "net.py:model", "--mesh", "dp")
    expected = "Error: estimate: mesh must be axes and their sizes, each once, such as dp=-1,tp=2, got 'dp'"
    assert done.stderr.strip() == expected
    done = command(script, "estimate", "net.py:model", "-n", "1,none")
    assert done.exit_code == 2
    assert "'1,none' is not an integer >= 1, or several such as 1,8,64" in done.stderr
