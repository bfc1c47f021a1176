"""Under wrap_fsdp, programs that take shards for whole parameters get errors that name the repair."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours
from tests.support.block_models import stack
from tests.support.processes import launch

ROWS = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BATCH = ROWS, ROWS.sum(1, keepdim=True).sin()


class Own(Optimizer):
    """An optimizer that torch does not have."""

    def __init__(self, parameters, change=lambda grad, held: grad, **settings):
        super().__init__(parameters, {"lr": 0.1, **settings})
        self.change = change

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    change = self.change(each.grad, self.state[each])
                    each.sub_(group["lr"] * change)


def build(state, optimizer, wraps=None, loss_fn=ours.mse, model_of=None, **options):
    """Build a step of a stack of blocks, and return its model too."""
    model = model_of() if model_of else stack().double()
    plan = af.Plan(loss_fn, model, optimizer(model.parameters()), **options)
    state, step = af.build((wraps or af.wrap_fsdp())(plan), state, check_loss=False)
    return state, step, model


def errors_of(run):
    """Return the error of each rank."""

    def failing(state):
        try:
            run(state)
        except Exception as error:
            return error
        raise AssertionError("it did not fail")

    return simulate(failing, world_size=2)


def keeps_rows(grad, held):
    """Keep a vector of the rank's own rows, and normalize by what a rank sees."""
    own = grad.to_local() if hasattr(grad, "to_local") else grad
    return grad / (1 + own.norm().item())


def largest(grad, held):
    """torch has no largest element of a rank's part without elements, and fails on that rank alone."""
    return grad / grad.abs().max()


def writes_a_norm(grad, held):
    return grad / held.setdefault("norm", torch.zeros(()).double()).copy_(grad.norm())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (keeps_rows, "is off by"),
        (lambda grad, held: grad / grad.norm().item(), "reads a number of what it computes"),
        (lambda grad, held: grad.flatten().view_as(grad), "it fails, "),
        (largest, "on a rank that holds no row of a parameter"),
        (writes_a_norm, r"AssertionError at .*copy_\(grad.norm\(\)\)"),
    ],
    ids=["its own part", "a number", "a vector", "no rows", "without words"],
)
def test_an_optimizer_whose_updates_of_shards_are_others_is_refused_on_all_ranks(change, reason):
    errors = errors_of(lambda state: build(state, lambda parameters: Own(parameters, change)))
    rule = "must have an optimizer whose updates of shards are those of whole parameters, got Own: "
    for error in errors:
        assert isinstance(error, af.AccelError)
        assert re.search(f"^build: wrap_fsdp {rule}.*{reason}.*; use wrap_ddp", str(error))


def test_the_trial_leaves_optimizer_and_generators_as_they_were():
    def run(state):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        model = stack().double()
        optimizer = Own(model.parameters(), lambda grad, held: held.setdefault("sum", grad))
        optimizer.table = {"counts": torch.zeros(3)}
        StepLR(optimizer, 2)
        groups = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
        af.build(af.wrap_fsdp()(af.Plan(ours.mse, model, optimizer)), state)
        assert not optimizer.state
        now = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
        assert now == groups
        return torch.equal(torch.get_rng_state(), before)

    simulate(run, world_size=2)


def test_an_optimizer_with_modes_is_tried_in_training_mode():
    class Modes(Own):
        def train(self):
            for group in self.param_groups:
                group["is_on"] = True

        def eval(self):
            raise AssertionError("it is not evaluated")

        def step(self, closure=None):
            if not self.param_groups[0]["is_on"]:
                raise RuntimeError("call train() first")
            super().step()

    def optimizer(parameters, change=lambda grad, held: grad):
        return Modes(parameters, change, is_on=False)

    simulate(lambda state: build(state, optimizer) and None, world_size=2)
    errors = errors_of(lambda state: build(state, lambda ps: optimizer(ps, keeps_rows)))
    assert all("is off by" in str(error) for error in errors)


def test_state_that_an_optimizer_makes_when_it_is_made_is_tried():
    def warm(change):
        def make(parameters):
            optimizer = Own(parameters, change)
            for each in optimizer.param_groups[0]["params"]:
                optimizer.state[each]["sum"] = torch.ones_like(each)
            return optimizer

        return make

    def sums(grad, held):
        return grad / held["sum"].add_(grad.square()).sqrt()

    def sums_of_rank(grad, held):
        return keeps_rows(sums(grad, held), held)

    simulate(lambda state: build(state, warm(sums)) and None, world_size=2)
    errors = errors_of(lambda state: build(state, warm(sums_of_rank)))
    assert all("is off by" in str(error) for error in errors)


