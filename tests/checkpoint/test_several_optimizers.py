"""Checkpoints of several optimizers."""

from __future__ import annotations

import pytest
import torch

import accel_fn as af
from accel_fn.errors import CheckpointError
from tests.support import strategies as ours

INPUTS = torch.linspace(-1, 1, 12).double().reshape(4, 3)
BATCH = (INPUTS, INPUTS.sum(dim=1, keepdim=True))


def adamw(parameters, lr=0.05):
    return torch.optim.AdamW(parameters, lr=lr)


def matrices(model):
    return [each for each in model.parameters() if each.ndim == 2]


def vectors(model):
    return [each for each in model.parameters() if each.ndim < 2]


SPLITS = {
    "one": lambda model: adamw(model.parameters()),
    "one, two groups": lambda model: adamw(
        [{"params": matrices(model)}, {"params": vectors(model)}]
    ),
    "two": lambda model: {"matrices": adamw(matrices(model)), "rest": adamw(vectors(model))},
    "other names": lambda model: {"a": adamw(matrices(model)), "model_b": adamw(vectors(model))},
    "two classes": lambda model: {
        "matrices": adamw(matrices(model)),
        "rest": torch.optim.SGD(vectors(model), lr=0.05, momentum=0.9),
    },
}


def make(split, seed=0, state=None, wrap=None, rates=None):
    model = ours.regression_model(seed)
    transforms = [wrap or af.wrap_ddp(), af.clip(0.5), *([rates] if rates else [])]
    plan = af.compose(*transforms)(af.Plan(ours.mse, model, SPLITS[split](model)))
    return af.build(plan, state or af.DistState())


def train(state, step, count=3):
    part = tuple(each[state.rank :: state.world_size] for each in BATCH)
    for _ in range(count):
        state, _ = step(state, part)
    return state


def weights(step):
    return {name: each.clone() for name, each in ours.whole(step.plan.model.state_dict()).items()}


def refusal(saved, here):
    return (
        f"optimizers: {saved} saved, {here} here; give Plan those that were saved, or load with "
        'match="names", by which moments go on, or strict=False, which starts them fresh'
    )


ONE, TWO, NAMED = ["optimizer"], ["matrices", "rest"], ["a", "model_b"]
REFUSED = {
    "one as several": ("one", "two", refusal(ONE, TWO)),
    "groups as several": ("one, two groups", "two", refusal(ONE, TWO)),
    "several as one": ("two", "one", refusal(TWO, ONE)),
    "other names": ("two", "other names", refusal(TWO, NAMED)),
    "another class": ("two", "two classes", "optimizer 'rest': AdamW saved, SGD here"),
    "other groups": (
        "one",
        "one, two groups",
        "optimizer groups: [['0.weight', '0.bias', '2.weight', '2.bias']] saved, "
        "[['0.weight', '2.weight'], ['0.bias', '2.bias']] here; "
        'give match="names" to load into other groups of parameters',
    ),
}


@pytest.mark.parametrize(("saved", "here", "expected"), REFUSED.values(), ids=REFUSED)
def test_other_optimizers_are_refused_or_start_fresh(tmp_path, saved, here, expected, capsys):
    state, step = make(saved)
    af.save(step, train(state, step), tmp_path)
    state, other = make(here, 7)
    before = weights(other)
    with pytest.raises(CheckpointError) as caught:
        af.load(other, state, tmp_path)
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert lines == [expected]
    ours.assert_identical(weights(other), before)
    state = af.load(other, state, tmp_path, strict=False)
    assert expected in capsys.readouterr().err
    ours.assert_identical(weights(other), weights(step))
    fresh = [each for each in other.plan.optimizers.values() if not each.state]
    assert fresh == [
        each
        for name, each in other.plan.optimizers.items()
        if (name, expected) != ("matrices", REFUSED["another class"][-1])
    ]


@pytest.mark.parametrize(("saved", "here"), [("one", "two")])
def test_a_schedule_of_other_optimizers_starts_fresh(tmp_path, saved, here, capsys):
    rates = af.schedule(lambda count: 1 / (1 + count))
    state, step = make(saved, rates=rates)
    af.save(step, train(state, step), tmp_path)
    state, other = make(here, 7, rates=rates)
    af.load(other, state, tmp_path, strict=False)
    assert "schedule(LambdaLR) starts fresh: it was saved for other optimizers" in (
        capsys.readouterr().err
    )
    assert {each.param_groups[0]["lr"] for each in other.plan.optimizers.values()} == {0.05}


@pytest.mark.parametrize("name", ["gradients", "weight_fn", "model_2", "rest groups"])
def test_names_of_optimizers_are_no_other_names(tmp_path, name):
    """Names of slots, and the model's own, are refused."""

    def make_step(seed):
        model = ours.regression_model(seed)
        optimizers = {name: adamw(matrices(model)), "rest": adamw(vectors(model))}
        return af.build(af.clip(0.5)(af.Plan(ours.mse, model, optimizers)), af.DistState())

    state, step = make_step(0)
    state = train(state, step)
    af.save(step, state, tmp_path)
    _, other = make_step(7)
    af.load(other, state, tmp_path)
    for each in (step, other):
        train(state, each)
    ours.assert_identical(weights(other), weights(step))


def test_accelerates_files_are_read_in_the_order_of_the_plan(tmp_path):
    state, step = make("two classes")
    train(state, step)
    af.save_model(step.plan.model, tmp_path)
    for file, each in zip(
        ["optimizer.bin", "optimizer_1.bin"], step.plan.optimizers.values(), strict=True
    ):
        torch.save(each.state_dict(), tmp_path / file)
    other_state, other = make("two classes", 7)
    other_state = af.checkpoint.load_accelerate(other, other_state, tmp_path)
    assert other_state.step == 3
    for each in (step, other):
        train(state, each)
    ours.assert_identical(weights(other), weights(step))
    with pytest.raises(
        CheckpointError, match=r"as many optimizers as the plan has, got optimizer_1"
    ):
        af.checkpoint.load_accelerate(make("one")[1], state, tmp_path)
