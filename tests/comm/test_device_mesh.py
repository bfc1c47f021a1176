"""device_mesh: torch's mesh of a state's axes, as torch's own functions use it."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import accel_fn as af
from accel_fn.testing import simulate
from tests.support.processes import launch

SQUARE = {"dp": 2, "tp": 2}


SCRIPT = """
import torch
import accel_fn as af
from tests.comm import test_device_mesh as tests

with af.distributed(mesh=tests.SQUARE) as state:
    found = tests.gradients_split_over_both(state)
    for actual, expected in zip(found, tests.gradients_by_hand(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
"""


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


BATCH = torch.linspace(-1, 1, 16).double().view(4, 4)


def gradients_split_over_both(state):
    """Return the gradients of a model split over `tp`, then sharded over `dp`."""
    mesh = af.device_mesh(state)
    model = perceptron()
    styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], styles, src_data_rank=None)
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)
    model(af.shard_batch(BATCH, state)).square().mean().backward()
    return [each.grad.full_tensor() for each in model.parameters()]


def gradients_by_hand():
    model = copy.deepcopy(perceptron())
    model(BATCH).square().mean().backward()
    return [each.grad for each in model.parameters()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_torch_splits_a_model_over_one_axis_and_shards_it_over_the_other():
    for found in simulate(gradients_split_over_both, mesh=SQUARE):
        for actual, expected in zip(found, gradients_by_hand(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_it_is_the_same_over_processes():
    launch(SCRIPT, num_processes=4)


def test_a_mesh_has_the_names_and_places_of_the_axes():
    def run(state):
        mesh = af.device_mesh(state)
        places = {name: mesh.get_local_rank(name) for name in mesh.mesh_dim_names}
        assert places == {each.name: each.rank for each in state.axes if each.world_size > 1}
        assert mesh.get_rank() == state.rank
        assert mesh["dp", "tp"].shape == (2, 3)
        assert mesh["tp"].get_group() is state.along("tp").group
        return mesh.mesh_dim_names, mesh.mesh.tolist()

    found = simulate(run, mesh={"dp": 2, "cp": 1, "tp": 3})
    assert found == [(("dp", "tp"), [[0, 1, 2], [3, 4, 5]])] * 6


@pytest.mark.parametrize("world_size", [1, 2])
def test_without_a_mesh_all_ranks_are_dp(world_size):
    def run(state):
        mesh = af.device_mesh(state)
        return mesh.mesh_dim_names, mesh.size(), mesh.get_local_rank()

    expected = [(("dp",), world_size, rank) for rank in range(world_size)]
    assert simulate(run, world_size=world_size) == expected


def test_the_state_of_one_axis_is_refused():
    def run(state):
        with pytest.raises(ValueError, match="device_mesh: state must be of all ranks"):
            af.device_mesh(state.along("dp"))

    simulate(run, mesh=SQUARE)


def test_a_state_without_groups_is_refused():
    def run(state):
        axes = tuple(each._replace(group=None) for each in state.axes)
        return af.DistState(rank=state.rank, world_size=4, axes=axes)

    with pytest.raises(ValueError, match="device_mesh: state must have a group along 'dp'"):
        af.device_mesh(simulate(run, mesh=SQUARE)[0])
