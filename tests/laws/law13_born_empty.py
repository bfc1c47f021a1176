"""Law 13: a model that is made empty, sharded and then loaded trains as one made and loaded whole."""

import json
import math
import re
import tempfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate
from tests.laws.law13_tensor_parallel import runs
from tests.support import language_model as lm
from tests.support import strategies as ours
from tests.support.processes import from_lists, launch
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
    """Cut batches for the ranks along `dp`."""
    sizes = [[len(part) for part in each["tokens"].tensor_split(mesh["dp"])] for each in batches]
    return ours.dealt(batches, sizes)


def make(**options):
    return af.empty(lm.language_model, num_heads=4, depth=1, **options)


def built(state, recipe, model):
    plan = af.Plan(lm.token_loss, model, ours.adamw(model.parameters()), af.count_labels("labels"))
    return af.build(recipe(plan), state)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "not tied"])
def saved(request):
    """Return a model, and the folder that holds it in several files."""
    model = lm.language_model(num_heads=4, depth=1, is_tied=request.param)
    with tempfile.TemporaryDirectory() as folder:
        af.save_model(model, folder, max_shard_size=3000)
        yield model, folder, request.param


def check(model, recipe, mesh, batches, parts, make_optimizer=ours.adamw):
    """Compare one process with training of a model that is made empty, and filled from files."""
    is_tied = model.head.weight is model.embedding.weight
    num_heads, depth = model.embedding.weight.shape[1] // 4, len(model.blocks)
    with tempfile.TemporaryDirectory() as folder:
        af.save_model(model, folder, max_shard_size=3000)

        def train(state):
            mine = af.empty(lm.language_model, num_heads=num_heads, depth=depth, is_tied=is_tied)
            optimizer = make_optimizer(mine.parameters())
            plan = af.Plan(lm.token_loss, mine, optimizer, af.count_labels("labels"))
            state, step = af.build(recipe(plan), state)
            af.load_model(mine, folder)
            ours.assert_identical(ours.whole(mine.state_dict()), model.state_dict())
            found = []
            for part in parts[state.data.rank]:
                state, report = step(state, part)
                found.append((float(report.loss), float(report.grad_norm), report.weight))
            assert (mine.head.weight is mine.embedding.weight) == is_tied
            return found, ours.whole(mine.state_dict())

        ranks = simulate(train, mesh=mesh)
    options = {"loss_fn": lm.token_loss, "optimizer": make_optimizer, "max_norm": 0.5}
    assert_one_process(ranks, train_by_hand(model, batches, **options))


@setups("FSDP, 1 rank", "FSDP, 3 ranks", "TP, 2 ranks")
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "not tied"])
def test_training_is_that_of_one_process(wrap, mesh, is_tied):
    model = lm.language_model(num_heads=4, depth=1, is_tied=is_tied)
    recipe = af.compose(af.place(), wrap, af.accumulate(2), af.clip(0.5))
    check(model, recipe, mesh, BATCHES, parts_of(BATCHES, mesh))


@pytest.mark.slow
@ours.share(0.7)
@given(run=runs(), num_microbatches=st.integers(1, 3))
def test_any_model_on_any_mesh_is_one_process(run, num_microbatches):
    model, styles, mesh, batches, sizes = run
    recipe = af.compose(
        af.wrap_fsdp(), af.wrap_tp(styles), af.accumulate(num_microbatches), af.clip(0.5)
    )
    # AdamW turns the rounding of a drawn gradient near zero into 1e-12 of the rate.
    check(model, recipe, mesh, batches, ours.dealt(batches, sizes), ours.sgd)


def means(step):
    """Return the means of a step's average, whole."""
    kept = step.plan.after_update[0].state_dict()
    return ours.whole({name: each for name, each in kept.items() if "mean/" in name})


@pytest.mark.parametrize("average", [af.ema(0.9), af.swa(num_warmup=1)], ids=["ema", "swa"])
def test_an_average_has_the_bits_of_a_model_that_was_made_whole(average, saved):
    _, folder, is_tied = saved

    def train(make):
        mine = make(lm.language_model, num_heads=4, depth=1, is_tied=is_tied)
        state, step = built(af.DistState(), af.compose(af.wrap_fsdp(), average), mine)
        af.load_model(mine, folder)
        for batch in BATCHES:
            state, _ = step(state, batch)
        return means(step)

    whole = train(lambda fn, **options: fn(**options))
    ours.assert_identical(train(af.empty), whole)


@setups("FSDP, 2 ranks")
def test_an_average_of_parameters_that_stay_has_their_bits(wrap, mesh, saved):
    model, folder, is_tied = saved

    def run(state):
        mine = make(is_tied=is_tied)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.0)
        plan = af.Plan(lm.token_loss, mine, optimizer, af.count_labels("labels"))
        state, step = af.build(af.compose(wrap, af.ema(0.9), af.check_replicas(1))(plan), state)
        af.load_model(mine, folder)
        with af.averaged(step):
            early = ours.whole(mine.state_dict())
        for part in parts_of(BATCHES[:1], mesh)[state.data.rank] * 2:
            state, _ = step(state, part)
        return early, {name.removeprefix("mean/"): each for name, each in means(step).items()}

    expected = dict(model.named_parameters())
    for found in simulate(run, mesh=mesh):
        for each in found:
            ours.assert_identical(each, expected)


NOT_FILLED = (
    "model must have values before its first step, got none for places, embedding.weight, "
    "blocks.0.first_norm.weight and 16 more; call load_model(model, folder) after build"
)