def test_groups_are_tried_with_their_own_settings():
    class Either(Own):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                change = keeps_rows if group["by_rank"] else lambda grad, held: grad
                for each in group["params"]:
                    each.sub_(group["lr"] * change(each.grad, None))

    def optimizer(parameters):
        first, *others = parameters
        return Either([{"params": others}, {"params": [first], "by_rank": True}], by_rank=False)

    assert all("is off by" in str(error) for error in errors_of(lambda s: build(s, optimizer)))


def test_an_optimizer_that_draws_is_warned_of_once():
    def noisy(parameters):
        return Own(parameters, lambda grad, held: grad + 0.1 * torch.randn_like(grad))

    with pytest.warns(UserWarning, match="draws no random numbers, got Own, .*; use wrap_ddp") as w:
        simulate(lambda state: build(state, noisy) and None, world_size=2)
    assert len(w) == 1


def test_an_optimizer_that_cannot_be_tried_is_not_refused():
    def of_the_model(grad, held):
        if grad.shape not in {(5, 3), (5,), (5, 5), (1, 5), (1,)}:
            raise KeyError("a parameter of the model")
        return grad

    simulate(
        lambda state: build(state, lambda parameters: Own(parameters, of_the_model)) and None,
        world_size=3,
    )


def test_an_update_that_fails_on_shards_names_the_optimizer_and_the_repair():
    switch = {"is_on": False}

    def later(grad, held):
        return grad + torch.ones(grad.shape).double() if switch["is_on"] else grad

    def run(state):
        state, step, _ = build(state, lambda parameters: Own(parameters, later))
        switch["is_on"] = True
        step(state, BATCH)

    for error in errors_of(run):
        (note,) = [each for each in error.__notes__ if each.startswith("step: ")]
        assert re.search(r"Own was given shards \(DTensors\).*; use wrap_ddp", note)


def test_a_gradient_transform_that_fails_on_shards_is_named_with_the_repair():
    def mixes(state, grads):
        return grads.map(lambda grad: grad + torch.ones(grad.shape).double())

    def run(state):
        state, step, _ = build(state, ours.sgd, gradients=(mixes,))
        step(state, BATCH)

    for error in errors_of(run):
        (note,) = [each for each in error.__notes__ if each.startswith("step: ")]
        assert re.search(r"mixes was given shards.*full_tensor\(\)", note)


def test_later_updates_read_numbers_unwatched_so_only_the_first_costs():
    def reads(state, grads):
        if state.step == reads_at:
            float(grads.tensors[0].sum())
        return grads

    def run(state):
        state, step, _ = build(state, ours.sgd, gradients=(reads,))
        for _ in range(2):
            state, _ = step(state, BATCH)
        return state.step

    reads_at = 0
    assert {type(error) for error in errors_of(run)} == {af.errors.LossError}
    reads_at = 1
    assert simulate(run, world_size=2) == [2] * 2


def test_a_forward_that_uses_shards_of_another_block_names_the_module():
    class Reader(nn.Module):
        def __init__(self, other):
            super().__init__()
            self.layer, self.other = nn.Linear(3, 3), [other]

        def forward(self, x):
            return F.linear(x, self.other[0].weight) + self.layer(x)

    def run(state):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
        model[1] = Reader(model[2])
        plan = af.Plan(lambda m, x: m(x).mean(), model, ours.sgd(model.parameters()))
        state, step = af.build(af.wrap_fsdp(blocks=["0", "1", "2"])(plan), state)
        step(state, ROWS.float())

    for error in errors_of(run):
        assert isinstance(error, af.AccelError)
        assert 'wrap_fsdp(blocks="")' in str(error)
        assert "step: torch failed in the forward of 1, a Reader" in error.__notes__


def test_a_copy_of_a_model_in_shards_is_refused_with_what_averages():
    def run(state):
        copy.deepcopy(build(state, ours.sgd)[2])

    for error in errors_of(run):
        assert isinstance(error, af.AccelError)
        assert "average by af.ema(decay)" in str(error)


class Waves(nn.Module):
    """Two blocks of complex parameters."""

    def __init__(self, *, bias):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(3, 3, bias=bias, dtype=torch.complex128) for _ in range(2)
        )

    def forward(self, x):
        x = 0.1 * x.to(torch.complex128)
        return self.layers[1](self.layers[0](x).sin()).real.sum(1, keepdim=True)


def test_complex_vectors_that_torch_sees_as_other_real_ones_are_refused():
    def run(state):
        build(state, torch.optim.AdamW, model_of=lambda: Waves(bias=True))

    for error in errors_of(run):
        assert re.search(r"got AdamW: .* \[5\] is off by .*; use wrap_ddp$", str(error))


