"""compiled, in every scope: what changes after the first steps counts, or is refused."""

from __future__ import annotations

import copy
import functools
import inspect

import pytest
import torch
from torch import nn
from torch.nn.modules import module as everywhere
from torch.nn.utils import parametrize

import accel_fn as af
from tests.support import strategies as ours
from tests.support.compilers import looks_at_gradients

pytestmark = [
    looks_at_gradients,
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
]

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(8, 3)
COMPILE = torch.compile


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("shift", torch.full((3,), 0.1))
        self.factor = 1.0
        self.numbers = {"a": 1.0}

    def scale(self, values):
        return values * self.factor * self.numbers["a"]

    def forward(self, values):
        return torch.tanh(self.linear(self.scale(values)) + self.shift)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(3)
        self.act = nn.Identity()
        self.head = nn.Linear(3, 1)

    def forward(self, values):
        for block in self.blocks:
            values = block(values)
        return self.head(self.act(self.norm(values)))


def loss_fn(model, batch):
    return model(batch).square().mean()


def halved(module, inputs, *others):
    return others[-1] * 0.5


def half(values):
    return tuple(None if each is None else each * 0.5 for each in values)


def halve(owner, name, patch=None):
    """Replace a method by one that returns half of what it did; that of a class for this test."""
    method = getattr(owner, name)
    put = setattr if patch is None else patch.setattr
    put(owner, name, lambda *args: method(*args) * 0.5)


def hook_all(name, hook):
    """A change that gives all linear layers of the process this hook."""

    def change(model, patch):
        patch.setattr(everywhere, "_global_is_full_backward_hook", True)
        hooks = getattr(everywhere, f"_global_{name}")
        patch.setitem(hooks, 0, lambda at, *args: hook(at, *args) if at in linear else None)
        linear = {each for each in model.modules() if type(each) is nn.Linear}

    return change


def replace_block(model, _):
    block = copy.copy(model.blocks[0])
    block.factor = 3.0
    model.blocks[0] = block


def hook_a_new_module(model, _):
    model.act = nn.Sigmoid()
    yield
    model.act.register_forward_hook(halved)


def swap_a_hook(register, hook, other):
    def change(model, _):
        handle = getattr(model.head, register)(hook)
        yield
        handle.remove()
        yield
        getattr(model.head, register)(other)

    return change


CHANGES = {
    "nothing": lambda model, _: None,
    "forward hook": lambda model, _: model.register_forward_hook(halved),
    "forward pre-hook": lambda model, _: model.blocks[1].register_forward_pre_hook(
        lambda _, inputs: half(inputs)
    ),
    "backward hook": lambda model, _: model.head.register_full_backward_hook(
        lambda _, grads, __: half(grads)
    ),
    "backward pre-hook": lambda model, _: model.head.register_full_backward_pre_hook(
        lambda _, grads: half(grads)
    ),
    "forward of a module": lambda model, _: halve(model.blocks[1], "forward"),
    "forward hook of all": hook_all("forward_hooks", halved),
    "backward hook of all": hook_all("backward_hooks", lambda _, grads, __: half(grads)),
    "another forward hook": swap_a_hook("register_forward_hook", halved, lambda _, i, o: o * 3),
    "hook of a new module": hook_a_new_module,
    "hook of a parameter": lambda model, _: model.head.weight.register_hook(lambda g: g * 0.5),
    "forward of a class": lambda model, patch: halve(Block, "forward", patch),
    "forward of a class of torch": lambda model, patch: halve(nn.Linear, "forward", patch),
    "method of a module": lambda model, _: halve(model.blocks[0], "scale"),
    "buffer": lambda model, _: setattr(model.blocks[0], "shift", X[0]),
    "number in a dict": lambda model, _: model.blocks[0].numbers.update(a=3.0),
    "module": lambda model, _: setattr(model, "act", nn.Sigmoid()),
    "one module less": lambda model, _: model.blocks.__delitem__(0),
    "block with the same parameters": replace_block,
    "parameter": lambda model, _: setattr(model.head, "weight", nn.Parameter(X[:1].clone())),
    "requires_grad_": lambda model, _: model.blocks[0].requires_grad_(False),
    "eval": lambda model, _: model.eval(),
    "parametrization": lambda model, _: parametrize.register_parametrization(
        model.blocks[0].linear, "weight", nn.Tanh()
    ),
}


@functools.wraps(COMPILE)  # whose parameters `compiled` looks at
def compile_guards(fn, *, options=None, **settings):
    """torch.compile without kernels: what is tested here are guards."""
    kept = {name: each for name, each in (options or {}).items() if name == "guard_filter_fn"}
    return COMPILE(fn, options=kept or None, **{"backend": "eager", **settings})


@functools.cache
def trained(recipe, name):
    """Losses and parameters of a run in which a change comes after two steps; None if it is refused."""
    torch.manual_seed(0)
    model = Model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", compile_guards)
        state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), af.DistState())
        changes = changed(CHANGES[name], model, patch)
        try:
            for _ in changes:
                for _ in range(2):
                    state, report = step(state, X)
                    losses.append(report.loss)
        except ValueError as error:
            if not str(error).startswith("step: "):
                raise
            return None
    return {str(index): each for index, each in enumerate([*losses, *model.parameters()])}


def changed(change, model, patch):
    """Pause before a change, after it, and wherever it pauses."""
    yield
    yield from change(model, patch) if inspect.isgeneratorfunction(change) else ()
    if not inspect.isgeneratorfunction(change):
        change(model, patch)
    yield


PLAIN = af.compose()
SCOPES = {scope: af.compiled(scope=scope) for scope in ("loss", "blocks", "step")}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:step. model should be in training mode")
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_the_first_steps_is_that_of_the_plain_step_or_refused(change, scope):
    plain, found = trained(PLAIN, change), trained(SCOPES[scope], change)
    if plain is None or (scope == "step" and found is None):
        assert found is None
    else:
        ours.assert_close(found, plain)


@pytest.mark.parametrize("change", ["forward hook", "forward of a class", "requires_grad_"])
def test_a_change_has_an_effect(change):
    nothing, found = trained(PLAIN, "nothing"), trained(PLAIN, change)
    assert found is None or not torch.equal(found["3"], nothing["3"])
