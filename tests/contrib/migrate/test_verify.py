"""`accel-fn migrate --verify`: what it compares, which differences it explains, and how it fails."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel_fn.contrib.migrate.child import Part, Recording, Seen
from accel_fn.contrib.migrate.verify import _compared
from tests.cli.commands import ROOT, command, surroundings

OLD = """
import sys
import torch
from torch.utils.data import DataLoader

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
rows = torch.randn(32, 3)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(rows, batch_size=4):
    loss = model(batch).square().mean() / 2
    loss.backward()
    if sys.argv[1:] == ["--pairs"]:
        (model(batch).square().mean() / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
NEW = """
import sys
import torch
from torch.utils.data import DataLoader
import accel_fn as af

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
rows = torch.randn(32, 3)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
factor = 1.0 if sys.argv[1:] == ["--pairs"] else 0.5
plan = af.Plan(lambda model, batch: model(batch).square().mean() * factor, model, optimizer)
state, step = af.build(af.wrap_ddp()(plan), af.init(device="cpu"))
for batch in af.shard_loader(DataLoader(rows, batch_size=4), state):
    state, report = step(state, batch)
"""


def pair_in(folder: Path, old: str = OLD, new: str = NEW) -> list[Path]:
    paths = [folder / "old.py", folder / "new.py"]
    for path, text in zip(paths, (old, new), strict=True):
        path.write_text(text)
    return paths


@pytest.mark.slow
def test_a_plain_loop_is_compared_and_arguments_reach_both_scripts(tmp_path):
    pair = pair_in(tmp_path)
    done = command(tmp_path, "migrate", "--verify", *pair, "--updates", 5, "--", "--pairs")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "old.py and new.py on one process: equal in 5 updates",
        "new.py on one process and on two: equal in 5 updates",
    ]


@pytest.mark.slow
def test_another_result_is_unexplained(tmp_path):
    pair = pair_in(tmp_path, new=NEW.replace("lr=0.1", "lr=0.2"))
    done = command(tmp_path, "migrate", "--verify", *pair)
    assert done.exit_code == 1
    assert "old.py and new.py on one process: equal in 1 updates, then differs" in done.stdout
    assert "differs, unexplained" in done.stdout


@pytest.mark.slow
def test_dropout_is_compared_on_one_process_alone(tmp_path):
    dropout = "torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Dropout(0.5))"
    old, new = (text.replace("torch.nn.Linear(3, 1)", dropout) for text in (OLD, NEW))
    pair = pair_in(tmp_path, old, new.replace("4), state", '4), state, order="torch"'))
    done = command(tmp_path, "migrate", "--verify", *pair, "--updates", 4)
    assert done.exit_code == 0
    assert "on one process: equal in 4 updates" in done.stdout
    assert "not compared" in done.stdout


@pytest.mark.slow
def test_the_error_of_a_script_is_shown(tmp_path):
    pair = pair_in(tmp_path, new="print('here')\nopen('no_such_file')\n")
    done = command(tmp_path, "migrate", "--verify", *pair)
    assert done.exit_code == 1
    assert "Error: migrate: new.py must run on 1 process, got FileNotFoundError" in done.stderr
    assert "here" in done.stderr
    assert "open('no_such_file')" in done.stderr


@pytest.mark.slow
def test_a_script_without_an_update_is_refused(tmp_path):
    pair = pair_in(tmp_path, old="import sys\nsys.exit(0)\n")
    done = command(tmp_path, "migrate", "--verify", *pair)
    assert done.exit_code == 1
    assert "old.py must make an update, got none" in done.stderr


