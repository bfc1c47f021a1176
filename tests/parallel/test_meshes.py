"""Meshes of ranks: their shapes, the state of an axis, and collectives along one."""

import math
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.core.mesh_axes import AXES, mesh_shape, ranks_along
from accel_fn.testing import simulate
from tests.support import strategies as ours

SQUARE = {"dp": 2, "tp": 2}


@st.composite
def shapes(draw):
    """Draw the sizes of some axes."""
    names = draw(st.lists(st.sampled_from(AXES), min_size=1, unique=True))
    return {name: draw(st.integers(1, 4)) for name in names}


@given(sizes=shapes())
def test_one_axis_of_minus_one_takes_what_the_others_leave(sizes):
    world_size = math.prod(sizes.values())
    whole = mesh_shape("init", sizes, world_size)
    assert list(whole) == [name for name in AXES if name in sizes or name == "dp"]
    assert whole == {"dp": 1} | sizes
    for name in sizes:
        assert mesh_shape("init", {**sizes, name: -1}, world_size) == whole


@given(sizes=shapes())
def test_the_ranks_along_each_axis_are_a_partition_in_the_order_of_their_places(sizes):
    """As the axes of an array of the ranks."""
    shape = mesh_shape("init", sizes, math.prod(sizes.values()))
    ranks = torch.arange(math.prod(sizes.values())).view(*shape.values())
    for dim, name in enumerate(shape):
        for row in ranks.movedim(dim, -1).reshape(-1, shape[name]).tolist():
            assert [list(ranks_along(shape, name, rank)) for rank in row] == [row] * len(row)


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        ({"ep": 2}, r"mesh must have axes of pp, dp, cp, tp, got 'ep'"),
        ({"tp": 0}, r"mesh\['tp'\] must be an integer >= 1, got 0; or -1"),
        ({"tp": "2"}, r"mesh\['tp'\] must be an integer >= 1, got '2'"),
        ({"dp": -1, "tp": -1}, "mesh must have at most one axis of -1, got {'dp': -1, 'tp': -1}"),
        (
            {"dp": -1, "tp": 3},
            "mesh must have sizes that divide the number of ranks, 4, got {'dp': -1, 'tp': 3}; an axis",
        ),
        ({"tp": 2}, "mesh must have sizes that multiply to the number of ranks, 4, got {'tp': 2}"),
        ({"dp": 4, "tp": 2}, "mesh must have sizes that multiply to the number of ranks, 4"),
        ("dp=2", r"""mesh must map axes to sizes, got 'dp=2'; such as {"dp": -1, "tp": 2}"""),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_on_every_rank(mesh, text):
    with pytest.raises((ValueError, TypeError), match=f"simulate: {text}"):
        simulate(lambda state: None, world_size=4, mesh=mesh)


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 0}, {"dp": 2.0}, {"dp": "2"}, "dp=2"], ids=str)
def test_a_mesh_of_wrong_sizes_is_named_also_without_a_number_of_ranks(mesh):
    with pytest.raises((ValueError, TypeError), match=r"^simulate: mesh.* must "):
        simulate(lambda state: None, mesh=mesh)


def test_init_makes_the_mesh_of_one_process_and_refuses_one_of_more():
    state = af.init(device="cpu", mesh={"dp": -1, "tp": 1})
    assert [(axis.name, axis.world_size) for axis in state.axes] == [("dp", 1), ("tp", 1)]
    with pytest.raises(ValueError, match="init: mesh must have sizes that divide the number of r"):
        af.init(device="cpu", mesh={"dp": -1, "tp": 2})


def test_a_simulation_has_as_many_ranks_as_its_mesh():
    assert len(simulate(lambda state: None, mesh=SQUARE)) == 4
    for mesh in (None, {}, {"dp": -1, "tp": 2}):
        with pytest.raises(ValueError, match="simulate: world_size must be given, unless mesh has"):
            simulate(lambda state: None, mesh=mesh)


def test_a_rank_knows_its_place_along_each_axis():
    def places(state):
        assert state.data == state.axes[0]
        return [(axis.name, axis.rank, axis.world_size) for axis in state.axes]

    # The order of the axes is fixed, whatever the order in the mapping.
    assert simulate(places, mesh={"tp": 2, "dp": 2}) == [
        [("dp", dp, 2), ("tp", tp, 2)] for dp in range(2) for tp in range(2)
    ]


def test_without_a_mesh_the_data_axis_is_all_ranks():
    state = af.DistState(rank=2, world_size=4)
    assert state.data == ("data", 2, 4, None)
    assert (state.along("dp").rank, state.along("dp").world_size) == (2, 4)
    assert (state.along("tp").rank, state.along("tp").world_size) == (0, 1)
    assert simulate(lambda state: state.data.group is state.group, world_size=2) == [True] * 2


