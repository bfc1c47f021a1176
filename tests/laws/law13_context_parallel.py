"""Law 13: a model whose sequences `wrap_cp` cuts over an axis, on any mesh, is one process."""

import copy
import json
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate, strategies
from tests.support import long_sequences as long
from tests.support import strategies as ours
from tests.support.processes import from_lists, launch

CUT = af.wrap_cp(long.DIMS)
SQUARE, SPLIT = {"dp": 2, "cp": 2}, {"cp": 2, "tp": 2}
CUBE = {"dp": 2, "cp": 2, "tp": 2}
SIZES = [  # of axes that up to four ranks lie along
    (dp, cp, tp) for dp in range(1, 5) for cp in range(1, 5) for tp in (1, 2) if dp * cp * tp <= 4
]
WRAPS = {"wrap_ddp": af.wrap_ddp(), "wrap_fsdp": af.wrap_fsdp()}
both = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


def rows(chosen, *axes):
    """Parametrize over a product; rows that are not chosen are slow, since simulated FSDP is."""
    every = [
        pytest.param(*row, marks=() if row in chosen else pytest.mark.slow)
        for row in product(*axes)
    ]
    assert sum(not each.marks for each in every) == len(chosen)
    return every


pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of outputs that are views


def train_by_hand(model, batches, make_optimizer, *, max_norm=0.5):
    """Return loss, norm, weight and metrics of each step, and the parameters, of one process."""
    model = copy.deepcopy(model)
    optimizer, found = make_optimizer(model.parameters()), []
    for batch in batches:
        loss, metrics = long.loss_fn(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        right, count = map(int, metrics["right"])
        found.append((loss.item(), norm.item(), count, right / count, right / count))
    return found, model.state_dict()


def train(state, model, parts, recipe, make_optimizer):
    """Return the same of a rank, which trains on `parts[its place along dp]`."""
    mine = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in mine.parameters():
            parameter.add_(state.rank)  # the values of rank 0 are everyone's
    optimizer = make_optimizer(mine.parameters())
    plan = af.Plan(long.loss_fn, mine, optimizer, af.count_labels("labels"))
    state, step = af.build(recipe(plan), state)
    found = []
    for part in parts[state.data.rank]:
        state, report = step(state, part)
        numbers = (
            report.loss,
            report.grad_norm,
            report.weight,
            *map(report.metrics.get, ("right", "part")),
        )
        found.append(tuple(map(float, numbers)))
    return found, ours.whole(mine.state_dict())


def check(wrap, model, mesh, batches, sizes, num_microbatches=1, make_optimizer=ours.sgd, cut=CUT):
    # AdamW turns the rounding of a drawn gradient near zero into 1e-12 of the rate.
    recipe = af.compose(wrap, cut, af.accumulate(num_microbatches), af.clip(0.5))
    parts = ours.dealt(batches, sizes)
    reports, expected = train_by_hand(model, batches, make_optimizer)
    for found, actual in simulate(
        lambda state: train(state, model, parts, recipe, make_optimizer), mesh=mesh
    ):
        ours.assert_close(actual, expected)
        # The norm is reported in float32.
        assert found == [pytest.approx(each, rel=1e-6) for each in reports]
        assert [each[0] for each in found] == pytest.approx(
            [each[0] for each in reports], rel=1e-12
        )


@st.composite
def runs(draw):
    """Draw a mesh, sequences of any length, packed or not, and any split of the rows over `dp`."""
    mesh = dict(zip(("dp", "cp", "tp"), draw(st.sampled_from(SIZES)), strict=True))
    length = draw(st.integers(mesh["cp"], long.MAX_TOKENS))
    if draw(st.booleans()):  # an axis that is left out has one rank
        mesh = {name: size for name, size in mesh.items() if size > 1 or name == "dp"}
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=2))
    options = {"packed": draw(st.booleans()), "seed": draw(st.integers(0, 9))}
    parts = [draw(strategies.uneven_parts(size, mesh["dp"])) for size in sizes]
    return mesh, long.batches(*sizes, length=length, **options), parts


