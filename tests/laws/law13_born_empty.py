"""Law 13: a model that is made empty, sharded and then loaded trains as one made and loaded whole."""

import copy
import re
import tempfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import language_model as lm
from tests.support import strategies as ours
from tests.support.runs_on_meshes import assert_one_process, train_by_hand

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of outputs that are views

FSDP, TP = af.wrap_fsdp(), af.wrap_tp(lm.STYLES)
SETUPS = {
    "FSDP, 1 rank": (FSDP, {"dp": 1}),
    "FSDP, 2 ranks": (FSDP, {"dp": 2}),
    "FSDP, 3 ranks": (FSDP, {"dp": 3}),
    "FSDP, 4 ranks": (FSDP, {"dp": 4}),
    "FSDP, 4 ranks, 2 groups": (af.wrap_fsdp(replicate=2), {"dp": 4}),
    "FSDP, the model as one unit": (af.wrap_fsdp(blocks=""), {"dp": 2}),
    "TP, 1 rank": (TP, {"dp": 1}),
    "TP, 2 ranks": (TP, {"dp": 1, "tp": 2}),
    "TP, 4 ranks": (TP, {"dp": 1, "tp": 4}),
    "TP and DDP": (af.compose(af.wrap_ddp(), TP), {"dp": 2, "tp": 2}),
    "both, 2 ranks": (af.compose(FSDP, TP), {"dp": 1, "tp": 2}),
    "both, 4 ranks": (af.compose(FSDP, TP), {"dp": 2, "tp": 2}),
}
BATCHES = lm.batches(5, 6, 3)


def setups(*names):
    """Parametrize by these set-ups, or by all; the others are slow."""
    marks = {name: () if name in names else pytest.mark.slow for name in SETUPS}
    cases = [pytest.param(*SETUPS[name], id=name, marks=marks[name]) for name in SETUPS]
    return pytest.mark.parametrize(("wrap", "mesh"), cases)


def parts_of(batches, mesh):
    sizes = [[len(part) for part in each["tokens"].tensor_split(mesh["dp"])] for each in batches]
    return ours.dealt(batches, sizes)


def make(**options):
    return af.empty(lm.language_model, num_heads=4, **options)


def built(state, recipe, model):
    plan = af.Plan(lm.token_loss, model, ours.adamw(model.parameters()), af.count_labels("labels"))
    return af.build(recipe(plan), state)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "not tied"])
def saved(request):
    """Return a model, and the folder that holds it in several files."""
    model = lm.language_model(num_heads=4, is_tied=request.param)
    with tempfile.TemporaryDirectory() as folder:
        af.save_model(model, folder, max_shard_size=3000)
        yield model, folder, request.param


@setups("FSDP, 1 rank", "FSDP, 2 ranks", "FSDP, 3 ranks", "TP, 1 rank", "both, 4 ranks")
def test_training_is_that_of_one_process(wrap, mesh, saved):
    model, folder, is_tied = saved
    recipe = af.compose(af.place(), wrap, af.accumulate(2), af.clip(0.5))
    parts = parts_of(BATCHES, mesh)

    def train(state):
        mine = make(is_tied=is_tied)
        state, step = built(state, recipe, mine)
        af.load_model(mine, folder)
        loaded = ours.whole(mine.state_dict())
        ours.assert_identical(loaded, model.state_dict())
        found = []
        for part in parts[state.data.rank]:
            state, report = step(state, part)
            found.append((float(report.loss), float(report.grad_norm), report.weight))
        assert (mine.head.weight is mine.embedding.weight) == is_tied
        return found, ours.whole(mine.state_dict())

    expected = train_by_hand(model, BATCHES, loss_fn=lm.token_loss, max_norm=0.5)
    assert_one_process(simulate(train, mesh=mesh), expected)
