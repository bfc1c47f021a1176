"""compiled(scope="step") follows what a user changes between steps."""

import functools
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel_fn as af
from accel_fn.core.torch_compile import moving_guards
from tests.support import strategies as ours
from tests.support.compilers import (
    compiles,
    looks_at_gradients,
    make_batches,
    make_plan,
    num_graphs,
)

pytestmark = looks_at_gradients

FACTOR, measured = 1.0, F.mse_loss


def scaled_loss(model, batch):
    return measured(model(batch[0]), batch[1]) * FACTOR


@compiles
@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
        functools.partial(torch.optim.Adam, weight_decay=0.1),
        torch.optim.Adamax,
    ],
    ids=["nesterov", "adam", "adamax"],
)
def test_a_schedule_that_moves_more_than_the_rate_takes_one_graph_more(optimizer):
    """OneCycleLR sets another momentum, or first beta, at every update."""
    ends, batches = [], make_batches(*[8] * 12)
    for recipe in (af.compose(), af.compiled(scope="step")):
        plan = recipe(make_plan(optimizer=lambda p: optimizer(p, lr=0.01)))
        cycle = torch.optim.lr_scheduler.OneCycleLR(plan.optimizer, 0.1, total_steps=13)
        state, step = af.build(af.schedule(cycle)(plan), af.DistState())
        graphs = num_graphs()
        for batch in batches:
            state, _ = step(state, batch)
        ends.append(plan.model.state_dict())
    assert num_graphs() - graphs == 2
    ours.assert_close(ends[1], ends[0])


GUARDS = [
    ("MODULE_MATCH", "G['__import_torch_dot_optim_dot_adam']", False),
    ("CLOSURE_MATCH", "G['__import_torch'].compiler.is_compiling", False),
    ("CLASS_MATCH", "G['__import_accel_fn_dot__forward'].Tensor", False),
    ("CLOSURE_MATCH", "G['_times']", False),
    ("BUILTIN_MATCH", "G['__builtins_dict___4']['len']", False),
    ("TYPE_MATCH", "G['__import_torch_dot_nn_dot_modules_dot_module']._global_forward_hooks", True),
    ("MODULE_MATCH", "G['__import___main__'].F", True),
    ("CLOSURE_MATCH", "G['__import_torch_optimizer_dot_yogi'].step", True),
    ("CLOSURE_MATCH", "L['module'].loss_fn", True),
    ("GLOBAL_STATE", "", True),
]


@pytest.mark.parametrize(("kind", "name", "kept"), GUARDS)
def test_whatever_is_the_user_s_is_looked_at_in_every_step(kind, name, kept):
    guard = SimpleNamespace(guard_type=kind, orig_guard=SimpleNamespace(name=name))
    assert moving_guards([guard]) == [kept]


@compiles
def test_what_a_user_changes_between_steps_is_followed(monkeypatch):
    """The changes are of a number, a function, an attribute of a module, and a new attribute."""
    here = sys.modules[__name__]
    changes = [
        lambda model: None,
        lambda model: monkeypatch.setattr(here, "FACTOR", 2.0),
        lambda model: monkeypatch.setattr(here, "measured", F.l1_loss),
        lambda model: setattr(model[1], "negative_slope", 0.3),
        lambda model: model.append(nn.Tanh()),
    ]
    ends, (batch,) = [], make_batches(4)
    for recipe in (af.compose(), af.compiled(scope="step")):
        model = nn.Sequential(nn.Linear(3, 2), nn.LeakyReLU(0.1), nn.Linear(2, 1)).double()
        for number, each in enumerate(model.parameters()):
            nn.init.constant_(each, 0.1 - 0.2 * (number % 2))
        state, step = af.build(recipe(make_plan(model, loss_fn=scaled_loss)), af.DistState())
        losses = []
        for change in changes:
            change(model)
            for _ in range(2):
                state, report = step(state, batch)
                losses.append(float(report.loss))
        monkeypatch.undo()
        ends.append(losses)
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)