def test_a_state_prints_its_mesh_and_its_axis():
    state = simulate(lambda state: state, mesh=SQUARE)[2]
    assert repr(state).endswith(", mesh=dp 2 x tp 2)")
    assert "axis='dp'" in repr(state.along("dp"))
    assert "mesh" not in repr(af.DistState())
    assert "axis" not in repr(af.DistState())


def test_axes_are_not_compared_and_are_pickled_without_groups():
    def copied(state):
        copy = pickle.loads(pickle.dumps(state))
        assert copy == state == replace(state, axes=())
        assert copy.along("tp") == state.along("tp") != state.along("dp")
        return [axis.group for axis in copy.axes]

    assert simulate(copied, mesh=SQUARE) == [[None, None]] * 4


def test_an_axis_that_is_unknown_or_of_an_axis_is_refused():
    with pytest.raises(ValueError, match="along: axis must be one of pp, dp, cp, tp, got 'data'"):
        af.DistState().along("data")
    with pytest.raises(ValueError, match="along: state must be of all ranks, got one along 'dp'"):
        af.DistState().along("dp").along("dp")
    with pytest.raises(ValueError, match="along: axis must be one of pp, dp, cp, tp, got 'x'"):
        af.gather(torch.ones(1), af.DistState(), axis="x")


def test_collectives_go_over_the_data_axis_or_the_one_that_is_given():
    def run(state):
        row = torch.tensor([state.rank])
        return [
            [
                af.reduce_sum(state.rank, state, **axis),
                af.reduce_mean(float(state.rank), state, weight=2.0, **axis),
                *af.gather(row, state, **axis).tolist(),
            ]
            for axis in ({}, {"axis": "dp"}, {"axis": "tp"}, {"axis": "cp"})
        ]

    of_columns = {0: [2, 1.0, 0, 2], 1: [4, 2.0, 1, 3]}
    of_rows = {0: [1, 0.5, 0, 1], 1: [5, 2.5, 2, 3]}
    assert simulate(run, mesh=SQUARE) == [
        [of_columns[tp], of_columns[tp], of_rows[dp], [2 * dp + tp, 2 * dp + tp, 2 * dp + tp]]
        for dp in range(2)
        for tp in range(2)
    ]


def test_every_collective_takes_the_state_of_an_axis():
    def run(state):
        row = state.along("tp")
        af.barrier(row)
        found = af.on_main(lambda: state.rank, row)
        return [
            af.broadcast(state.rank, row, source=1),
            af.any_rank(state.rank == 3, row),
            af.reduce_max(state.rank, row),
            af.reduce_min(state.rank, row),
            af.reduce_sum(state.rank, row),
            af.gather([state.rank], row),
            found,
        ]

    first, second = [1, False, 1, 0, 1, [0, 1]], [3, True, 3, 2, 5, [2, 3]]
    found = simulate(run, mesh=SQUARE)
    assert [each[:6] for each in found] == [first, first, second, second]


def test_what_concerns_all_ranks_goes_over_the_world():
    def run(state):
        af.barrier(state)
        return [
            af.broadcast(state.rank, state, source=3),
            af.any_rank(state.rank == 3, state),
            af.reduce_max(state.rank, state),
        ]

    assert simulate(run, mesh=SQUARE) == [[3, True, 3]] * 4


@pytest.mark.parametrize("name", ["build", "save", "load", "resume", "load_accelerate"])
def test_what_needs_all_ranks_refuses_the_state_of_an_axis(name, tmp_path):
    model = torch.nn.Linear(1, 1)
    plan = af.Plan(lambda m, b: m(b).sum(), model, torch.optim.SGD(model.parameters()))
    state, step = af.build(plan, af.DistState())
    calls = {
        "build": lambda state: af.build(plan, state),
        "save": lambda state: af.save(step, state, tmp_path),
        "load": lambda state: af.load(step, state, tmp_path),
        "resume": lambda state: af.resume(step, state, tmp_path),
        "load_accelerate": lambda state: af.checkpoint.load_accelerate(step, state, tmp_path),
    }
    text = f"{name}: state must be of all ranks, got one along 'dp'; give the state that along was"
    with pytest.raises(ValueError, match=text):
        calls[name](state.along("dp"))


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_a_step_and_an_evaluation_refuse_the_state_of_an_axis(axis):
    def run(state):
        state, step = ours.built(af.wrap_ddp(), state)
        along = state.along(axis)
        for call in (step, step.forward, lambda state, batch: af.evaluate(step, state, [batch])):
            with pytest.raises(
                ValueError, match="step: state must be of the world it was built in"
            ):
                call(along, (torch.ones(2, 3).double(), torch.ones(2, 1).double()))

    simulate(run, mesh=SQUARE)


def test_the_mesh_of_a_launch_is_the_default_of_init(monkeypatch):
    monkeypatch.setenv("ACCEL_FN_MESH", "dp=-1,tp=1")
    assert [axis.name for axis in af.init(device="cpu").axes] == ["dp", "tp"]
    assert [axis.name for axis in af.init(device="cpu", mesh={"cp": 1}).axes] == ["dp", "cp"]
