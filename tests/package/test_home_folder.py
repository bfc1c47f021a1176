"""A path that begins with `~` is in the home folder, whichever function it is given to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import accel_fn as af

BATCH = (torch.ones(4, 3), torch.zeros(4, 1))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder; the working folder is another one, which must stay empty."""
    home, work = tmp_path / "home", tmp_path / "work"
    work.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    yield home
    assert not [*work.iterdir()]


def built(*transforms):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = af.Plan(
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(), model, optimizer
    )
    return af.build(af.compose(*transforms)(plan), af.DistState())


@pytest.mark.parametrize("kind", [str, Path])
def test_checkpoints_are_saved_and_found(home, kind):
    state, step = built()
    state, _ = step(state, BATCH)
    path = af.save(step, state, kind("~/runs"))
    assert path == home / "runs" / "step_00000001"
    assert af.load(step, state, kind("~/runs")).step == 1
    assert af.resume(step, state, kind("~/runs")).step == 1
    assert af.latest(kind("~/runs")) == path
    assert [each.path for each in af.checkpoint.list_checkpoints(kind("~/runs"))] == [path]


@pytest.mark.parametrize("kind", [str, Path])
def test_models_are_saved_and_loaded(home, kind):
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    af.save_model(model, kind("~/weights"))
    assert (home / "weights" / "model.safetensors").exists()
    af.load_model(other, kind("~/weights"))
    assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize("kind", [str, Path])
def test_logs_are_written(home, kind):
    state, step = built(af.log_to(kind("~/runs/log.jsonl"), every=1))
    step(state, BATCH)
    assert (home / "runs" / "log.jsonl").read_text().startswith('{"step": 1,')


@pytest.mark.parametrize("kind", [str, Path])
def test_profiles_are_written(home, kind):
    state, step = built(af.profile(kind("~/runs/profile"), steps=range(1, 2)))
    step(state, BATCH)
    assert (home / "runs" / "profile" / "phases.txt").exists()
