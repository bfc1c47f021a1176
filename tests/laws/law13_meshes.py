"""Law 13: ranks of any mesh give the result of one process, each row counted once."""

import copy
import json
from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from accel_fn.testing import simulate, strategies
from tests.laws import law03_contrastive as contrastive
from tests.support import on_one_rank
from tests.support import strategies as ours
from tests.support.processes import from_lists, launch

SQUARE = {"dp": 2, "tp": 2}
AXES = ["pp", "dp", "cp", "tp"]


@st.composite
def meshes(draw, max_ranks=6):
    """Draw two axes of a few ranks, and a split of batches over the data axis."""
    first, second = draw(st.lists(st.sampled_from(AXES), min_size=2, max_size=2, unique=True))
    size = draw(st.integers(1, 3))
    return {first: size, second: draw(st.integers(1, max_ranks // size))}


@st.composite
def dealt_over_meshes(draw, batches):
    """Draw global batches, a mesh, and any split over its data axis, also empty parts."""
    found, mesh = draw(batches), draw(meshes())
    num_parts = mesh.get("dp", 1)
    sizes = [draw(strategies.uneven_parts(af.count_samples(batch), num_parts)) for batch in found]
    return found, mesh, sizes


def trained(
    model, mesh, parts, recipe, loss_fn=ours.mse, weight_fn=af.count_samples, optimizer=ours.adamw
):
    """Train on a mesh; `parts` are those of the ranks along its data axis."""

    def run(state):
        mine = copy.deepcopy(model)
        if state.rank:  # the values of rank 0 are everyone's
            with torch.no_grad():
                for parameter in mine.parameters():
                    parameter.add_(state.rank)
        own_loss = loss_fn
        if loss_fn is contrastive.all_ranks:
            own_loss = loss_fn(state.along("dp"))
        plan = af.Plan(own_loss, mine, optimizer(mine.parameters()), weight_fn)
        state, step = af.build(recipe(plan), state)
        reports = []
        for part in parts[state.data.rank]:
            state, report = step(state, part)
            reports.append((float(report.loss), report.weight))
        return reports, ours.whole(mine.state_dict())

    return simulate(run, mesh=mesh)


@pytest.mark.parametrize("wrap", [af.wrap_ddp(), af.wrap_fsdp()], ids=["wrap_ddp", "wrap_fsdp"])
@ours.share(0.3)
@given(dealt=dealt_over_meshes(strategies.batches()), num_microbatches=st.integers(1, 3))
@example(
    dealt=(
        [(torch.arange(12.0).view(4, 3).double(), torch.ones(4, 1).double())],
        SQUARE,
        [[0, 4]],
    ),
    num_microbatches=2,
)
def test_any_mesh_is_one_rank(wrap, dealt, num_microbatches):
    batches, mesh, sizes = dealt
    losses, expected = ours.trained_by_hand(ours.regression_model(), batches, max_norm=0.5)
    recipe = af.compose(wrap, af.accumulate(num_microbatches), af.clip(0.5))
    parts = ours.dealt(batches, sizes)
    for reports, actual in trained(ours.regression_model(), mesh, parts, recipe):
        ours.assert_close(actual, expected)
        assert [loss for loss, _ in reports] == pytest.approx(losses, rel=1e-6)
        assert [weight for _, weight in reports] == [*map(af.count_samples, batches)]


@pytest.mark.parametrize(
    "wrap", [af.wrap_ddp(), pytest.param(af.wrap_fsdp(), marks=pytest.mark.slow)]
)
def test_a_loss_over_the_rows_of_all_ranks_is_that_of_one_process(wrap):
    batch = (torch.randn(5, 3).double(), torch.randn(5, 1).double())
    model = ours.regression_model()
    _, expected = ours.trained_by_hand(model, [batch], loss_fn=contrastive.one_process)
    parts = ours.dealt([batch], [[3, 2]])
    for _, actual in trained(model, SQUARE, parts, wrap, contrastive.all_ranks):
        ours.assert_close(actual, expected)


def test_a_loop_over_a_loader_evaluates_and_predicts_as_in_one_process():
    data = TensorDataset(torch.randn(11, 3).double(), torch.randn(11, 1).double())
    model = ours.regression_model()

    def run(state):
        mine = copy.deepcopy(model)
        plan = af.Plan(ours.mse, mine, ours.adamw(mine.parameters()))
        state, step = af.build(af.wrap_ddp()(plan), state)
        loader = af.shard_loader(DataLoader(data, batch_size=4, shuffle=True), state)
        weights = []
        for epoch in loader.epochs(2, since=state):
            for batch in epoch:
                state, report = step(state, batch)
                weights.append(report.weight)
        found = af.predict(step, state, loader, lambda model, batch: model(batch[0]))
        return weights, af.evaluate(step, state, loader)["loss"], found, step.forward(state, batch)

    ((weights, loss, rows, last),) = simulate(run, world_size=1)
    for found in simulate(run, mesh=SQUARE):
        assert found[0] == weights
        assert found[1] == pytest.approx(loss, rel=1e-12)
        assert torch.allclose(found[2], rows, rtol=0, atol=1e-12)
        assert torch.allclose(found[3], last, rtol=0, atol=1e-12)


def test_predictions_of_a_rank_without_rows_are_those_of_the_others():
    batch = (torch.randn(3, 3).double(), torch.randn(3, 1).double())

    def run(state):
        state, step = ours.built(af.wrap_ddp(), state)
        mine = [batch] if state.data.rank else []
        return af.predict(step, state, mine, lambda model, batch: batch[0])

    for rows in simulate(run, mesh=SQUARE):
        assert torch.equal(rows, batch[0])


def test_a_sum_that_is_taken_for_a_mean_is_refused_where_each_rank_has_one_row():
    batch = (torch.randn(2, 3).double(), torch.randn(2, 1).double())

    def run(state):
        model = ours.regression_model()
        plan = af.Plan(lambda m, b: (m(b[0]) - b[1]).sum(), model, ours.sgd(model.parameters()))
        state, step = af.build(af.wrap_ddp()(plan), state)
        step(state, af.shard_batch(batch, state))

    with pytest.raises(
        ValueError, match="loss_fn must return the mean over the batch's items, got a sum"
    ):
        simulate(run, mesh=SQUARE)


@pytest.mark.parametrize("mesh", [{"tp": 2}, SQUARE])
def test_a_row_that_several_ranks_hold_is_no_batch_to_be_cut(mesh):
    batch = (torch.ones(1, 3).double(), torch.ones(1, 1).double())

    def run(state):
        model = ours.regression_model()
        plan = af.Plan(ours.mse, model, ours.sgd(model.parameters()))
        state, step = af.build(af.wrap_ddp()(plan), state)
        step(state, af.shard_batch(batch, state))
        return af.explain(step, state)

    text = "could not be compared with those of its parts: no batch has had two samples"
    assert all(text in each for each in simulate(run, mesh=mesh))


def test_a_run_is_saved_and_resumed_on_other_meshes(tmp_path):
    others = [{"mesh": {"tp": 4}}, {"world_size": 1}]
    places = [where for other in others for where in ({"mesh": SQUARE}, other)]
    batches = [(torch.randn(6, 3).double(), torch.randn(6, 1).double()) for _ in places]
    model = ours.regression_model()
    _, expected = ours.trained_by_hand(model, batches)

    def run(state):
        mine = copy.deepcopy(model)
        plan = af.Plan(ours.mse, mine, ours.adamw(mine.parameters()))
        state, step = af.build(af.wrap_ddp()(plan), state)
        state = af.resume(step, state, tmp_path)
        state, _ = step(state, af.shard_batch(batches[state.step], state))
        af.save(step, state, tmp_path)
        return mine.state_dict()

    for where in places:
        first, *others = simulate(run, **where)
        for actual in others:
            ours.assert_close(actual, first)
    ours.assert_close(first, expected)


def test_a_stop_and_a_failure_before_the_first_forward_on_any_rank_are_known_on_all():
    learned = partial(on_one_rank.learned, recipe=af.wrap_ddp(), batch=four_batches()[0])
    for rank, (found, _) in enumerate(simulate(partial(learned, ranks=range(4)), mesh=SQUARE)):
        assert found == on_one_rank.expected(rank, range(4))


def test_ranks_that_share_no_data_axis_must_have_the_same_rows():
    """As where a loop cuts its batches by `state.rank`."""
    batch = (torch.randn(8, 3).double(), torch.randn(8, 1).double())

    def run(state):
        state, step = ours.built(af.wrap_ddp(), state)
        step(state, af.shard_batch(batch, af.DistState(rank=state.rank, world_size=4)))

    text = (
        "step: batch must be the same on ranks that differ in other axes than dp, got other rows "
        "on rank 1; give the DataLoader to shard_loader"
    )
    with pytest.raises(ValueError, match=text):
        simulate(run, mesh=SQUARE)


@pytest.mark.filterwarnings("error:step. batch should be this rank.s part")
def test_all_ranks_of_a_mesh_without_a_data_axis_may_have_the_same_rows():
    batch = (torch.randn(8, 3).double(), torch.randn(8, 1).double())

    def run(state):
        state, step = ours.built(af.wrap_ddp(), state)
        step(state, batch)

    simulate(run, mesh={"tp": 2})


@pytest.mark.parametrize(
    "recipe",
    [af.local_sgd(2), af.reproducible(num_virtual_ranks=4), af.wrap_deepspeed(stage=1)],
    ids=["local_sgd", "reproducible", "wrap_deepspeed"],
)
def test_transforms_that_know_no_axes_are_refused(recipe):
    text = r"build: \w+\(.*\) must have a mesh of dp alone, got dp 2 x tp 2; use wrap_ddp"
    with pytest.raises(ValueError, match=text):
        simulate(lambda state: ours.built(recipe, state), mesh=SQUARE)


def test_a_mesh_of_the_data_axis_alone_takes_any_transform():
    simulate(lambda state: ours.built(af.local_sgd(2), state), mesh={"dp": 2})


TRAIN = """
import json
import accel_fn as af
from tests.laws.law13_meshes import four_batches
from tests.support import strategies as ours

for mesh in ({"dp": -1, "tp": 2}, {"tp": 2, "dp": 2}):  # the second is of other groups
    with af.distributed(device="cpu", timeout_s=60, mesh=mesh) as state:
        rows = af.gather([state.rank], state, axis="tp")
        assert rows == [2 * state.data.rank, 2 * state.data.rank + 1]
        state, step = ours.built(af.wrap_ddp(), state, optimizer=ours.adamw)
        for batch in four_batches():
            state, report = step(state, af.shard_batch(batch, state))
        parameters = step.plan.model.state_dict()
        say(json.dumps({name: value.tolist() for name, value in parameters.items()}))
"""

DIFFERING = """
import accel_fn as af
import os

sizes = {"dp": 4} if os.environ["RANK"] == "3" else {"dp": 2, "tp": 2}
try:
    af.init(device="cpu", timeout_s=60, mesh=sizes)
except ValueError as error:
    say(error)
"""


def four_batches():
    """Return global batches of odd sizes, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(size, 3, generator=generator).double(),
            torch.randn(size, 1, generator=generator).double(),
        )
        for size in (7, 5, 1, 4)
    ]


@pytest.mark.slow
def test_four_processes_on_a_mesh_train_as_one():
    _, expected = ours.trained_by_hand(ours.regression_model(), four_batches())
    ranks = launch(TRAIN, num_processes=4).splitlines()
    assert len(ranks) == 8
    for rank in ranks:
        ours.assert_close(from_lists(json.loads(rank)), expected)


@pytest.mark.slow
def test_processes_that_give_other_meshes_are_refused_on_all():
    got = "got {'dp': 4} on rank 3 and {'dp': 2, 'tp': 2} on rank 0"
    launch(
        DIFFERING,
        num_processes=4,
        expect=[f"init: mesh must be the same on every rank, {got}"] * 4,
    )
