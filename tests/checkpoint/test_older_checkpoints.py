"""Checkpoints that older commits wrote: they are loaded, and training goes on as if nobody had stopped.

Two ranks wrote each file with the program in `older/`; frozen parameters are left out, by their hash.
"""

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import accel_fn as af
from accel_fn.testing import simulate
from tests.checkpoint.older import program

WRITTEN = {
    "1_before_mesh": "878e88f8",
    "2_mesh": "1f53e8cd",
    "3_compact_manifest": "f4f5e9fb",
    "4_frozen_models": "abdb5a13",
    "5_uniform_average": "c04d2001",
}
"""The commit that wrote each: the last ones that changed what a checkpoint holds, and one before."""


def trained(state, average, folder=None):
    """Return the parameters at the last step, and their averages; resumed from a folder if given."""
    state, step = program.make_step(state, program.make_model(), average)
    loader = program.make_loader(state)
    if folder is not None:
        state = af.load(step, state, folder, extras={"loader": loader})
        assert state.step == program.BEFORE
    program.train(state, step, loader, program.STEPS)
    with af.averaged(step):
        averages = [each.detach().clone() for each in step.plan.model.parameters()]
    return [*step.plan.model.parameters(), *averages]


@pytest.mark.parametrize(("name", "world_size"), [*zip(WRITTEN, (3, 1, 2, 3, 1), strict=True)])
def test_a_checkpoint_of_an_older_commit_ends_where_an_undisturbed_run_does(
    tmp_path, name, world_size
):
    with zipfile.ZipFile(Path(program.__file__).with_name(f"{name}.zip")) as written:
        written.extractall(tmp_path)
    [entry] = af.checkpoint.list_checkpoints(tmp_path)
    assert (entry.step, entry.damage) == (program.BEFORE, "")
    average = af.swa() if name == "5_uniform_average" else af.ema(0.5)

    def run(state, folder=None):
        return trained(state, average, folder)

    expected = simulate(run, world_size=world_size, seed=7)[0]
    for found in simulate(lambda state: run(state, tmp_path), world_size=world_size, seed=7):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


class Mean:
    """A function of a user that keeps state; its slot shows it as `average`."""

    def __init__(self):
        self.count = 0

    def __call__(self, state, report):
        self.count += 1
        return state, report

    def state_dict(self):
        return {"count": self.count, "mean": torch.ones(1)}

    def load_state_dict(self, saved):
        self.count = saved["count"]


def test_a_function_of_a_user_may_have_an_old_name(tmp_path):
    def built():
        model, count = program.make_model(), Mean()
        count.__qualname__ = "average"
        plan = af.Plan(program.loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1))
        return count, af.build(replace(plan, after_update=(count,)), af.DistState())

    saved, (state, step) = built()
    saved.count = 3
    af.save(step, state, tmp_path)
    loaded, (state, step) = built()
    af.load(step, state, tmp_path)
    assert loaded.count == 3


def test_each_file_beside_the_program_is_loaded():
    folder = Path(program.__file__).parent
    assert sorted(WRITTEN) == sorted(path.stem for path in folder.glob("*.zip"))
