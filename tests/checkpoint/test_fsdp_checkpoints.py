"""Checkpoints and weight files of sharded models."""

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import accel_fn as af
from accel_fn.testing import simulate
from accel_fn.testing.internals import export_model
from tests.support import strategies as ours
from tests.support.block_models import (
    batches,
    part,
    stack,
    tied,
    train,
)


def test_weights_of_shards_are_files_of_whole_tensors(tmp_path):
    def run(state):
        model, *_ = train(state, af.wrap_fsdp(offload=True))
        af.save_model(model, tmp_path)
        assert (tmp_path / "model.safetensors").exists()
        return ours.whole(model.state_dict())

    [trained] = simulate(run, world_size=1)
    alone = stack(seed=1)
    af.load_model(alone, tmp_path)
    ours.assert_identical(alone.state_dict(), trained)


def test_what_is_saved_in_shards_continues_in_one_process(tmp_path):
    def start(state):
        model, _, step, state = train(state, af.wrap_fsdp(offload=True))
        path = af.save(step, state, tmp_path / "run")
        saved = {name: each.clone() for name, each in ours.whole(model.state_dict()).items()}
        return path, saved, go_on(model, step, state)

    def go_on(model, step, state):
        for batch in batches(2):
            state, _ = step(state, part(batch, state))
        return ours.whole(dict(model.named_parameters()))

    path, saved, expected = simulate(start, world_size=2)[0]
    alone = stack(seed=1)
    plan = af.Plan(ours.mse, alone, ours.adamw(alone.parameters()))
    state, step = af.build(plan, af.DistState())
    state = af.load(step, state, path.parent)
    ours.assert_close(go_on(alone, step, state), expected)
    other = stack(seed=2)
    export_model(path, tmp_path / "weights", "", 10**9)
    af.load_model(other, tmp_path / "weights")
    ours.assert_identical(other.state_dict(), saved)


TOKENS = torch.arange(7).repeat(2)


def predict(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def build_tied(state, recipe, seed=0):
    model = tied(seed)
    plan = af.Plan(predict, model, ours.adamw(model.parameters()))
    state, step = af.build(recipe(plan), state)
    return model, step, state


def train_tied(state, recipe):
    model, step, state = build_tied(state, recipe)
    for _ in range(3):
        state, _ = step(state, part((TOKENS, TOKENS.flip(0)), state))
    return model, step, state


def go_on(model, step, state):
    step(state, part((TOKENS, TOKENS.roll(1)), state))
    return ours.whole(dict(model.named_parameters()))


def test_tied_embeddings_stay_tied_train_the_same_and_resume_in_one_process(tmp_path):
    """The seven rows of the embedding lie on three ranks as 3, 3 and 1."""

    def run(state, recipe):
        model, step, state = train_tied(state, recipe)
        assert model.head.weight is model.embedding.weight
        if state.world_size > 1:
            af.save(step, state, tmp_path / "run")
            af.save_model(model, tmp_path / "weights")
        found = {name: each.clone() for name, each in ours.whole(model.state_dict()).items()}
        return found, go_on(model, step, state)

    expected, _ = run(af.DistState(), af.compose())
    ranks = simulate(lambda state: run(state, af.wrap_fsdp()), world_size=3)
    for actual, _ in ranks:
        assert {name for name in actual if "calls" in name}
        for name, value in expected.items():
            if "calls" not in name:
                torch.testing.assert_close(actual[name], value, **ours.EXACT)
    trained, after = ranks[0]
    # written once, under the first of its names
    assert load_file(tmp_path / "weights" / "model.safetensors").keys() == trained.keys() - {
        "head.weight"
    }
    af.load_model(alone := tied(seed=1), tmp_path / "weights")
    assert alone.head.weight is alone.embedding.weight
    ours.assert_identical(alone.state_dict(), trained)
    model, step, state = build_tied(af.DistState(), af.compose(), seed=1)
    state = af.load(step, state, tmp_path / "run")
    assert model.head.weight is model.embedding.weight
    ours.assert_close(go_on(model, step, state), after)