@both
@ours.share(0.2)
@given(run=runs(), num_microbatches=st.integers(1, 3))
def test_any_cut_of_sequences_is_one_rank(wrap, run, num_microbatches):
    split = af.compose(wrap, af.wrap_tp(long.STYLES))
    check(split, long.long_model(depth=1), *run, num_microbatches)


@pytest.mark.parametrize(
    ("name", "mesh", "packed"),
    rows(
        [("wrap_ddp", {"cp": 4}, False), ("wrap_fsdp", SQUARE, True)],
        WRAPS,
        [{"cp": 4}, SQUARE],
        [False, True],
    ),
    ids=str,
)
def test_a_mesh_is_one_rank(name, mesh, packed):
    batches = long.batches(3, 4, 3, packed=packed)
    sizes = [[2, 1], [0, 4], [3, 0]] if "dp" in mesh else [[3], [4], [3]]
    check(WRAPS[name], long.long_model(), mesh, batches, sizes, 2, ours.adamw)


@pytest.mark.parametrize(
    ("name", "mesh"), rows([("wrap_ddp", SPLIT)], WRAPS, [SPLIT, CUBE]), ids=str
)
def test_a_model_that_is_split_too_is_one_rank(name, mesh):
    batches = long.batches(3, 4, packed=True)
    sizes = [[2, 1], [0, 4]] if "dp" in mesh else [[3], [4]]
    wraps = af.compose(WRAPS[name], af.wrap_tp(long.STYLES), af.checkpoint_activations())
    check(wraps, long.long_model(), mesh, batches, sizes, 2)


@pytest.mark.parametrize(
    ("mesh", "packed"), rows([({"cp": 2}, True)], [{"cp": 2}, SQUARE], [False, True]), ids=str
)
def test_ranks_that_attend_for_some_heads_are_one_rank(mesh, packed):
    batches = long.batches(3, 4, 3, length=9, packed=packed)
    sizes = [[2, 1], [0, 4], [3, 0]] if "dp" in mesh else [[3], [4], [3]]
    wraps = af.compose(af.wrap_fsdp(), af.checkpoint_activations())
    cut = af.wrap_cp(long.DIMS, attention="ulysses")
    check(wraps, long.long_model(), mesh, batches, sizes, 2, ours.adamw, cut)


@both
@pytest.mark.parametrize("of_torch", [False, True], ids=["checkpoint_activations", "of torch"])
def test_activations_that_are_computed_again_attend_to_the_whole_sequence(wrap, of_torch):
    wraps = wrap if of_torch else af.compose(wrap, af.checkpoint_activations())
    model = long.long_model(reentrant=False if of_torch else None)
    check(wraps, model, {"cp": 2}, long.batches(3, 4), [[3], [4]], 2)


@both
def test_a_mesh_evaluates_predicts_and_runs_forward_as_one_process(wrap):
    batches, model = long.batches(3, 4, length=7), long.long_model()

    def run(state):
        mine = copy.deepcopy(model)
        plan = af.Plan(long.loss_fn, mine, ours.sgd(mine.parameters()), af.count_labels("labels"))
        state, step = af.build(af.compose(wrap, CUT)(plan), state)
        parts = [af.shard_batch(batch, state) for batch in batches]
        rows = af.predict(step, state, parts, lambda model, batch: model(batch))
        return af.evaluate(step, state, parts), step.forward(state, parts[0]), rows

    ((means, loss, rows),) = simulate(run, world_size=1)
    for found in simulate(run, mesh={"dp": 2, "cp": 2}):
        assert found[0] == pytest.approx(means, rel=1e-12)
        assert torch.allclose(found[1], loss, rtol=1e-12)
        assert torch.allclose(found[2], rows, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "precision"),
    rows([("wrap_ddp", "fp16"), ("wrap_fsdp", "bf16")], WRAPS, ["bf16", "fp16"]),
)
def test_autocast_and_a_loss_scale_are_those_of_one_process_to_their_rounding(name, precision):
    """The bounds are those of products in bf16 and fp16; the updates are of the size of 0.1."""
    wrap, atol = WRAPS[name], {"bf16": 1e-3, "fp16": 1e-4}[precision]
    batches = long.batches(4, 4)
    model = long.long_model().float()

    def run(state):
        mine = copy.deepcopy(model)
        plan = af.Plan(long.loss_fn, mine, ours.sgd(mine.parameters()), af.count_labels("labels"))
        amp = af.compose(af.with_amp(precision), af.checkpoint_activations())
        recipe = af.compose(wrap, CUT, amp) if state.world_size > 1 else amp
        state, step = af.build(recipe(plan), state)
        for batch in batches:
            state, _ = step(state, af.shard_batch(batch, state))
        return ours.whole(mine.state_dict())

    (expected,) = simulate(run, world_size=1)
    for actual in simulate(run, mesh={"dp": 2, "cp": 2}):
        ours.assert_close(actual, expected, rtol=0, atol=atol)


