"""Checkpoints of several optimizers, and between one and several."""

from __future__ import annotations

import pytest
import torch

import accel_fn as af
from accel_fn.errors import CheckpointError
from accel_fn.testing import simulate
from tests import strategies as ours
from tests.cases import pinned

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
    "two rates": lambda model: {
        "matrices": adamw(matrices(model), 0.2),
        "rest": adamw(vectors(model)),
    },
    "one, two rates": lambda model: adamw(
        [{"params": matrices(model), "lr": 0.2}, {"params": vectors(model)}]
    ),
    "two classes": lambda model: {
        "matrices": adamw(matrices(model)),
        "rest": torch.optim.SGD(vectors(model), lr=0.05, momentum=0.9),
    },
}


def make(split, seed=0, state=None, wrap=None):
    model = ours.regression_model(seed)
    plan = af.compose(wrap or af.wrap_ddp(), af.clip(0.5))(
        af.Plan(ours.mse, model, SPLITS[split](model))
    )
    return af.build(state or af.DistState(), plan)


def train(state, step, count=3):
    part = tuple(each[state.rank :: state.world_size] for each in BATCH)
    for _ in range(count):
        state, _ = step(state, part)
    return state


def weights(step):
    return {name: each.clone() for name, each in ours.whole(step.plan.model.state_dict()).items()}


FITTING = [
    ("two", "two"),
    ("two classes", "two classes"),
    ("one", "two"),
    ("two", "one"),
    ("two", "one, two groups"),
    ("two", "other names"),
    ("other names", "two"),
    ("one, two groups", "two"),
    ("two rates", "one, two rates"),
    ("one, two rates", "two rates"),
    ("two rates", "other names"),  # settings come from the checkpoint
]


@pytest.mark.parametrize(("saved", "here"), FITTING)
@pytest.mark.parametrize("strict", [True, False])
def test_a_run_resumes_to_the_bit_with_its_parameters_in_other_optimizers(
    tmp_path, saved, here, strict, capsys
):
    state, step = make(saved)
    state = train(state, step)
    af.save(tmp_path, state, step)
    other_state, other = make(here, 7)
    other_state = af.load(tmp_path, train(other_state, other), other, strict=strict)
    assert (other_state.step, capsys.readouterr().err) == (3, "")
    for each in (step, other):
        train(state, each)
    ours.assert_identical(weights(other), weights(step))


REFUSED = {
    "class": (
        ("two classes", "one"),
        [
            "optimizer of 0.bias: SGD saved, AdamW here",
            "optimizer of 2.bias: SGD saved, AdamW here",
            "group 0 of optimizer: 2 groups with other settings saved",
        ],
    ),
    "settings": (
        ("two rates", "one"),
        ["group 0 of optimizer: 2 groups with other settings saved"],
    ),
    "other class": (
        ("one", "two classes"),
        [
            "optimizer of 0.bias: AdamW saved, SGD here",
            "optimizer of 2.bias: AdamW saved, SGD here",
        ],
    ),
}


@pytest.mark.parametrize(("splits", "expected"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_listed_and_nothing_is_overwritten(tmp_path, splits, expected):
    saved, here = splits
    state, step = make(saved)
    af.save(tmp_path, train(state, step), step)
    state, other = make(here, 7)
    before = weights(other)
    with pytest.raises(CheckpointError) as caught:
        af.load(tmp_path, state, other)
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert lines[: len(expected)] == expected
    ours.assert_identical(weights(other), before)
    state = af.load(tmp_path, state, other, strict=False)
    ours.assert_identical(weights(other), weights(step))
    assert not any(each.state for each in other.plan.optimizers.values())


WORLDS = {
    "one": (1, af.wrap_ddp),
    "replicas": (2, af.wrap_ddp),
    "shards": (3, af.wrap_fsdp),
    "reproducible": (2, lambda: af.reproducible(2)),
}


TWO_TO_TWO, TWO_TO_ONE = ("two classes", "two classes"), ("two", "one")


@pytest.mark.parametrize(
    ("program", "to"),
    pinned(
        [
            (TWO_TO_ONE, "one"),
            (TWO_TO_TWO, "replicas"),
            (TWO_TO_ONE, "shards"),
            (TWO_TO_TWO, "reproducible"),
        ],
        [TWO_TO_TWO, TWO_TO_ONE],
        WORLDS,
    ),
    ids=str,
)
def test_worlds_and_strategies_may_change_too(tmp_path, program, to):
    (saved, here), to = program, WORLDS[to]
    other = (2, af.wrap_fsdp)
    start = to if to == WORLDS["reproducible"] else other  # `reproducible` has another signature

    def first(state):
        state, step = make(saved, state=state, wrap=start[1]())
        state = train(state, step)
        af.save(tmp_path, state, step)
        train(state, step)
        return weights(step)

    def second(state):
        state, step = make(here, 7, state=state, wrap=to[1]())
        train(af.load(tmp_path, state, step), step)
        return weights(step)

    expected = simulate(first, world_size=start[0])[0]
    for found in simulate(second, world_size=to[0]):
        ours.assert_close(found, expected)


@pytest.mark.parametrize(
    "name", ["gradients", "weight_fn", "accept", "model_2", "models", "rest groups"]
)
def test_names_of_optimizers_are_no_other_names(tmp_path, name):
    """Names of slots, and the model's own, are refused."""

    def make_step(seed):
        model = ours.regression_model(seed)
        optimizers = {name: adamw(matrices(model)), "rest": adamw(vectors(model))}
        return af.build(af.DistState(), af.clip(0.5)(af.Plan(ours.mse, model, optimizers)))

    state, step = make_step(0)
    state = train(state, step)
    af.save(tmp_path, state, step)
    _, other = make_step(7)
    af.load(tmp_path, state, other)
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
    other_state = af.load_accelerate(tmp_path, other, other_state)
    assert other_state.step == 3
    for each in (step, other):
        train(state, each)
    ours.assert_identical(weights(other), weights(step))
    with pytest.raises(
        CheckpointError, match=r"as many optimizers as the plan has, got optimizer_1"
    ):
        af.load_accelerate(tmp_path, make("one")[1], state)