@pytest.mark.parametrize(
    ("world_size", "k", "wrap", "optimizer"),
    [(3, 1, {}, ours.sgd), (2, 2, {"blocks": ""}, torch.optim.AdamW)],
    ids=["blocks", "whole"],
)
def test_complex_parameters_train_in_shards(world_size, k, wrap, optimizer):
    made = Waves(bias=optimizer is ours.sgd)

    def train(state, wraps):
        model = copy.deepcopy(made)
        plan = af.Plan(ours.mse, model, optimizer(model.parameters()))
        recipe = af.compose(wraps, af.clip(0.5))
        state, step = af.build(recipe(plan), state, check_loss=False)
        for _ in range(3):
            state, report = step(state, af.shard_batch(BATCH, state))
        return report.loss, report.grad_norm, ours.whole(model.state_dict())

    expected = train(af.DistState(), af.compose())
    wraps = af.compose(af.wrap_fsdp(**wrap), af.accumulate(k))
    for found in simulate(lambda state: train(state, wraps), world_size=world_size):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_real_and_complex_parameters_are_refused_with_the_pair_of_real_ones():
    def run(state):
        model = nn.Linear(3, 1)
        model.filter = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        af.build(af.wrap_fsdp()(af.Plan(ours.mse, model, ours.sgd(model.parameters()))), state)

    for error in errors_of(run):
        assert re.search(r"one dtype, .*; hold complex ones .*view_as_complex", str(error))


@pytest.mark.parametrize(("world_size", "reshard", "k"), [(2, True, 1), (3, False, 2)])
def test_a_whole_model_may_be_called_without_gradients_in_the_loss_and_outside(
    world_size, reshard, k
):
    """The target of the loss is the model's own output; parameters are used again after it."""

    def loss_fn(model, batch):
        with torch.no_grad():
            target = model(-batch[0])
        moved = {name: 0.9 * each for name, each in model.named_parameters()}
        twice = functional_call(model, moved, (batch[0],))
        return F.mse_loss(model(batch[0]), batch[1]) + F.mse_loss(twice, target)

    def train(state, wraps):
        state, step, model = build(state, ours.sgd, wraps, loss_fn, ours.regression_model)
        found = []
        for _ in range(3):
            state, report = step(state, af.shard_batch(BATCH, state))
            with torch.no_grad():
                found += [report.loss, model(ROWS).sum()]
            found.append(step.forward(state, af.shard_batch(BATCH, state)))
        model(ROWS).sum()  # stays whole until the next use of a step
        found.append(step.forward(state, af.shard_batch(BATCH, state)))
        return found, ours.whole(model.state_dict())

    expected = train(af.DistState(), af.compose())
    wraps = af.wrap_fsdp(blocks="", reshard_after_forward=reshard)
    for found in simulate(
        lambda state: train(state, af.compose(wraps, af.accumulate(k))), world_size=world_size
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_only_wrap_fsdp_takes_the_whole_model_as_its_block():
    model = stack()
    plan = af.Plan(ours.mse, model, ours.sgd(model.parameters()))
    with pytest.raises(af.AccelError, match="must match modules with parameters, got ''"):
        af.build(af.checkpoint_activations(blocks="")(plan), af.DistState())


META = """
import torch, torch.nn.functional as F
import accel_fn as af
from torch.func import functional_call, grad, vmap
from tests.support import strategies as ours

def loss_of(parameters, model, x, y):
    return F.mse_loss(functional_call(model, parameters, (x[None],)), y[None])

def loss_fn(model, batch):
    parameters = dict(model.named_parameters())
    def adapted(x, y):
        slopes = grad(loss_of)(parameters, model, x, y)
        return loss_of({n: p - 0.1 * slopes[n] for n, p in parameters.items()}, model, -x, y)
    return vmap(adapted)(*batch).mean()

def train(state, wraps):
    x = torch.arange(24.).double().view(8, 3).sin()
    model = ours.regression_model()
    state, step = af.build(wraps(af.Plan(loss_fn, model, ours.sgd(model.parameters()))), state)
    for _ in range(3):
        state, _ = step(state, af.shard_batch((x, x[:, :1]), state))
    return ours.whole(model.state_dict())

class Rank(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            own = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            p.sub_(p.grad / (1 + float(own.norm())))

state = af.init(device="cpu", timeout_s=60)
found, expected = train(state, af.wrap_fsdp(blocks="")), train(af.DistState(), af.compose())
torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
try:
    train(state, af.wrap_fsdp())
except af.AccelError as error:
    assert 'blocks=""' in str(error)
    say("refused")
model = ours.regression_model()
try:
    af.build(af.wrap_fsdp()(af.Plan(ours.mse, model, Rank(model.parameters(), lr=0.1))), state)
except af.AccelError as error:
    say("off" if "is off by" in str(error) else str(error))
"""


@pytest.mark.slow
def test_two_processes_learn_to_learn_with_the_whole_model_and_refuse_the_rest():
    launch(META, expect=["refused", "off"] * 2)
