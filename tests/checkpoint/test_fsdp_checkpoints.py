"""Checkpoints and weight files of sharded models."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import accel_fn as af
from accel_fn.checkpoint.weights.export import export_model
from accel_fn.testing import simulate
from tests.support import strategies as ours
from tests.support.block_models import (
    batches,
    part,
    stack,
    tied,
    train,
)


@pytest.mark.parametrize(
    ("world_size", "wrap"),
    [(1, {"offload": True}), (2, {}), pytest.param(4, {"replicate": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_weights_of_shards_are_files_of_whole_tensors(tmp_path, world_size, wrap):
    def run(state):
        model, *_ = train(state, af.wrap_fsdp(**wrap))
        af.save_model(model, tmp_path)
        assert (tmp_path / "model.safetensors").exists()
        return ours.whole(model.state_dict())

    trained = simulate(run, world_size=world_size)
    alone = stack(seed=1)
    af.load_model(alone, tmp_path)
    ours.assert_identical(alone.state_dict(), trained[0])


@pytest.mark.parametrize(
    ("world_size", "wrap"),
    [
        (2, {"offload": True}),
        *[
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((1, {"offload": True}), (4, {"replicate": 2}), (4, {"replicate": 4}))
        ],
    ],
    ids=str,
)
def test_what_is_saved_in_shards_of_any_kind_continues_in_one_process(tmp_path, world_size, wrap):
    def start(state):
        model, _, step, state = train(state, af.wrap_fsdp(**wrap))
        path = af.save(tmp_path / "run", state, step)
        saved = {name: each.clone() for name, each in ours.whole(model.state_dict()).items()}
        return path, saved, go_on(model, step, state)

    def go_on(model, step, state):
        for batch in batches(2):
            state, _ = step(state, part(batch, state))
        return ours.whole(dict(model.named_parameters()))

    path, saved, expected = simulate(start, world_size=world_size)[0]
    alone = stack(seed=1)
    plan = af.Plan(ours.mse, alone, ours.adamw(alone.parameters()))
    state, step = af.build(af.DistState(), plan)
    state = af.load(path.parent, state, step)
    ours.assert_close(go_on(alone, step, state), expected)
    other = stack(seed=2)
    export_model(path, tmp_path / "weights", "", 10**9)
    af.load_model(other, tmp_path / "weights")
    ours.assert_identical(other.state_dict(), saved)


def test_weights_of_shards_cannot_be_saved_by_one_rank_alone(tmp_path):
    def run(state):
        model, *_ = train(state, af.wrap_fsdp())
        try:
            af.on_main(lambda: af.save_model(model, tmp_path), state)
        except Exception as error:
            return str(error)

    _, other = simulate(
        run, world_size=2, timeout_s=0.75
    )  # a world of its own, which no other test uses
    assert other.startswith(
        "on_main: every rank must be in the same collective, got barrier on rank 0"
    )


TOKENS = torch.arange(7).repeat(2)


def predict(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def build_tied(state, recipe, seed=0):
    model = tied(seed)
    plan = af.Plan(predict, model, ours.adamw(model.parameters()))
    state, step = af.build(state, recipe(plan))
    return model, step, state


def train_tied(state, recipe):
    model, step, state = build_tied(state, recipe)
    for _ in range(3):
        state, _ = step(state, part((TOKENS, TOKENS.flip(0)), state))
    return model, step, state


sizes = pytest.mark.parametrize(
    "world_size", [pytest.param(2, marks=pytest.mark.slow), 3]
)  # 7 rows over 3 ranks: 3, 3, 1


@sizes
def test_tied_embeddings_stay_tied_and_train_the_same(tmp_path, world_size):
    def run(state, recipe):
        model, step, state = train_tied(state, recipe)
        assert model.head.weight is model.embedding.weight
        af.save(tmp_path / str(state.world_size), state, step)
        found = {**ours.whole(model.state_dict())}
        other, step, state = build_tied(state, recipe, seed=1)
        af.load(tmp_path / str(state.world_size), state, step)
        ours.assert_identical(ours.whole(other.state_dict()), found)
        return found

    expected = run(af.DistState(), af.compose())
    for actual in simulate(lambda state: run(state, af.wrap_fsdp()), world_size=world_size):
        assert {name for name in actual if "calls" in name}
        for name, value in expected.items():
            if "calls" not in name:
                torch.testing.assert_close(actual[name], value, **ours.EXACT)


@sizes
def test_weights_of_tied_shards_are_files_of_the_tied_model(tmp_path, world_size):
    def run(state):
        model, *_ = train_tied(state, af.wrap_fsdp())
        af.save_model(model, tmp_path)
        return ours.whole(model.state_dict())

    trained, *_ = simulate(run, world_size=world_size)
    held = load_file(tmp_path / "model.safetensors")
    # written once, under the first of its names
    assert held.keys() == trained.keys() - {"head.weight"}
    alone = tied(seed=1)
    af.load_model(alone, tmp_path)
    assert alone.head.weight is alone.embedding.weight
    ours.assert_identical(alone.state_dict(), trained)


@pytest.mark.parametrize(
    ("world_size", "make", "start"),
    [(3, stack, train), (3, tied, train_tied)],
)
def test_files_of_whole_tensors_are_read_into_shards(tmp_path, world_size, make, start):
    af.save_model(make(seed=1), tmp_path)

    def run(state):
        model, *_ = start(state, af.wrap_fsdp())
        af.load_model(model, tmp_path)
        assert make is stack or model.head.weight is model.embedding.weight
        return ours.whole(model.state_dict())

    for found in simulate(run, world_size=world_size):
        ours.assert_identical(found, make(seed=1).state_dict())


@sizes
def test_what_is_saved_of_tied_shards_resumes_in_one_process(tmp_path, world_size):
    def go_on(model, step, state):
        step(state, part((TOKENS, TOKENS.roll(1)), state))
        return ours.whole(dict(model.named_parameters()))

    def start(state):
        model, step, state = train_tied(state, af.wrap_fsdp())
        af.save(tmp_path, state, step)
        return go_on(model, step, state)

    expected, *_ = simulate(start, world_size=world_size)
    model, step, state = build_tied(af.DistState(), af.compose(), seed=1)
    state = af.load(tmp_path, state, step)
    assert model.head.weight is model.embedding.weight
    ours.assert_close(go_on(model, step, state), expected)
