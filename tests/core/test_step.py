"""Step and its parts: what they return, and what they leave unchanged."""

import contextlib
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate
from accel_fn.testing.internals import follow_parameters
from tests.support import strategies as ours
from tests.support.waits import no_waiting

BATCH = (torch.arange(12.0).reshape(4, 3).double() / 10, torch.ones(4, 1).double())


def built(recipe=None, state=None, loss_fn=ours.mse, model=None):
    state, step = ours.built(
        recipe or af.compose(),
        state or af.DistState(),
        model=model or ours.regression_model(),
        loss_fn=loss_fn,
    )
    return state, step, step.plan.model


def test_a_step_counts_a_batch_and_reports_it():
    state, step, _ = built()
    after, report = step(state, BATCH)
    assert (state.step, after.step, report.weight) == (0, 1, 4)
    assert (report.loss.dtype, report.loss.shape, report.loss.requires_grad) == (
        torch.float64,
        (),
        False,
    )
    assert (report.applied.dtype, bool(report.applied)) == (torch.bool, True)
    assert report.grad_norm is None


def test_a_step_is_its_gradients_and_its_update():
    state, step, model = built(af.compose(af.accumulate(2), af.clip(0.1)))
    whole, whole_report = step(state, BATCH)
    state, step, parts_model = built(af.compose(af.accumulate(2), af.clip(0.1)))
    state, grads, report = step.grads(state, BATCH)
    assert (state.step, report.applied) == (0, None)
    state, report = step.update(state, grads, report)
    ours.assert_identical(parts_model.state_dict(), model.state_dict())
    assert (state.step, float(report.loss)) == (whole.step, float(whole_report.loss))


def test_no_gradient_is_left_behind_and_none_that_was_there_counts():
    state, step, model = built()
    _, clean_step, clean = built()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e3)
    step(state, BATCH)
    clean_step(af.DistState(), BATCH)
    ours.assert_identical(model.state_dict(), clean.state_dict())
    assert all(p.grad is None for p in model.parameters())


def test_another_model_in_the_loss_keeps_its_gradients():
    """In a GAN, the generator's step must not change gradients of the discriminator."""

    def run(state):
        critic = ours.regression_model(seed=1)
        for parameter in critic.parameters():
            parameter.grad = torch.ones_like(parameter)
        state, step = ours.built(
            af.wrap_ddp(),
            state,
            model=nn.Linear(3, 3).double(),
            loss_fn=lambda model, batch: -critic(model(batch[0])).mean(),
        )
        before = step.plan.model.weight.detach().clone()
        step(state, BATCH)
        untouched = all(torch.equal(p.grad, torch.ones_like(p)) for p in critic.parameters())
        return untouched, torch.equal(before, step.plan.model.weight)

    with pytest.warns(UserWarning, match="should reach what is trained by the model"):
        assert simulate(run, world_size=2) == [(True, False)] * 2


def test_a_step_that_is_gone_keeps_nothing_alive():
    state, step, model = built(af.clip(1.0))
    step(state, BATCH)
    alive = weakref.ref(model)
    del step, model
    gc.collect()
    assert alive() is None


def test_frozen_parameters_stay_and_an_optimizer_may_hold_a_part():
    model = ours.regression_model()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([model[0].weight, *model[2].parameters()], lr=0.1)
    state, step = af.build(af.clip(1.0)(af.Plan(ours.mse, model, optimizer)), af.DistState())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _, grads, _ = step.grads(state, BATCH)
    assert len(grads.tensors) == 2
    step(state, BATCH)
    moved = {
        name for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    }
    assert moved == {"2.weight", "2.bias"}
    assert model[0].bias.grad is None


@pytest.mark.parametrize(("wrap", "world_size"), [(af.compose(), 1), (af.wrap_ddp(), 2)])
def test_a_model_is_not_wrapped_and_its_outputs_are_not_upcast(wrap, world_size):
    def run(state):
        model = ours.regression_model().float()
        kind, keys, outputs = type(model), list(model.state_dict()), []

        def loss_fn(module, batch):
            assert module is model
            outputs.append(module(batch[0]))
            return F.mse_loss(outputs[-1].float(), batch[1])

        recipe = af.compose(wrap, af.with_amp("bf16"))
        state, step, _ = built(recipe, state, loss_fn, model)
        step(state, (torch.ones(4, 3), torch.ones(4, 1)))
        assert (type(model), list(model.state_dict())) == (kind, keys)
        assert not {"forward", "_original_forward"} & {*vars(model)}
        return {each.dtype for each in outputs}

    assert simulate(run, world_size=world_size) == [{torch.bfloat16}] * world_size


def test_a_step_names_its_plan():
    _, step, _ = built(af.clip(2.0))
    assert repr(step) == (
        "Step(Plan(mse, Sequential, SGD, weight_fn=count_samples, gradients=[clip(2.0)]))"
    )


@pytest.mark.parametrize(("fused", "place_of_count"), [(False, "cpu"), (True, "meta")])
def test_what_an_optimizer_holds_moves_to_its_parameters(fused, place_of_count):
    """The device is meta, which every machine has."""
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = torch.optim.Adam([parameter])
    optimizer.param_groups[0]["fused"] = fused
    optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3)}
    follow_parameters(optimizer)
    devices = {name: value.device.type for name, value in optimizer.state[parameter].items()}
    assert devices == {"step": place_of_count, "exp_avg": "meta"}


