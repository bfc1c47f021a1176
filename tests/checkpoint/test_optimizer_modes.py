"""Optimizers with train and eval modes: save, load and evaluate switch them and back, forward does not."""

from __future__ import annotations

import copy

import pytest
from torch.utils.data import DataLoader

import accel_fn as af
from accel_fn.testing import simulate
from accel_fn.testing.internals import export_model
from tests.checkpoint.test_several_optimizers import BATCH, train, weights
from tests.support import strategies as ours

schedulefree = pytest.importorskip("schedulefree")
KINDS = {
    "AdamW": lambda parameters: schedulefree.AdamWScheduleFree(parameters, lr=0.1),
    "SGD": lambda parameters: schedulefree.SGDScheduleFree(parameters, lr=0.1),
}


def make(kind, seed=0, state=None, wrap=None):
    model = ours.regression_model(seed)
    optimizer = kind(model.parameters())
    optimizer.train()
    plan = (wrap or af.wrap_ddp())(af.Plan(ours.mse, model, optimizer))
    return af.build(plan, state or af.DistState())


def by_hand(kind, count=3):
    """Return the parameters in train mode and in eval mode."""
    model = ours.regression_model()
    optimizer = kind(model.parameters())
    optimizer.train()
    for _ in range(count):
        optimizer.zero_grad()
        ours.mse(model, BATCH).backward()
        optimizer.step()
    training = copy.deepcopy(model.state_dict())
    optimizer.eval()
    return training, model


@pytest.mark.parametrize(("kind", "wait"), [(KINDS["AdamW"], True), (KINDS["SGD"], False)])
def test_what_is_saved_and_measured_is_in_eval_mode_and_training_continues(tmp_path, kind, wait):
    state, step = make(kind)
    state = train(state, step)
    training, evaluated = by_hand(kind)
    loss = af.evaluate(step, state, DataLoader([*zip(*BATCH, strict=True)], 2))["loss"]
    assert loss == pytest.approx(float(ours.mse(evaluated, BATCH).detach()), rel=1e-12)
    path = af.save(step, state, tmp_path, wait=wait)
    ours.assert_close(weights(step), training)
    train(state, step, 1)  # an optimizer in eval mode refuses to step
    ours.assert_close(weights(step), by_hand(kind, 4)[0])
    af.load(step, state, tmp_path)
    export_model(path, tmp_path / "weights", "", 10**9)
    exported = ours.regression_model(5)
    af.load_model(exported, tmp_path / "weights")
    ours.assert_close(exported.state_dict(), evaluated.state_dict())


@pytest.mark.parametrize("wrap", [af.wrap_ddp, af.wrap_fsdp])
def test_ranks_are_one_rank_and_resume_in_one(tmp_path, wrap):
    kind = KINDS["AdamW"]

    def run(state):
        state, step = make(kind, state=state, wrap=wrap())
        state = train(state, step)
        af.save(step, state, tmp_path)
        train(state, step)
        return weights(step)

    found = simulate(run, world_size=2)[0]
    state, step = make(kind, 7)
    state = af.load(step, state, tmp_path)
    train(state, step)
    ours.assert_close(weights(step), found)
    ours.assert_close(found, by_hand(kind, 6)[0])


def test_one_in_eval_mode_stays_so_and_one_whose_save_failed_is_back_in_train_mode(tmp_path):
    state, step = make(KINDS["AdamW"])
    state = train(state, step)
    (tmp_path / "file").touch()
    with pytest.raises(af.AccelError, match="can be written to"):
        af.save(step, state, tmp_path / "file")
    assert step.plan.optimizer.param_groups[0]["train_mode"]
    ours.assert_close(weights(step), by_hand(KINDS["AdamW"])[0])
    step.plan.optimizer.eval()
    before = weights(step)
    af.save(step, state, tmp_path / "run")
    af.load(step, state, tmp_path / "run")
    ours.assert_identical(weights(step), before)
    assert not step.plan.optimizer.param_groups[0]["train_mode"]