@pytest.mark.slow
def test_ctrl_c_stops_the_scripts(tmp_path):
    started = tmp_path / "started"
    wait = (
        f"import os, time\nopen({str(started)!r}, 'w').write(str(os.getpid()))\ntime.sleep(100)\n"
    )
    pair = pair_in(tmp_path, old=wait)
    process = subprocess.Popen(
        [sys.executable, "-m", "accel_fn", "migrate", "--verify", *map(str, pair)],
        cwd=tmp_path,
        env=surroundings(tmp_path, PYTHONPATH=str(ROOT)),
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    deadline = time.monotonic() + 100
    while not (started.exists() and started.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"stopped by Ctrl-C" in printed
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_a_script_or_a_pair_is_needed(tmp_path):
    assert "takes one SCRIPT" in command(tmp_path, "migrate").stderr
    assert "does not exist" in command(tmp_path, "migrate", "no.py").stderr


def seen(loss: float, *parts: Part, position: str = "a", rows: int = 8) -> Seen:
    return Seen(loss, rows, True, position, parts=parts)


def explanation(old: Seen, new: Seen, full: Seen | None = None) -> tuple[str, bool]:
    """The explanation of an update that differs, after one that has all its batches."""
    first = full or seen(2.0, Part(1.0, 4), Part(1.0, 4))
    result = _compared("", Recording([first, old]), Recording([first, new]), is_double=True)
    assert result.num_equal == 1
    return result.explanation, result.is_theirs


def test_a_short_last_window_is_explained():
    text, is_theirs = explanation(seen(0.5, Part(0.5, 8)), seen(1.0))
    assert (text.startswith("a short last window"), is_theirs) == (True, True)


def test_batches_of_unequal_sizes_are_explained():
    old = seen(1.0, Part(0.2, 6), Part(0.8, 2))
    text, is_theirs = explanation(old, seen((0.4 * 6 + 1.6 * 2) / 8))
    assert (text.startswith("batches of unequal sizes"), is_theirs) == (True, True)


def test_labels_counted_unevenly_are_explained():
    parts = Part(0.2, 4, (16, 12)), Part(0.8, 4, (8, 4))
    text, is_theirs = explanation(seen(1.0, *parts), seen((0.4 * 12 + 1.6 * 4) / 16))
    assert (text.startswith("labels counted unevenly: 12 and 4 labels"), is_theirs) == (True, True)


def test_cleared_gradients_are_explained():
    cleared = dataclasses.replace(seen(2.0, Part(1.0, 4), Part(1.0, 4)), is_cleared=True)
    text, is_theirs = explanation(seen(1.0, Part(1.0, 8)), seen(0.9), full=cleared)
    assert (text.startswith("cleared gradients"), is_theirs) == (True, True)


@pytest.mark.slow
@pytest.mark.parametrize("owner", ["model", "optimizer"])
def test_gradients_that_a_script_clears_within_an_update_are_noticed(owner, tmp_path):
    clears = f"    {owner}.zero_grad()\n    if sys.argv"
    pair = pair_in(tmp_path, OLD.replace("    if sys.argv", clears))
    done = command(tmp_path, "migrate", "--verify", *pair, "--updates", 5, "--", "--pairs")
    assert done.exit_code == 0
    assert "equal in 1 updates, then differs" in done.stdout
    assert "cleared gradients: the old script" in done.stdout


def test_a_window_that_begins_with_the_first_batch_alone_is_explained():
    four = Part(0.5, 4)
    old = Recording([seen(0.5, four, rows=4), seen(1.0, four, four)])
    result = _compared("", old, Recording([seen(1.0), seen(1.0)]), is_double=True)
    words = "a window of accumulation that begins with the first batch alone"
    assert (result.num_equal, result.explanation.startswith(words), result.holds) == (0, True, True)


@pytest.mark.parametrize(
    ("old", "num_rows"),
    [
        ([seen(0.5, Part(0.5, 4), rows=4), seen(1.0, Part(0.5, 4), rows=4)], 4),
        ([seen(0.5, Part(0.5, 4), rows=4), seen(1.0, Part(0.5, 4), Part(0.5, 4))], 12),
        ([seen(0.5, Part(0.5, 4), rows=4)], 8),
    ],
)
def test_other_windows_are_not_shifted(old, num_rows):
    new = Recording([seen(2.0, rows=num_rows)] * 2)
    result = _compared("", Recording(old), new, is_double=True)
    assert (result.num_equal, result.explanation) == (0, "")


@pytest.mark.slow
def test_a_shifted_window_of_a_script_is_noticed(tmp_path):
    old = OLD.replace("for batch in DataLoader", "for i, batch in enumerate(DataLoader")
    old = old.replace("batch_size=4):", "batch_size=4)):").replace(
        "    optimizer.step()\n    optimizer.zero_grad()",
        "    if i % 2 == 0:\n        optimizer.step()\n        optimizer.zero_grad()",
    )
    new = NEW.replace("af.wrap_ddp()", "af.compose(af.wrap_ddp(), af.accumulate(2))")
    new = new.replace("batch_size=4", "batch_size=8")
    done = command(tmp_path, "migrate", "--verify", *pair_in(tmp_path, old, new))
    assert (done.exit_code, done.stderr) == (0, "")
    assert "rows 4 and 8" in done.stdout
    assert "begins with the first batch alone" in done.stdout


def test_padding_is_named():
    parts = Part(0.2, 4, shapes=((7,),)), Part(0.8, 4, shapes=((9,),))
    text, is_theirs = explanation(seen(1.0, *parts), seen(0.9))
    assert (text.startswith("padding"), is_theirs) == (True, False)


def test_another_number_of_draws_is_named():
    text, is_theirs = explanation(seen(1.0, Part(1.0, 8)), seen(0.7, position="b"))
    assert (text.startswith("another number of draws"), is_theirs) == (True, False)


def test_draws_between_two_updates_are_named():
    """As of an evaluation: the generators were at equal positions after the update before."""
    first, old = seen(2.0, position="a"), seen(1.0, Part(1.0, 8), position="b")
    new = Recording([first, first, seen(0.7, position="c")])
    result = _compared("", Recording([first, first, old]), new, is_double=True)
    assert (result.num_equal, result.explanation[:23]) == (2, "another number of draws")


def test_draws_of_a_loader_alone_explain_nothing():
    old = Recording([seen(1.0, Part(1.0, 8))] * 3)
    new = Recording([seen(0.7, position="b")] * 3)
    result = _compared("", old, new, is_double=True)
    assert (result.num_equal, result.explanation) == (0, "")


def test_other_rows_are_no_known_difference():
    old, new = seen(1.0, Part(0.5, 4), Part(0.5, 4)), seen(1.0, rows=16)
    assert explanation(old, new) == ("", False)


def test_a_run_that_ends_early_differs():
    one = seen(1.0)
    result = _compared("", Recording([one, one]), Recording([one]), is_double=True)
    assert (result.num_equal, result.holds) == (1, False)
