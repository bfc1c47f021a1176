"""device_mesh: torch's mesh of a state's axes, as torch's own functions use it."""

import pytest

import accel_fn as af
from accel_fn.testing import simulate

SQUARE = {"dp": 2, "tp": 2}


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
