"""Law 13 of random draws: they follow a rank's place on `dp`, so ranks that hold the same rows draw alike."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import accel_fn as af
from accel_fn.testing import internals, simulate
from tests.laws.law13_meshes import SQUARE, four_batches
from tests.support import strategies as ours
from tests.support.processes import from_lists, launch


def dropout_model():
    """Return a model whose result depends on random draws."""
    model = ours.regression_model()
    return nn.Sequential(nn.Dropout(0.3), model, nn.Dropout(0.5)).double()


def test_a_model_with_dropout_on_a_mesh_is_that_of_its_data_axis_alone():
    def run(state):
        model = copy.deepcopy(of_all)
        calls = []

        def loss_fn(model, batch):
            # Simulated ranks share the generators.
            with internals.exclusive_random(state.device):
                af.seed_all(replace(state, step=len(calls)))
                calls.append(batch)
                return ours.mse(model, batch)

        plan = af.Plan(loss_fn, model, ours.adamw(model.parameters()))
        now, step = af.build(af.wrap_ddp()(plan), state, check_loss=False)
        losses = []
        for batch in four_batches():
            now, report = step(now, af.shard_batch(batch, now))
            losses.append(float(report.loss))
        return losses, model.state_dict()

    of_all = dropout_model()
    (losses, expected), _ = simulate(run, world_size=2)
    for found, actual in simulate(run, mesh=SQUARE):
        assert found == pytest.approx(losses, rel=1e-12)
        ours.assert_close(actual, expected)


@pytest.mark.parametrize("seed", [af.seed_all, internals.derive_random])
def test_ranks_draw_alike_if_only_other_axes_than_dp_are_between_them(seed):
    def run(state):
        with internals.exclusive_random(state.device):
            seed(state)
            return torch.rand(()).item()

    draws = simulate(run, mesh={"pp": 2, **SQUARE}, world_size=8)
    first, other = draws[0], draws[2]
    assert first != other
    assert draws == [first, first, other, other] * 2


class Place:
    """An extra, which lies beside the generators in a rank's file of a checkpoint."""

    def __init__(self, rank):
        self.rank = rank

    def state_dict(self):
        return {"rank": self.rank}

    def load_state_dict(self, saved):
        self.rank = saved["rank"]


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        (SQUARE, [0, 1, 2, 3]),
        ({"dp": 2, "cp": 2}, [0, 0, 2, 2]),
        ({"dp": 2}, [0, 2]),
        ({"tp": 4}, [0, 0, 0, 0]),
        ({"dp": 4}, [0, 2, 0, 0]),  # generators of the last two are derived
    ],
)
def test_a_rank_goes_on_as_one_of_its_place_on_dp(mesh, expected, tmp_path, capsys):
    def save(state):
        state, step = ours.built(af.wrap_ddp(), state)
        af.save(step, state, tmp_path, extras={"place": Place(state.rank)})

    def load(state):
        state, step = ours.built(af.wrap_ddp(), state)
        place = Place(None)
        af.load(step, state, tmp_path, extras={"place": place})
        return place.rank

    simulate(save, mesh=SQUARE)
    assert simulate(load, mesh=mesh) == expected
    warned = "ranks that share a batch" in capsys.readouterr().err
    assert warned == (mesh.get("dp") == 4)


TRAIN = """
import json
import accel_fn as af
from tests.laws.law13_dropout import dropout_model, four_batches
from tests.support import strategies as ours

for folder, mesh, start, stop in {runs!r}:
    with af.distributed(device="cpu", timeout_s=60, mesh=mesh, seed=5) as state:
        model = dropout_model()
        plan = af.Plan(ours.mse, model, ours.adamw(model.parameters()))
        state, step = af.build(af.wrap_ddp()(plan), state)
        af.seed_all(state)
        state = af.resume(step, state, folder)
        assert state.step == start
        for batch in four_batches()[start:stop]:
            state, _ = step(state, af.shard_batch(batch, state))
        af.save(step, state, folder)
        if stop == 4:
            say(json.dumps({{name: each.tolist() for name, each in model.state_dict().items()}}))
"""


@pytest.mark.slow
def test_processes_on_a_mesh_draw_as_those_of_its_data_axis_also_when_resumed_there(tmp_path):
    def ends(*runs, num_processes):
        said = launch(TRAIN.format(runs=runs), num_processes=num_processes).splitlines()
        assert len(said) == num_processes
        return [from_lists(json.loads(line)) for line in said]

    square, pair, later = (str(tmp_path / name) for name in ("square", "pair", "later"))
    expected, *found = ends((pair, None, 0, 4), num_processes=2)
    found += ends(
        (square, SQUARE, 0, 1), (later, SQUARE, 0, 2), (square, SQUARE, 1, 4), num_processes=4
    )
    found += ends((later, {"dp": 2}, 2, 4), num_processes=2)
    for each in found:
        ours.assert_close(each, expected)
