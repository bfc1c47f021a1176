"""docs/cheat-sheet.md: the third column runs from top to bottom; the calls of the second exist."""

import re
import shlex
from pathlib import Path

import accelerate
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from tests.cli.commands import command

PAGE = (Path(__file__).parents[2] / "docs" / "cheat-sheet.md").read_text()
ROWS = [line.split("|")[1:-1] for line in re.findall(r"^\|.*", PAGE, re.MULTILINE)[2:]]
THEIRS, OURS = ([each for row in ROWS for each in re.findall(r"`(.+?)`", row[at])] for at in (2, 3))
COMMANDS = [each for each in OURS if each.startswith("accel-fn")]


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def is_right(model, batch):
    return {"accuracy": model(batch[0]).argmax(1) == batch[1]}


def test_each_call_of_the_third_column_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, rows = nn.Linear(4, 2), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(rows, torch.arange(8) % 2), batch_size=4)
    names = {
        "af": af,
        "batch": next(iter(loader)),
        "flag": False,
        "fn": lambda model, batch: model(batch[0]),
        "loader": loader,
        "loss_fn": loss_fn,
        "metric_fn": is_right,
        "model": model,
        "optimizer": optimizer,
        "rows": rows,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
    }
    # `launch` would start processes: test_launch_function.py does.
    for each in OURS:
        if each not in COMMANDS and not each.startswith("af.launch("):
            exec(each, names)
    assert names["state"].step == 1
    assert callable(af.launch)


@pytest.mark.parametrize("written", COMMANDS)
def test_each_command_of_the_third_column_would_start(written, tmp_path):
    (tmp_path / "train.py").touch()
    _, name, *arguments = shlex.split(written)
    done = command(tmp_path, name, "--dry-run", "--cpu", *arguments)
    assert done.exit_code == 0, done.stderr


def test_each_name_of_accelerate_exists():
    found = set(re.findall(r"accelerator\.(\w+)", " ".join(THEIRS)))
    made = set(re.findall(r"(?<![\w.])([A-Z]\w+|set_seed|notebook_launcher)\(", " ".join(THEIRS)))
    assert len(found) > 15
    assert not [name for name in found if not hasattr(Accelerator, name)]
    places = accelerate, accelerate.utils
    assert not [name for name in made if not any(hasattr(place, name) for place in places)]
