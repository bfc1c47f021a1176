"""Bars of saves, loads and exports: the bytes that are done, on the main rank, once it takes a second."""

import pytest
import torch
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate
from accel_fn.testing.internals import export_model, limited
from tests.support.screen import on_screen


def loss_fn(model, batch):
    return model(batch).mean()


def built(state):
    model = nn.Linear(1000, 1000)
    plan = af.wrap_ddp()(af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1)))
    return af.build(plan, state)


def saved(folder, state, step):
    af.save(step, state, folder)


def saved_in_the_background(folder, state, step):
    af.save(step, state, folder, wait=False)
    af.save(step, state, folder, wait=False)


def loaded(folder, state, step):
    af.load(step, state, folder)


def exported(folder, state, step):
    export_model(af.latest(folder), folder / "model", "", 2_000_000)


def model_saved(folder, state, step):
    af.save_model(step.plan.model, folder / "model")


def model_loaded(folder, state, step):
    af.load_model(nn.Linear(1000, 1000), folder / "model")


CALLS = {
    saved: ["save"],
    saved_in_the_background: [],
    loaded: ["check", "load"],
    exported: ["check", "read", "write"],
    model_saved: ["write"],
    model_loaded: ["load_model"],
}


@pytest.fixture
def run(tmp_path):
    state, step = built(af.DistState())
    saved(tmp_path / "runs", state, step)
    model_saved(tmp_path / "runs", state, step)
    return tmp_path / "runs", state, step


def finished(text):
    """List the bars that have come to their end."""
    lines = text.split("\r")
    return [line.partition(":")[0] for line in lines if ": 100%|" in line]


@pytest.fixture
def at_once():
    with limited("delay of a bar", 0.0):
        yield


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("call", CALLS)
def test_a_bar_counts_all_bytes_and_leaves_no_line(run, call):
    with on_screen() as screen:
        call(*run)
        assert list(dict.fromkeys(finished(screen.getvalue()))) == CALLS[call]
        assert screen.getvalue().rpartition("\r")[2].strip() == ""
        assert all(f"{name}:   0%|" in screen.getvalue() for name in CALLS[call])


def test_what_takes_no_second_shows_nothing(run):
    with on_screen() as screen:
        for call in CALLS:
            call(*run)
        assert screen.getvalue() == ""


@pytest.mark.usefixtures("at_once")
def test_the_main_rank_alone_shows_a_bar(tmp_path):
    def run(state):
        state, step = built(state)
        saved(tmp_path, state, step)
        loaded(tmp_path, state, step)

    with on_screen() as screen:
        simulate(run, world_size=2)
        found = screen.getvalue()
    assert list(dict.fromkeys(finished(found))) == ["save", "check", "load"]
    assert "\x1b" not in found  # a second bar would move the cursor