@setups("FSDP, 1 rank", "FSDP, 3 ranks", "TP, 2 ranks")
def test_a_step_before_the_model_is_filled_raises_on_all_ranks(wrap, mesh, tmp_path):
    parts = parts_of(BATCHES, mesh)

    def run(state):
        mine = make()
        state, step = built(state, af.compose(wrap, af.ema(0.9)), mine)
        part = parts[state.data.rank][0]
        uses = {
            "step": lambda: step(state, part),
            "step.forward": lambda: step.forward(state, part),
            "averaged": lambda: af.averaged(step).__enter__(),
            "save": lambda: af.save(step, state, tmp_path),
        }
        for function, use in uses.items():
            with pytest.raises(ValueError, match=f"^{re.escape(f'{function}: {NOT_FILLED}')}"):
                use()
        with torch.no_grad():
            for each in mine.parameters():
                each.zero_()  # the program fills it
        state, report = step(state, part)
        return float(report.loss)

    for loss in simulate(run, mesh=mesh):
        assert loss == pytest.approx(math.log(lm.NUM_TOKENS))


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_on_other_ranks(tmp_path, saved):
    model, folder, is_tied = saved
    expected = train_by_hand(model, BATCHES, loss_fn=lm.token_loss, max_norm=0.5)[1]
    lives = [({"dp": 2}, 0, 1), ({"dp": 1, "tp": 2}, 1, 2), ({"dp": 1}, 2, 3)]

    for mesh, begin, end in lives:

        def live(state, begin=begin, end=end, mesh=mesh):
            mine = make(is_tied=is_tied)
            wrap = af.compose(af.wrap_fsdp(), TP) if "tp" in mesh else af.wrap_fsdp()
            recipe = af.compose(wrap, af.clip(0.5), af.ema(0.9))
            state, step = built(state, recipe, mine)
            if begin:
                state = af.resume(step, state, tmp_path)
            else:
                af.load_model(mine, folder)
            for part in parts_of(BATCHES, mesh)[state.data.rank][begin:end]:
                state, _ = step(state, part)
            af.save(step, state, tmp_path)
            return ours.whole(mine.state_dict())

        found = simulate(live, mesh=mesh)
    ours.assert_close(found[0], expected)


class WithHead(nn.Module):
    """A language model with a new head, a norm that has buffers, and a parameter beside them."""

    def __init__(self, **options):
        super().__init__()
        self.model = lm.language_model(num_heads=4, depth=1, **options)
        self.head = nn.Linear(16, 3).double()
        self.norm = nn.BatchNorm1d(16).double()
        self.scale = nn.Parameter(torch.ones(3, 2, dtype=torch.float64))

    def reset_parameters(self):
        nn.init.normal_(self.scale)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.model.norm.weight)


def reset(module):
    module.reset_parameters()


def fill_all(module):
    """Fill any module: some have no `reset_parameters`."""
    for each in module.parameters(recurse=False):
        nn.init.normal_(each)


INNER = {f"model.{name}": style for name, style in lm.STYLES.items()}
WORLDS = {
    "FSDP": (af.wrap_fsdp(), {"dp": 3}),
    "TP": (af.wrap_tp(INNER), {"dp": 1, "tp": 2}),
}


def filled(state, wrap, is_tied, folder=None, init=fill_all):
    """Return the values of a model with a head, from files and `init`."""
    mine = af.empty(WithHead, is_tied=is_tied)
    state, _ = built(state, wrap, mine)
    draws = torch.random.get_rng_state()
    af.load_model(mine, folder, rename=lambda name: f"model.{name}", init=init)
    assert torch.equal(torch.random.get_rng_state(), draws)
    return ours.whole(mine.state_dict())


@pytest.mark.parametrize(("wrap", "mesh"), WORLDS.values(), ids=WORLDS)
def test_values_of_init_do_not_depend_on_the_ranks(wrap, mesh, saved):
    _, _, is_tied = saved
    alone = filled(af.DistState(), wrap, is_tied)
    for each in simulate(lambda state: filled(state, wrap, is_tied), mesh=mesh):
        ours.assert_identical(each, alone)
    assert len(alone["scale"].unique()) == alone["scale"].numel()


@pytest.mark.parametrize(("wrap", "mesh"), WORLDS.values(), ids=WORLDS)
def test_init_fills_what_the_files_do_not_hold_and_nothing_else(wrap, mesh, saved):
    model, folder, is_tied = saved
    of_files = {f"model.{name}": each for name, each in model.state_dict().items()}
    alone = filled(af.DistState(), wrap, is_tied, folder, reset)
    for each in simulate(lambda state: filled(state, wrap, is_tied, folder, reset), mesh=mesh):
        ours.assert_identical(each, {**alone, **of_files})
    assert alone["head.weight"].all()


SCRIPT = """
import json
import accel_fn as af
from tests.laws.law13_born_empty import BATCHES, built, make, parts_of
from tests.support import strategies as ours

state = af.init(device="cpu", timeout_s=60)
model = make(is_tied={is_tied})
state, step = built(state, af.compose(af.wrap_fsdp(), af.accumulate(2), af.clip(0.5)), model)
af.load_model(model, {folder!r})
for part in parts_of(BATCHES, {{"dp": state.world_size}})[state.rank]:
    state, _ = step(state, part)
whole = ours.whole(model.state_dict())
say(json.dumps({{name: value.tolist() for name, value in whole.items()}}))
"""


@pytest.mark.slow
def test_real_processes_are_one_process(saved):
    model, folder, is_tied = saved
    expected = train_by_hand(model, BATCHES, loss_fn=lm.token_loss, max_norm=0.5)[1]
    said = launch(SCRIPT.format(folder=folder, is_tied=is_tied)).splitlines()
    assert len(said) == 2
    for line in said:
        ours.assert_close(from_lists(json.loads(line)), expected)
