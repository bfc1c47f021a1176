"""Saving at the worst moments: a power cut, a full disk of one rank, a newer format, a kill."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate
from tests.checkpoint.test_checkpoint_files import (
    BATCH,
    loads,
    make,
    refused,
    run,
    steps_of,
    with_manifest,
)


@pytest.fixture
def done(monkeypatch):
    """Record the files and folders that were synced, with their sizes, and the folders that were
    renamed."""
    seen, fsync, rename = [], os.fsync, os.rename

    def syncing(number):
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        seen.append((path.name, path.stat().st_size) if path.is_file() else f"sync {path.name}")
        fsync(number)

    def renaming(path, target):
        if path.is_dir():
            seen.append(f"{path.name} to {target.name}")
        rename(path, target)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "rename", renaming)
    return seen


@pytest.mark.filterwarnings("ignore:step. model should have no BatchNorm")
@pytest.mark.parametrize(("world_size", "wait"), [(1, True), (2, False)])
def test_all_is_on_the_disk_before_a_checkpoint_has_its_name(tmp_path, done, world_size, wait):
    """Otherwise a power cut could leave the name, and files without their content."""

    def save(state):
        state, step = make(state=state, recipe=af.wrap_ddp())
        state, _ = step(state, BATCH)
        af.save(step, state, tmp_path, wait=wait)
        af.load(step, state, tmp_path)

    simulate(save, world_size=world_size)
    *first, folder, name, parent = done
    files = (tmp_path / "step_00000001").iterdir()
    assert sorted(first) == sorted((file.name, file.stat().st_size) for file in files)
    assert [folder, name, parent] == [
        "sync .new_step_00000001",
        ".new_step_00000001 to step_00000001",
        f"sync {tmp_path.name}",
    ]


def save_checkpoint(folder):
    state, step = make()
    af.save(step, state, folder)


@pytest.mark.parametrize(
    "write", [save_checkpoint, lambda folder: af.save_model(nn.Linear(1, 1), folder)]
)
def test_every_folder_that_is_made_is_on_the_disk_before_what_is_in_it(tmp_path, done, write):
    """A power cut could otherwise take a folder further up, and all checkpoints with it."""
    write(tmp_path / "runs" / "a" / "checkpoints")
    assert done[:3] == [f"sync {tmp_path.name}", "sync runs", "sync a"]


def test_a_run_that_keeps_few_reads_no_manifest_of_its_own(tmp_path):
    saver = run(tmp_path, 1, 2)
    (tmp_path / "step_00000001" / "manifest.json").write_text("not read")
    run(tmp_path, 3, keep=2, saver=saver)
    assert [each.step for each in af.checkpoint.list_checkpoints(tmp_path)] == [2, 3]


# -- checkpoints of a newer version


@pytest.fixture
def beside_a_newer(tmp_path):
    """Make step 1 of this version, and step 2 in a format that it does not know."""
    run(tmp_path, 1, 2)
    with_manifest(tmp_path / "step_00000002", lambda body: body.update(format=3, accel_fn="9.9"))
    return tmp_path


NEWER = (
    r"step_00000002/manifest\.json must be of format 2, got 3, written by accel_fn 9\.9; read it"
)


def test_a_newer_format_is_refused_and_the_one_before_is_the_latest(beside_a_newer):
    """`load` skips no checkpoint silently; it takes the older one if it is named."""
    refused(beside_a_newer, NEWER)
    refused(beside_a_newer, NEWER, at=2)
    ours, newer = af.checkpoint.list_checkpoints(beside_a_newer)
    assert ours.damage == ""
    assert re.search(NEWER, newer.damage)
    assert af.latest(beside_a_newer) == ours.path
    assert af.load(*reversed(make(7)), beside_a_newer, at=ours.path.name).step == 1


def test_a_newer_format_is_neither_counted_nor_removed(beside_a_newer):
    newer = beside_a_newer / "step_00000002"
    before = {path.name: path.read_bytes() for path in newer.iterdir()}
    run(beside_a_newer, 3, 4, keep=1)
    assert steps_of(beside_a_newer) == [2, 4]
    assert {path.name: path.read_bytes() for path in newer.iterdir()} == before
    loads(beside_a_newer, 4)


# -- a full disk


# -- data
