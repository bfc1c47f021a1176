"""explain returns a text of what a step does; the phases themselves are tested beside what fills
them."""

import pytest
import torch
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours


def explained(*groups, **options):
    plan = af.Plan(ours.mse, nn.Linear(3, 1), torch.optim.AdamW(groups, **options))
    return af.explain(plan, af.DistState())


@pytest.mark.parametrize(
    ("mesh", "lines"),
    [
        (
            {"dp": 2, "tp": 3},
            [
                "one step on 6 ranks (dp 2 x tp 3), cpu",
                "  data       a part of each batch for 2 ranks along dp, the same rows along tp",
                "  weigh      count_samples, summed over 2 ranks along dp",
            ],
        ),
        (
            {"dp": 1, "cp": 2},
            [
                "one step on 2 ranks (dp 1 x cp 2), cpu",
                "  data       a part of each batch for 1 rank along dp, the same rows along cp",
                "  weigh      count_samples",
            ],
        ),
        (
            {"dp": 2, "tp": 1},
            [
                "one step on 2 ranks (dp 2 x tp 1), cpu",
                "  weigh      count_samples, summed over 2 ranks along dp",
            ],
        ),
    ],
)
def test_a_mesh_is_shown_with_the_axis_that_data_are_shared_over(mesh, lines):
    plan = af.Plan(ours.mse, nn.Linear(3, 1), torch.optim.AdamW(weights(1)))

    def run(state):
        return [line for line in af.explain(plan, state).splitlines() if line.startswith(starts)]

    starts = ("one", "  data", "  weigh")
    assert simulate(run, mesh=mesh)[0] == lines


def weights(count):
    return [nn.Parameter(torch.zeros(2)) for _ in range(count)]


def test_it_prints_nothing(capsys):
    assert explained({"params": weights(1)}).startswith("one step on 1 rank, cpu\n")
    assert capsys.readouterr() == ("", "")


def test_groups_of_the_optimizer_are_shown_by_the_settings_in_which_they_differ():
    groups = [
        {"params": weights(12), "weight_decay": 0.1},
        {"params": weights(1), "weight_decay": 0},
    ]
    line = "AdamW(lr=0.001), 13 parameter tensors, 26 numbers (weight_decay 0.1: 12 tensors, "
    assert explained(*groups).endswith(f"{line}weight_decay 0: 1 tensor)")


def test_groups_of_equal_settings_are_one_and_frozen_tensors_are_not_counted():
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    rates = [
        {"params": [*weights(2), frozen], "lr": 0.5},
        {"params": weights(1), "lr": torch.tensor(0.25), "betas": (0.5, 0.9)},
        {"params": weights(3), "lr": 0.5},
    ]
    assert explained(*rates).endswith(
        "(lr 0.5 and betas (0.9, 0.999): 5 tensors, lr 0.25 and betas (0.5, 0.9): 1 tensor)"
    )


@pytest.mark.parametrize("groups", [1, 2])
def test_groups_that_do_not_differ_are_not_shown(groups):
    parts = [{"params": weights(2)} for _ in range(groups)]
    assert explained(*parts).endswith(f"{2 * groups} parameter tensors, {4 * groups} numbers")


def test_says_what_has_no_values_yet():
    model = af.empty(torch.nn.Linear, 4, 1)
    plan = af.wrap_fsdp()(af.Plan(ours.mse, model, ours.sgd(model.parameters())))
    assert "  empty      2 tensors without memory, which build gives and load_model fills\n" in (
        af.explain(plan, af.DistState())
    )
    state, step = af.build(plan, af.DistState())
    assert "  empty      2 tensors without values, which load_model fills\n" in af.explain(
        step, state
    )
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    state, _ = step(state, (torch.ones(2, 4), torch.ones(2, 1)))
    assert "empty" not in af.explain(step, state)


def test_says_how_much_of_the_parameters_a_rank_holds():
    def run(state):
        state, step = af.build(af.wrap_fsdp()(ours.plan()), state)
        return af.explain(step, state)

    first, second = simulate(run, world_size=2)
    assert "4 parameter tensors, 26 numbers (18 on this rank)" in first
    assert "4 parameter tensors, 26 numbers (8 on this rank)" in second


@pytest.mark.parametrize(
    ("recipe", "mesh", "text"),
    [
        (af.wrap_fsdp(), {"dp": 4}, "parameters, gradients, optimizer in 4 parts"),
        (af.wrap_fsdp(replicate=2), {"dp": 4}, "parameters, gradients, optimizer in 2 parts"),
        (af.wrap_deepspeed(stage=2), {"dp": 4}, "optimizer, gradients in 4 parts"),
        (
            af.compose(af.wrap_fsdp(), af.wrap_tp({"0": "colwise"})),
            {"dp": 3, "tp": 2},
            "parameters, gradients, optimizer in 3 parts; layers with a style in 2 parts along tp",
        ),
        (
            af.compose(af.wrap_fsdp(), af.wrap_cp({"x": 1})),
            {"dp": 2, "cp": 2},
            "parameters, gradients, optimizer in 4 parts; sequences in 2 blocks along cp",
        ),
    ],
    ids=["fsdp", "replicated", "zero", "split", "cut"],
)
def test_a_plan_tells_in_how_many_parts_ranks_will_hold_the_model(recipe, mesh, text):
    first, *_ = simulate(lambda state: af.explain(recipe(ours.plan()), state), mesh=mesh)
    assert f"\n  parts      {text}\n" in first


@pytest.mark.parametrize("recipe", [af.wrap_ddp(), af.wrap_tp({"0": "colwise"})])
def test_a_model_that_ranks_hold_whole_has_no_parts(recipe):
    assert "parts" not in af.explain(recipe(ours.plan()), af.DistState(world_size=2))