def test_layers_that_are_frozen_pass_gradients_on():
    batches, model = long.batches(3, 4), long.long_model()
    model.embedding.requires_grad_(False)
    model.places.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    model.blocks[0].query.weight.requires_grad_(True)
    model.blocks[1].key.weight.requires_grad_(False)

    def run(state):
        mine = copy.deepcopy(model)
        plan = af.Plan(long.loss_fn, mine, ours.sgd(mine.parameters()), af.count_labels("labels"))
        state, step = af.build(af.compose(af.wrap_fsdp(), CUT)(plan), state)
        for batch in batches:
            state, _ = step(state, af.shard_batch(batch, state))
        return ours.whole(mine.state_dict())

    (expected,) = simulate(run, world_size=1)
    for actual in simulate(run, mesh={"dp": 2, "cp": 2}):
        ours.assert_close(actual, expected)


def test_a_run_is_saved_on_a_mesh_and_resumed_on_one_process(tmp_path):
    batches, model = long.batches(3, 4), long.long_model(depth=1)

    def run(state):
        mine = copy.deepcopy(model)
        plan = af.Plan(long.loss_fn, mine, ours.adamw(mine.parameters()), af.count_labels("labels"))
        recipe = (
            af.compose(af.wrap_ddp(), CUT) if state.world_size > 1 else af.compose(af.wrap_ddp())
        )
        state, step = af.build(recipe(plan), state)
        state = af.resume(step, state, tmp_path)
        state, _ = step(state, batches[state.step])
        af.save(step, state, tmp_path)
        return mine.state_dict()

    simulate(run, mesh={"cp": 2})
    (found,) = simulate(run, world_size=1)
    ours.assert_close(found, train_by_hand(model, batches, ours.adamw, max_norm=torch.inf)[1])


TRAIN = """
import json
import accel_fn as af
from tests.laws.law13_context_parallel import CUT, WRAPS
from tests.support import long_sequences as long
from tests.support import strategies as ours

with af.distributed(device="cpu", timeout_s=60, mesh={"dp": 2, "cp": 2}) as state:
    for wrap in WRAPS.values():
        model = long.long_model()
        plan = af.Plan(long.loss_fn, model, ours.sgd(model.parameters()), af.count_labels("labels"))
        recipe = af.compose(wrap, CUT, af.checkpoint_activations(), af.clip(0.5))
        state, step = af.build(recipe(plan), state)
        for batch in long.batches(3, 1, packed=True):
            state, report = step(state, af.shard_batch(batch, state))
        say(json.dumps({name: each.tolist() for name, each in ours.whole(model.state_dict()).items()}))
"""


@pytest.mark.slow
def test_four_processes_train_as_one():
    batches = long.batches(3, 1, packed=True)
    _, expected = train_by_hand(long.long_model(), batches, ours.sgd)
    ranks = launch(TRAIN, num_processes=4).splitlines()
    assert len(ranks) == 8
    for rank in ranks:
        ours.assert_close(from_lists(json.loads(rank)), expected)
