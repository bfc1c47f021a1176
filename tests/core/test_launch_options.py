"""The options that a launch sets, as with_amp, accumulate and init read them when called without
arguments."""

import pytest
import torch
from torch import nn

import accel_fn as af
from tests.support import strategies as ours

PRECISION, NUMBER, WRAP, TIMEOUT, MESH = (
    "ACCEL_FN_MIXED_PRECISION",
    "ACCEL_FN_NUM_MICROBATCHES",
    "ACCEL_FN_WRAP",
    "ACCEL_FN_TIMEOUT_S",
    "ACCEL_FN_MESH",
)


@pytest.fixture
def said(monkeypatch):
    for name in (PRECISION, NUMBER, WRAP, TIMEOUT, MESH):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch.setenv


def make_plan():
    model = nn.Linear(3, 1)
    return af.Plan(ours.mse, model, torch.optim.SGD(model.parameters(), lr=0.1))


def explained(recipe):
    text = af.explain(recipe(make_plan()), af.DistState())
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in text.splitlines()}


def test_a_launch_that_sets_nothing_leaves_all_open(said):
    assert af.launcher.launch_options() == af.launcher.LaunchOptions()
    said(PRECISION, "")
    assert af.launcher.launch_options() == af.launcher.LaunchOptions()


def test_options_that_a_launch_sets_are_read(said):
    said(PRECISION, "bf16")
    said(NUMBER, "4")
    said(WRAP, "fsdp")
    said(TIMEOUT, "2.5")
    said(MESH, "dp=-1, tp=2")
    expected = af.launcher.LaunchOptions(
        mixed_precision="bf16",
        num_microbatches=4,
        wrap="fsdp",
        timeout_s=2.5,
        mesh={"dp": -1, "tp": 2},
    )
    assert af.launcher.launch_options() == expected


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        (PRECISION, "fp4", 'be "no", "fp16", "bf16" or "fp8", got \'fp4\''),
        (WRAP, "FSDP", 'be "ddp", "fsdp" or "deepspeed", got \'FSDP\''),
        (NUMBER, "0", "be an integer >= 1, got '0'"),
        (NUMBER, "2.0", "be an integer >= 1, got '2.0'"),
        (TIMEOUT, "0", "be a finite number > 0, in seconds, got '0'"),
        (TIMEOUT, "nan", "be a finite number > 0, .* got 'nan'"),
        (TIMEOUT, "10min", "be a finite number > 0, .* got '10min'"),
        (MESH, "dp", "be axes and their sizes, each once, such as dp=-1,tp=2, got 'dp'"),
        (MESH, "tp=2,tp=2", "be axes and their sizes, each once, .*, got 'tp=2,tp=2'"),
    ],
)
def test_a_variable_that_cannot_be_is_refused(said, name, value, rule):
    said(name, value)
    with pytest.raises(ValueError, match=f"^launch_options: {name} must {rule}$"):
        af.launcher.launch_options()


def test_the_precision_of_the_launch_is_that_of_with_amp(said):
    said(PRECISION, "bf16")
    phases = explained(af.with_amp())
    assert phases["forward"].endswith("under with_amp(), bf16 from the launch")
    assert "start" not in phases


@pytest.mark.parametrize(
    ("value", "same", "source"),
    [
        ("fsdp", af.wrap_fsdp, "fsdp from the launch"),
        ("ddp", af.wrap_ddp, "ddp from the launch"),
        ("deepspeed", af.wrap_deepspeed, "deepspeed from the launch"),
        (None, af.wrap_ddp, "ddp since the launch sets no --wrap"),
    ],
)
def test_replicas_or_shards_are_what_the_launch_says(said, value, same, source):
    if value is not None:
        said(WRAP, value)
    (slot,), (expected,) = (
        recipe(make_plan()).strategy for recipe in (af.wrap_as_launched(), same())
    )
    assert slot.func is expected.func
    line = explained(af.wrap_as_launched())["backward"]
    assert (
        line == f"the mean over the global batch; wrap_as_launched(), {source}, has nothing to do"
    )


@pytest.mark.parametrize("value", ["fsdp", "ddp", "deepspeed"])
def test_what_the_launch_sets_is_named_by_wrap_where_two_own_the_parameters(said, value):
    said(WRAP, value)
    with pytest.raises(ValueError, match=r"leave out one of wrap_as_launched and reproducible$"):
        af.build(af.compose(af.wrap_as_launched(), af.reproducible(4))(make_plan()), af.DistState())


def test_shards_from_the_launch_are_refused_where_wrap_fsdp_is(said):
    said(WRAP, "fsdp")
    model = nn.Linear(3, 1)
    plan = af.Plan(ours.mse, model, torch.optim.Rprop(model.parameters()))
    with pytest.raises(
        ValueError, match="wrap_fsdp's optimizer must be one that can update shards"
    ):
        af.build(af.wrap_as_launched()(plan), af.DistState())


def test_float16_from_the_launch_scales_the_loss_as_with_amp_does(said):
    said(PRECISION, "fp16")
    recipe = af.with_amp(init_scale=1024.0)
    assert "with_amp(init_scale=1024.0), fp16 from the launch" in explained(recipe)["forward"]
    state, _ = af.build(recipe(make_plan()), af.DistState())
    assert state.scaler.scale == 1024.0


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("no", "with_amp(), no from the launch"),
        (None, "with_amp(), no autocast since the launch sets no --mixed-precision"),
    ],
)
def test_without_a_precision_there_is_no_autocast_and_explain_shows_it(said, value, line):
    if value:
        said(PRECISION, value)
    plan = af.with_amp()(make_plan())
    assert plan.forward_contexts == ()
    assert explained(af.with_amp())["start"] == line


def test_the_number_of_the_launch_is_that_of_accumulate(said):
    said(NUMBER, "3")
    line = "accumulate(), 3 from the launch"
    assert explained(af.accumulate())["split"] == line
    line = "accumulate(split=None), 3 from the launch"
    assert explained(af.accumulate(split=None))["split"] == line


def test_without_a_number_the_batch_stays_whole_and_explain_shows_it(said):
    assert af.accumulate()(make_plan()).split == ()
    phases = explained(af.accumulate())
    assert phases["split"] == "the whole batch of the rank"
    assert phases["start"] == (
        "accumulate(), 1 micro-batch since the launch sets no --num-microbatches"
    )


def test_an_argument_wins_over_the_launch(said):
    said(PRECISION, "fp16")
    said(NUMBER, "3")
    phases = explained(af.compose(af.with_amp("bf16"), af.accumulate(2)))
    assert phases["forward"].endswith("under with_amp('bf16')")
    assert phases["split"] == "accumulate(2)"


def test_a_split_of_ones_own_is_not_the_launchs(said):
    said(NUMBER, "3")
    assert explained(af.accumulate(split=list))["split"] == "list"


def test_two_precisions_are_refused_from_any_source(said):
    said(PRECISION, "bf16")
    twice = af.compose(af.with_amp(), af.with_amp("bf16"))(make_plan())
    with pytest.raises(ValueError, match="plan must enter each context once"):
        af.build(twice, af.DistState())


@pytest.mark.parametrize(
    ("name", "value", "transform"),
    [(PRECISION, "half", af.with_amp), (NUMBER, "-1", af.accumulate)],
)
def test_a_bad_variable_is_refused_when_the_transform_is_made(said, name, value, transform):
    said(name, value)
    with pytest.raises(ValueError, match=f"launch_options: {name} must"):
        transform()