def test_every_tensor_of_a_micro_batch_is_moved_and_the_batch_stays():
    """The device is meta, which every machine has."""
    model, seen = ours.regression_model().to("meta"), []

    def loss_fn(model, batch):
        seen.append([batch["inputs"].device.type, batch["deep"][0].device.type, batch["names"]])
        return F.mse_loss(model(batch["inputs"]), batch["deep"][0])

    recipe = af.compose(af.place(), af.accumulate(2))
    state, step, _ = built(recipe, af.DistState(device="meta"), loss_fn, model)
    batch = {"inputs": BATCH[0], "deep": (BATCH[1],), "names": ["a", "b", "c", "d"]}
    _, report = step(state, batch)
    assert seen == [["meta", "meta", ["a", "b"]], ["meta", "meta", ["c", "d"]]]
    assert report.loss.device.type == "meta"
    assert batch["inputs"] is BATCH[0]
    assert BATCH[0].device.type == "cpu"


def test_parameters_that_a_move_has_replaced_are_no_longer_the_optimizers():
    """To the meta device, torch makes new parameters; to an accelerator it keeps them."""
    plan = af.place()(ours.plan(optimizer=ours.adamw))
    with pytest.raises(ValueError, match="or make the optimizer after what replaces parameters"):
        af.build(plan, af.DistState(device="meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_on_an_accelerator_is_the_step_on_the_cpu(precision):
    losses = []
    for device in (torch.accelerator.current_accelerator(), "cpu"):
        model = ours.regression_model().float()
        plan = af.Plan(ours.mse, model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
        recipe = af.compose(af.place(), af.with_amp(precision), af.accumulate(2), af.clip(1.0))
        state, step = af.build(recipe(plan), af.init(device=device))
        for _ in range(5):
            state, report = step(state, tuple(value.float() for value in BATCH))
        losses.append(float(report.loss))
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)  # bfloat16 has 8 bits


DEVICES = [
    pytest.param("cpu", contextlib.nullcontext),
    pytest.param(
        torch.accelerator.current_accelerator(),
        no_waiting,
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
        ],
    ),
]
FUSED = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
}


@pytest.mark.parametrize(("precision", "optimizer"), [("fp16", "SGD"), (None, "AdamW")])
@pytest.mark.parametrize(("device", "watched"), DEVICES, ids=["cpu", "accelerator"])
def test_no_step_waits_for_the_host_with_a_fused_optimizer(device, watched, precision, optimizer):
    """In many steps with one overflow, the rate and the average are those of the other steps."""
    model = ours.regression_model().float()
    plan = af.Plan(ours.mse, model, FUSED[optimizer](model.parameters()))
    falling = torch.optim.lr_scheduler.ExponentialLR(plan.optimizer, 0.99)
    patient = torch.optim.lr_scheduler.ReduceLROnPlateau(plan.optimizer, patience=1000)
    recipe = af.compose(
        af.place(),
        af.with_amp("fp16", init_scale=2.0**10) if precision else af.compose(),
        af.accumulate(2),
        af.clip(1.0),
        af.skip_spikes(),
        af.skip_nonfinite(),
        af.schedule(falling),
        af.schedule(patient, metric=lambda report: 1.0),
        af.ema(0.9),
    )
    state, step = af.build(recipe(plan), af.init(device=device))
    batches = [tuple(value.float().to(device) for value in BATCH) for _ in range(30)]
    batches[7][0].fill_(float("inf"))
    state, _ = step(state, batches[0])  # makes the momenta
    weights, reports = [model[0].weight.detach().clone()], []
    with watched():
        for batch in batches:
            state, report = step(state, batch)
            reports.append(report)
            weights.append(model[0].weight.detach().clone())
    assert [bool(each.applied) for each in reports] == [number != 7 for number in range(30)]
    assert all(weight.isfinite().all() for weight in weights)
    mean = weights[0]
    for weight in [*weights[1:8], *weights[9:]]:  # all but the skipped update
        mean = 0.9 * mean + 0.1 * weight
    with af.averaged(step):
        torch.testing.assert_close(model[0].weight.detach(), mean, rtol=1e-4, atol=1e-5)
    rate = float(plan.optimizer.param_groups[0]["lr"])
    assert rate == pytest.approx(0.01 * 0.99**30, rel=1e-5)
    if precision == "fp16":
        assert int(state.scaler.skipped) == 1


def test_a_model_that_has_a_further_parameter_on_one_rank_is_refused():
    def run(state):
        model = torch.nn.Sequential(torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if state.rank:
            model.append(torch.nn.Linear(1, 1, bias=False).requires_grad_(False))
        with pytest.raises(
            RuntimeError, match="build: model must be the same on every rank, got 2"
        ):
            af.build(af.wrap_ddp()(af.Plan(ours.mse, model, optimizer)), state)

    simulate(run, world_size=2)


@pytest.mark.parametrize("recipe", [af.compose(), af.accumulate("auto")], ids=["plain", "auto"])
def test_the_next_backward_leaves_gradients_that_a_step_has_returned(recipe):
    """DDP's next backward writes into the same memory."""

    def run(state):
        plan = ours.plan()
        state, step = af.build(af.compose(af.wrap_ddp(), recipe)(plan), state)
        inputs, targets = torch.ones(4, 3).double(), torch.zeros(4, 1).double()
        _, grads, _ = step.grads(state, af.shard_batch((inputs, targets), state))
        before = [each.clone() for each in grads.present()]
        step.grads(state, af.shard_batch((2 * inputs, targets), state))
        assert all(map(torch.equal, grads.present(), before))

    simulate(run, world_size=2)
