"""Several optimizers in one plan: every strategy, one graph, and what is refused."""

import pytest
import torch

import accel_fn as af
from tests.laws.law03_several_optimizers import halved, split
from tests.support import strategies as ours

EVEN = [
    (torch.linspace(-1, 1, 24).reshape(8, 3).double() * sign, torch.ones(8, 1).double())
    for sign in (1, -1, 2)
]


@pytest.mark.parametrize("fused", [False, True])
def test_one_overflow_skips_all_of_them(fused):
    """Some are fused and some not; they share one verdict and one loss scale, and schedules do not
    advance."""
    model = ours.regression_model().float()
    optimizers = split(model, fused=fused)
    plan = af.Plan(ours.mse, model, optimizers)
    recipe = af.compose(af.with_amp("fp16", init_scale=2.0**10), af.schedule(halved))
    state, step = af.build(recipe(plan), af.DistState())
    batches = [tuple(each.float() for each in batch) for batch in EVEN]
    state, report = step(state, batches[0])
    assert report.applied
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rates = [each.param_groups[0]["lr"] for each in optimizers.values()]
    state, report = step(state, (batches[1][0] * torch.inf, batches[1][1]))
    assert not report.applied
    ours.assert_identical(model.state_dict(), before)
    assert [each.param_groups[0]["lr"] for each in optimizers.values()] == rates == [0.025, 0.025]
    state, report = step(state, batches[2])
    assert report.applied
    assert float(state.scaler.scale) == 2.0**9
    changed = [name for name, value in model.state_dict().items() if not value.equal(before[name])]
    assert len(changed) == 4


def test_a_schedule_moves_the_optimizer_that_it_names():
    model = ours.regression_model()
    optimizers = split(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers["matrices"], 1, gamma=0.1)
    recipe = af.compose(
        af.schedule(scheduler, optimizer="matrices"), af.schedule(halved, optimizer="rest")
    )
    state, step = af.build(recipe(af.Plan(ours.mse, model, optimizers)), af.DistState())
    for batch in EVEN[:2]:
        state, _ = step(state, batch)
    rates = [each.param_groups[0]["lr"] for each in optimizers.values()]
    assert rates == pytest.approx([0.05 * 0.1**2, 0.05 * 0.5**2])


def test_a_plan_names_its_optimizers():
    model = ours.regression_model()
    given = split(model)
    plan = af.Plan(ours.mse, model, given)
    given.clear()
    assert [*plan.optimizers] == ["matrices", "rest"]
    assert "{matrices: AdamW, rest: SGD}" in repr(plan)
    assert "matrices: AdamW(lr=0.05), 2 parameter tensors, 20 numbers; rest: SGD" in af.explain(
        plan, af.DistState()
    )


class Wrapper:
    """A user's wrapper around an optimizer, which is no `torch.optim.Optimizer`."""

    def __init__(self, inner):
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self):
        self.inner.step()


def wrong_plans():
    model = ours.regression_model()
    first = next(model.parameters())
    sgd = torch.optim.SGD([first], lr=0.1)
    name_them = 'name them: {"matrices": muon, "rest": adamw}'
    return {
        "empty": ({}, "got {}"),
        "list": ([sgd, sgd], name_them),
        "tuple": ((sgd,), name_them),
        "wrapper": (Wrapper(sgd), "make your wrapper a subclass of torch.optim.Optimizer"),
        "value": ({"a": 1}, "be a torch.optim.Optimizer, or a mapping of names to such, got 1"),
        "slash": ({"a/b": sgd}, 'be named by strings without "/" and "@", got \'a/b\''),
        "number": ({1: sgd}, "be named by strings"),
        "model": ({"model": sgd}, 'not be named "model"'),
        "transforms": ({"transforms": sgd}, 'not be named "model", "transforms" or "frozen"'),
        "twice": ({"a": sgd, "b": sgd}, "hold each optimizer once"),
    }


@pytest.mark.parametrize("name", wrong_plans())
def test_what_is_no_optimizer_is_refused_by_the_plan(name):
    given, words = wrong_plans()[name]
    with pytest.raises(af.AccelError) as caught:
        af.Plan(ours.mse, ours.regression_model(), given)
    assert words in str(caught.value)


def test_optimizers_that_overlap_are_refused():
    model = ours.regression_model()
    optimizers = {
        "all": torch.optim.SGD(model.parameters(), lr=0.1),
        "first": torch.optim.SGD([next(model.parameters())], lr=0.1),
    }
    words = "must hold different parameters.* got 0.weight in 'all' and 'first'; give it to one"
    with pytest.raises(af.errors.PlanError, match=words):
        af.build(af.Plan(ours.mse, model, optimizers), af.DistState())


def test_schedules_of_unknown_or_other_optimizers_are_refused():
    model = ours.regression_model()
    optimizers = split(model)
    plan = af.Plan(ours.mse, model, optimizers)
    words = r"optimizer must be the name of one of the plan's, \['matrices', 'rest'\], got 'all'"
    with pytest.raises(af.errors.PlanError, match=words):
        af.schedule(halved, optimizer="all")(plan)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers["matrices"], 1)
    with pytest.raises(af.errors.PlanError, match="must be over optimizer 'rest', got a StepLR"):
        af.schedule(scheduler, optimizer="rest")(plan)
    both = af.compose(af.schedule(halved), af.schedule(halved, optimizer="rest"))
    with pytest.raises(af.errors.PlanError, match="name different optimizers"):
        af.build(both(plan), af.DistState())
