"""One update: what the optimizer gets, and what is left afterwards."""

import copy
import functools
import sys

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import accel_fn as af
from accel_fn.testing import strategies
from accel_fn.testing.internals import apply_update
from tests.support.operations import OperationsNamed

MAKERS = {
    "adam": functools.partial(torch.optim.Adam, lr=0.1),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.1),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
OK, BAD = torch.tensor(True), torch.tensor(False)

every_optimizer = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
fused_or_not = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])


def parameters(*dtypes, seed=0):
    """Make one parameter [4] of each dtype."""
    return [nn.Parameter(values.clone()) for values in normal(dtypes, seed=seed)]


def normal(dtypes, seed=1):
    """Make a gradient [4] of each dtype."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, generator=generator).to(dtype) for dtype in dtypes]


def update(optimizer, tensors, factor=None, ok=None):
    """Update with a copy of these gradients, as a step does."""
    trained = [each for group in optimizer.param_groups for each in group["params"]]
    copies = tuple(None if each is None else each.clone() for each in tensors)
    apply_update(optimizer, trained, af.Grads(copies, factor), ok)


def update_by_hand(optimizer, tensors):
    """Apply the same gradients as a loop by hand does."""
    trained = [each for group in optimizer.param_groups for each in group["params"]]
    for parameter, tensor in zip(trained, tensors, strict=True):
        parameter.grad = None if tensor is None else tensor.clone()
    optimizer.step()
    optimizer.zero_grad()


def assert_same_bits(actual, expected):
    torch.testing.assert_close(list(actual), list(expected), rtol=0, atol=0)


class Kernel:
    """Records the arguments of the functions behind torch's Adam and SGD, except parameters and
    gradients."""

    def __init__(self, monkeypatch):
        self.grads, self.given = [], []
        for kind in (torch.optim.Adam, torch.optim.SGD):
            module, name = sys.modules[kind.__module__], kind.__name__.lower()
            monkeypatch.setattr(module, name, functools.partial(self._run, getattr(module, name)))

    def _run(self, function, parameters, grads, *others, **settings):
        self.grads += [each.clone() for each in grads]
        self.given.append(
            {
                name: float(settings[name])
                for name in ("grad_scale", "found_inf")
                if settings[name] is not None
            }
        )
        return function(parameters, grads, *others, **settings)


@pytest.fixture
def kernel(monkeypatch):
    return Kernel(monkeypatch)


def replace_step(optimizer, listen):
    step = optimizer.step

    @functools.wraps(step)
    def listening(*args, **kwargs):
        listen(optimizer)
        return step(*args, **kwargs)

    optimizer.step = functools.partial(listening)  # a partial is no function


def replace_step_of_scheduler(optimizer, listen):
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    replace_step(optimizer, listen)


def replace_step_of_class(optimizer, listen):
    class Listening(type(optimizer)):
        def step(self, closure=None):
            listen(self)
            return super().step(closure)

    optimizer.__class__ = Listening


LISTENERS = {
    "hook before": torch.optim.Optimizer.register_step_pre_hook,
    "hook after": torch.optim.Optimizer.register_step_post_hook,
    "hook before all": lambda _, listen: register_optimizer_step_pre_hook(listen),
    "hook after all": lambda _, listen: register_optimizer_step_post_hook(listen),
    "step of its own": replace_step,
    "step around a scheduler's": replace_step_of_scheduler,
    "step of its class": replace_step_of_class,
}
every_listener = pytest.mark.parametrize("register", LISTENERS.values(), ids=LISTENERS)


@every_listener
@fused_or_not
@pytest.mark.parametrize("ok", [None, OK, BAD])
def test_hooks_and_steps_of_users_see_the_gradients_of_a_loop_by_hand(register, fused, ok):
    """Multiplied, and none where the update is skipped."""
    trained, seen = parameters(torch.float32), []
    optimizer = torch.optim.AdamW(trained, fused=fused)
    update(optimizer, normal([torch.float32]))  # makes the state, which the first step has not
    handle = register(optimizer, lambda *_: seen.append(trained[0].grad.clone()))
    tensors = normal([torch.float32])
    update(optimizer, tensors, torch.tensor(0.5), ok)
    if handle is not None:
        handle.remove()
    assert_same_bits(seen, [] if ok is BAD else [tensors[0] * 0.5])


@every_optimizer
@fused_or_not
@given(
    dtype=st.sampled_from([torch.float32, torch.float64]),
    exponent=st.integers(-30, 30),
    seed=strategies.seeds(),
)
@example(dtype=torch.float32, exponent=0, seed=0)
def test_power_of_two_is_exact(make, fused, dtype, exponent, seed):
    ours, by_hand = parameters(dtype), parameters(dtype)
    tensors = normal([dtype], seed)
    scaled = [each * 2.0**-exponent for each in tensors]
    update(make(ours, fused=fused), scaled, torch.tensor(2.0**exponent, dtype=dtype))
    update_by_hand(make(by_hand, fused=fused), tensors)
    assert_same_bits(ours, by_hand)


@fused_or_not
@pytest.mark.parametrize("factor", [torch.float32, torch.float64], ids=str)
def test_parameters_of_several_dtypes_are_updated_each_in_its_own(fused, factor):
    dtypes = [torch.float32, torch.float64]
    ours, by_hand = parameters(*dtypes), parameters(*dtypes)
    one, other = (
        torch.optim.SGD(each, lr=0.1, momentum=0.9, fused=fused) for each in (ours, by_hand)
    )
    for _ in range(2):  # the second step finds state
        update(one, normal(dtypes), torch.tensor(0.5, dtype=factor))
        update_by_hand(other, [t * 0.5 for t in normal(dtypes)])
    assert_same_bits(ours, by_hand)


def test_optimizer_of_which_one_group_is_not_fused_gets_its_gradients_multiplied(kernel):
    first, second = parameters(torch.float32, torch.float32)
    groups = [{"params": [first]}, {"params": [second], "fused": False}]
    optimizer = torch.optim.SGD(groups, lr=1.0, fused=True)
    before = second.detach().clone()
    update(optimizer, [torch.ones(4), torch.ones(4)], torch.tensor(0.5), OK)
    assert kernel.given == [{}, {}]  # one for each group
    assert torch.equal(second, before - 0.5)


@pytest.mark.parametrize(
    ("factor", "fused", "dtypes", "expected"),
    [
        (0.5, False, [torch.float32] * 3, ["aten._foreach_mul_.Tensor"]),
        (0.5, False, [torch.float32, torch.float64], ["aten.mul_.Tensor"] * 2),
        (0.5, True, [torch.float32] * 3, []),
        (1.0, False, [torch.float32] * 3, []),
    ],
    ids=["alike", "of several dtypes", "in the kernel", "a factor of one"],
)
def test_gradients_are_multiplied_by_one_operation_or_none(factor, fused, dtypes, expected):
    options = {"fused": True} if fused else {"foreach": False}
    optimizer = torch.optim.SGD(parameters(*dtypes), lr=0.1, **options)
    tensors = normal(dtypes)
    with OperationsNamed("mul") as mode:
        update(optimizer, tensors, torch.tensor(factor))
    assert mode.seen == expected


def test_sparse_gradient_is_multiplied():
    (parameter,) = trained = [nn.Parameter(torch.zeros(3, 2))]
    gradient = torch.sparse_coo_tensor(
        torch.tensor([[2, 2]]), torch.ones(2, 2), (3, 2), check_invariants=True
    )
    update(torch.optim.SGD(trained, lr=1.0), [gradient], torch.tensor(0.5))
    assert torch.equal(parameter, torch.tensor([[0.0, 0.0], [0.0, 0.0], [-1.0, -1.0]]))


@every_optimizer
@fused_or_not
@pytest.mark.parametrize("ok", [None, OK])
def test_update_without_any_gradient_changes_nothing(make, fused, ok):
    trained = parameters(torch.float32)
    before = trained[0].detach().clone()
    update(make(trained, fused=fused), [None], torch.tensor(0.5), ok)
    assert torch.equal(trained[0], before)


@every_optimizer
@fused_or_not
@pytest.mark.parametrize(("factor", "bad"), [(None, torch.inf), (0.5, torch.nan)])
def test_bad_verdict_changes_no_bit_of_parameters_and_state(make, fused, factor, bad):
    trained = parameters(dtype := torch.float32)
    optimizer = make(trained, fused=fused)
    factor = None if factor is None else torch.tensor(factor, dtype=dtype)
    update(optimizer, normal([dtype]), factor, OK)
    held = copy.deepcopy([trained[0].detach(), optimizer.state_dict()["state"]])
    update(optimizer, [torch.full((4,), bad, dtype=dtype)], factor, BAD)
    torch.testing.assert_close(
        [trained[0].detach(), optimizer.state_dict()["state"]], held, rtol=0, atol=0
    )


@every_optimizer
@fused_or_not
def test_skipped_first_update_leaves_no_trace(make, fused):
    skipping, plain = parameters(dtype := torch.float64), parameters(dtype)
    one, other = make(skipping, fused=fused), make(plain, fused=fused)
    factor = torch.tensor(0.5, dtype=dtype)
    update(one, [torch.full((4,), torch.inf, dtype=dtype)], factor, BAD)
    for seed in range(2):
        update(one, normal([dtype], seed), factor, OK)
        update(other, normal([dtype], seed), factor)  # a verdict of True changes no bit either
    assert_same_bits(skipping, plain)


@pytest.mark.parametrize("earlier", [[], [[torch.ones(4), None]]], ids=["at all", "of its own"])
def test_first_update_makes_no_momentum_where_it_is_skipped(earlier):
    early, late = parameters(torch.float32, torch.float32)
    optimizer = torch.optim.SGD([early, late], lr=0.1, momentum=0.9, fused=True)
    for tensors in earlier:
        update(optimizer, tensors, torch.tensor(1.0), OK)
    update(optimizer, [None, torch.full((4,), torch.inf)], torch.tensor(1.0), BAD)
    assert "momentum_buffer" not in optimizer.state[late]


@fused_or_not
@pytest.mark.parametrize("ok", [None, OK])
def test_failing_optimizer_leaves_no_gradient_and_no_factor(fused, ok, monkeypatch):
    def fail(*_, **given):
        assert (given["grad_scale"] is not None) == fused
        raise ArithmeticError("no step today")

    monkeypatch.setattr(sys.modules["torch.optim.adam"], "adam", fail)
    trained = parameters(torch.float32)
    optimizer = torch.optim.Adam(trained, fused=fused)
    with pytest.raises(ArithmeticError, match="no step today"):
        update(optimizer, normal([torch.float32]), torch.tensor(0.5), ok)
    assert trained[0].grad is None
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))


@pytest.mark.parametrize(("factor", "expected"), [(None, {}), (0.5, {"grad_scale": 2.0})])
@pytest.mark.parametrize("ok", [None, OK])
def test_kernel_is_given_the_factor_with_the_gradients_as_they_are(factor, ok, expected, kernel):
    optimizer = torch.optim.Adam(parameters(torch.float32), fused=True)
    tensors = normal([torch.float32])
    update(optimizer, tensors, None if factor is None else torch.tensor(factor), ok)
    assert kernel.given == [expected]
    assert_same_bits(kernel.grads, tensors)
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))
