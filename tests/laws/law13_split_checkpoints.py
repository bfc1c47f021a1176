"""Law 13: runs that `wrap_tp` splits are saved, and go on anywhere; weights are saved whole and loaded."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate
from tests.laws.law13_tensor_parallel import HEAD, NORMS, SQUARE, TABLE
from tests.laws.law13_users_checkpoints import held
from tests.support import language_model as lm
from tests.support import strategies as ours
from tests.support.processes import from_lists, launch
from tests.support.runs_on_meshes import train_by_hand

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of outputs that are views

SPLIT = af.wrap_tp(lm.STYLES | HEAD | TABLE)
PLACES = {
    "wrap_ddp": (SQUARE, af.compose(af.wrap_ddp(), SPLIT)),
    "wrap_fsdp": (SQUARE, af.compose(af.wrap_fsdp(), SPLIT)),
    "other styles": ({"tp": 2, "dp": 1}, af.wrap_tp(lm.STYLES | NORMS)),
    "wrap_tp of four": ({"dp": 1, "tp": 4}, SPLIT),
    "replicas": ({"dp": 2}, af.wrap_ddp()),
    "shards": ({"dp": 3}, af.wrap_fsdp()),
    "one process": ({"dp": 1}, af.compose()),
}
BOTH = pytest.mark.parametrize(
    "place", ["wrap_ddp", pytest.param("wrap_fsdp", marks=pytest.mark.slow)]
)
BATCHES = lm.batches(5, 3, 6, 4, 2, 5, 4)


def model_of(seed):
    return lm.language_model(seed, num_heads=4, depth=1)


def built(state, recipe, seed):
    model = model_of(seed)
    plan = af.Plan(lm.token_loss, model, ours.adamw(model.parameters()), af.count_labels("labels"))
    return af.build(af.compose(recipe, af.accumulate(2), af.clip(0.5))(plan), state)


def live(state, folder, place, *, num_steps=1, seed=0):
    """Go on with the run in a folder for some steps, and save it; return what it holds before and after."""
    state, step = built(state, PLACES[place][1], seed)
    state = af.resume(step, state, folder)
    before = held(step)
    for batch in BATCHES[state.step : state.step + num_steps]:
        state, _ = step(state, af.shard_batch(batch, state))
    af.save(step, state, folder)
    return before, held(step)


def lived(folder, place, **given):
    return simulate(lambda state: live(state, folder, place, **given), mesh=PLACES[place][0])


def by_hand(num_steps):
    """Return the parameters of one process; that of the head is the embedding's."""
    batches = BATCHES[:num_steps]
    _, found = train_by_hand(model_of(0), batches, loss_fn=lm.token_loss, max_norm=0.5)
    return {name: each for name, each in found.items() if name != "head.weight"}


def check(folder, places):
    """Each goes on with what the one before has saved, to the bit; the last ends as one process does."""
    after = None
    for seed, place in enumerate(places):
        ranks = lived(folder, place, seed=seed)
        for before, _ in ranks:
            ours.assert_identical(before, after or {})
        _, after = ranks[0]
    for _, actual in ranks:
        ours.assert_close(actual, by_hand(len(places)))


def test_a_run_moves_between_a_mesh_and_one_process(tmp_path):
    check(tmp_path, ["wrap_ddp", "one process"])


@pytest.mark.slow
@ours.share(0.05)
@given(places=st.lists(st.sampled_from([*PLACES]), min_size=3, max_size=6))
@example(places=["wrap_ddp", "one process", "wrap_fsdp"])
def test_a_run_moves_between_any_meshes(tmp_path_factory, places):
    check(tmp_path_factory.mktemp("run"), places)


@pytest.mark.slow
@BOTH
def test_a_run_that_is_resumed_on_its_mesh_is_one_that_never_stopped_to_the_bit(tmp_path, place):
    mesh, recipe = PLACES[place]

    def run(state):
        first, step = built(state, recipe, seed=0)
        first, _ = step(first, af.shard_batch(BATCHES[0], first))
        af.save(step, first, tmp_path)
        step(first, af.shard_batch(BATCHES[1], first))
        again, other = built(state, recipe, seed=1)
        again = af.resume(other, again, tmp_path)
        other(again, af.shard_batch(BATCHES[1], again))
        return held(step), held(other)

    for expected, actual in simulate(run, mesh=mesh):
        ours.assert_identical(actual, expected)


@BOTH
def test_weights_are_saved_whole_by_one_rank_and_loaded(tmp_path, place):
    mesh, recipe = PLACES[place]

    def run(state):
        _, step = built(state, recipe, seed=0)
        af.save_model(step.plan.model, tmp_path)
        copied = af.checkpoint.whole_state_dict(step.plan.model, state)
        _, other = built(state, recipe, seed=1)
        af.load_model(other.plan.model, tmp_path)
        return copied, ours.whole(other.plan.model.state_dict())

    expected = model_of(0).state_dict()
    for rank, (copied, loaded) in enumerate(simulate(run, mesh=mesh)):
        assert copied.keys() == (set() if rank else expected.keys())
        ours.assert_identical({**expected, **copied}, expected)
        ours.assert_identical(loaded, expected)
    plain = model_of(1)
    af.load_model(plain, tmp_path)
    ours.assert_identical(plain.state_dict(), expected)
    assert plain.head.weight is plain.embedding.weight


SCRIPT = """
import json
import accel_fn as af
from tests.laws import law13_split_checkpoints as tests

with af.distributed(device="cpu", timeout_s=60, mesh=tests.SQUARE) as state:
    for seed, place in enumerate(["wrap_ddp", "wrap_fsdp", "wrap_ddp"]):
        _, found = tests.live(state, {folder!r}, place, seed=seed, num_steps=1 + seed)
    say(json.dumps({{name: each.tolist() for name, each in found.items()}}))
"""


@pytest.mark.slow
def test_four_processes_train_and_one_process_goes_on(tmp_path):
    """Of the seven batches, the last one is for that process."""
    ranks = launch(SCRIPT.format(folder=str(tmp_path)), num_processes=4).splitlines()
    ((before, after),) = lived(tmp_path, "one process")
    before = {name: each.double() for name, each in before.items()}
    assert len(ranks) == 4
    for rank in ranks:
        ours.assert_identical(before, from_lists(json.loads(rank)))
    ours.assert_close(after, by_hand(len(BATCHES)))
