"""Frozen models of a plan: placed, kept from training, given to every function, and hashed."""

import copy
import functools
import json
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import accel_fn as af
from accel_fn.checkpoint.manifest import read_manifest
from accel_fn.errors import ArgumentError, ArgumentTypeError, CheckpointError, PlanError
from accel_fn.testing import assert_equivalent, simulate
from tests.support import strategies as ours

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BATCH = X, X.sum(1, keepdim=True)


class Encoder(nn.Module):
    """A model with blocks, what is outside of them, dropout, a buffer, and a second method."""

    def __init__(self, seed=0):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))
        self.last = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3))
        self.register_buffer("shift", torch.ones(3))
        self.double()
        # By a generator of its own: simulated ranks, which are threads, share that of the process.
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for each in self.parameters():
                each.copy_(torch.randn(each.shape, generator=generator, dtype=each.dtype) * 0.5)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(self.first(inputs))
        return self.last(inputs) + self.shift

    def decode(self, latents):
        return self.first(self.blocks[0](latents))


def loss_fn(model, batch, frozen):
    with torch.no_grad():
        latents = frozen["vae"].decode(frozen["vae"](batch[0]))
    return F.mse_loss(model(latents), batch[1])


def perceptual(model, batch, *, frozen):
    """A loss whose gradient goes through the frozen model."""
    found, wanted = (frozen["vae"](each.expand(-1, 3)) for each in (model(batch[0]), batch[1]))
    return F.mse_loss(found, wanted)


def plan_of(loss_fn=loss_fn, frozen=None, **options):
    model = ours.regression_model()
    frozen = {"vae": Encoder()} if frozen is None else frozen
    return af.Plan(loss_fn, model, ours.sgd(model.parameters()), frozen=frozen, **options)


def trained(plan, steps=2):
    state, step = af.build(plan, af.DistState())
    for _ in range(steps):
        state, _ = step(state, BATCH)
    return state, step


class LossWithSettings:
    def __call__(self, model, batch, frozen=None):
        return loss_fn(model, batch, frozen)


class LossModule(nn.Module):
    def forward(self, model, batch, frozen):
        return loss_fn(model, batch, frozen)


class ClosureOf:
    """A loss without the parameter, which reaches the model that the plan has placed."""

    def __init__(self, frozen):
        self.frozen = frozen

    def __call__(self, model, batch):
        return loss_fn(model, batch, self.frozen)


@pytest.mark.parametrize(
    "make",
    [
        lambda models: loss_fn,
        lambda models: lambda model, batch, *, frozen: loss_fn(model, batch, frozen),
        lambda models: LossWithSettings(),
        lambda models: LossModule(),
        lambda models: functools.partial(lambda scale, *given, frozen: loss_fn(*given, frozen), 1),
        ClosureOf,
    ],
    ids=["by place", "by name", "object", "module", "partial", "closure"],
)
def test_a_loss_gets_frozen_models_by_a_parameter_of_this_name(make):
    models = {"vae": Encoder()}
    expected, plan = plan_of(), plan_of(make(models), models)
    for each in (expected, plan):
        trained(each)
    for ours_, theirs in zip(expected.model.parameters(), plan.model.parameters(), strict=True):
        assert torch.equal(ours_, theirs)


def test_build_keeps_frozen_models_from_training():
    plan = plan_of()
    before = copy.deepcopy(plan.frozen["vae"].state_dict())
    assert plan.frozen["vae"].training
    trained(plan)
    vae = plan.frozen["vae"]
    assert not any(module.training for module in vae.modules())
    assert not any(p.requires_grad or p.grad is not None for p in vae.parameters())
    assert all(torch.equal(before[name], value) for name, value in vae.state_dict().items())


def test_place_casts_frozen_models_alone():
    plan = af.place(frozen_dtype=torch.bfloat16)(
        plan_of(lambda model, batch: ours.mse(model, batch))
    )
    trained(plan)
    assert {each.dtype for each in plan.frozen["vae"].parameters()} == {torch.bfloat16}
    assert {each.dtype for each in plan.model.parameters()} == {torch.float64}


def test_place_refuses_a_dtype_that_is_no_float():
    with pytest.raises(ArgumentTypeError, match="place: frozen_dtype must be a floating-point"):
        af.place(frozen_dtype=torch.int64)


@pytest.mark.parametrize(
    ("recipe", "loss", "world_size"),
    [
        pytest.param(
            af.compose(af.wrap_fsdp(), af.accumulate(3)), loss_fn, 2, marks=pytest.mark.slow
        ),
        (af.compose(af.wrap_fsdp(frozen=True), af.accumulate(3)), perceptual, 2),
        pytest.param(
            af.wrap_fsdp(frozen=True, reshard_after_forward=False),
            loss_fn,
            3,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["fsdp", "shards", "whole until the backward"],
)
def test_ranks_and_micro_batches_give_the_result_of_one_process(recipe, loss, world_size):
    plan, batches = plan_of(loss), [BATCH, (X[:5], BATCH[1][:5]), (X[:2], BATCH[1][:2])]
    assert_equivalent(plan, recipe(plan), batches, world_sizes=(1, world_size), rtol=1e-12)


def test_frozen_models_in_shards_are_shards_between_all_calls():
    def run(state):
        plan = af.wrap_fsdp(frozen=True)(plan_of(perceptual))
        state, step = af.build(plan, state)
        batch, found = af.shard_batch(BATCH, state), []

        def note():
            assert all(isinstance(each, DTensor) for each in plan.frozen["vae"].parameters())

        for _ in range(2):
            state, _ = step(state, batch)
            note()
        found.append(step.forward(state, batch))
        note()
        found.append(torch.tensor(af.evaluate(step, state, [batch])["loss"]))
        note()
        found.append(af.predict(step, state, [batch], lambda _, b, frozen: frozen["vae"](b[0])))
        note()
        return found

    def alone(state):
        state, step = trained(plan_of(perceptual))
        figures = step.forward(state, BATCH), af.evaluate(step, state, [BATCH])["loss"]
        return [*figures, step.plan.frozen["vae"](X)]

    expected = alone(af.DistState())
    for found in simulate(run, world_size=2):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, torch.as_tensor(other), rtol=1e-12, atol=1e-12)


def test_ranks_with_other_frozen_models_are_refused():
    def run(state):
        other = nn.Linear(3, 3 + state.rank).double()
        af.build(af.wrap_ddp()(plan_of(ours.mse, {"vae": other})), state)

    with pytest.raises(RuntimeError, match=r"frozen vae.weight \[3, 3\]"):
        simulate(run, world_size=2)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda model: {"vae": Encoder().to("meta")},
            r"must have values, got vae.first.weight on the meta device; fill it by load_model",
        ),
        (lambda model: {"base": model}, "share no parameter with the model, got base.0.weight"),
        (
            lambda model: {"base": _of_memory(model[0].weight)},
            "share no parameter with the model, got base.weight",
        ),
    ],
    ids=["meta", "the model", "its memory"],
)
def test_frozen_models_that_cannot_be_frozen_are_refused(make, text):
    plan = plan_of(ours.mse)
    plan = af.Plan(ours.mse, plan.model, plan.optimizer, frozen=make(plan.model))
    with pytest.raises(PlanError, match=text):
        af.build(plan, af.DistState())


def _of_memory(tensor):
    layer = nn.Linear(3, 5, bias=False).double()
    layer.weight.data = tensor.data
    return layer


@pytest.mark.parametrize(
    ("frozen", "error", "text"),
    [
        ([Encoder()], ArgumentTypeError, "frozen must be a mapping of names to models, got"),
        ({"vae": 1}, ArgumentTypeError, "each an nn.Module, got.*'vae': int"),
        ({1: Encoder()}, ArgumentTypeError, "each an nn.Module, got.*1: Encoder"),
        ({"a/b": Encoder()}, ArgumentError, 'named by strings without "/" and "@"'),
        ({"": Encoder()}, ArgumentError, 'named by strings without "/" and "@"'),
    ],
)
def test_a_plan_refuses_what_is_no_mapping_of_models(frozen, error, text):
    with pytest.raises(error, match=text):
        plan_of(frozen=frozen)


def test_an_accelerator_needs_place():
    state = af.DistState(device=torch.device("meta"))
    model = nn.Linear(3, 1).to("meta")
    plan = af.Plan(ours.mse, model, ours.sgd(model.parameters()), frozen={"vae": nn.Linear(3, 3)})
    with pytest.raises(
        PlanError, match=r"frozen models must be on meta.*on the CPU; add place\(\)"
    ):
        af.build(plan, state)


def test_place_frozen_must_return_the_model_that_it_got():
    plan = plan_of(place_frozen=(lambda state, model: copy.deepcopy(model),))
    with pytest.raises(ArgumentTypeError, match="place_frozen must return the model"):
        af.build(plan, af.DistState())


def test_a_frozen_model_in_training_mode_is_warned_of_once():
    plan = plan_of()
    state, step = af.build(plan, af.DistState())
    plan.frozen["vae"].train()
    with pytest.warns(UserWarning, match="evaluation mode, got 'vae' in training mode"):
        state, _ = step(state, BATCH)
    for _ in range(2):
        state, _ = step(state, BATCH)


@pytest.mark.parametrize("write", [lambda p: p.data.mul_(1.1), lambda p: p.fill_(float("nan"))])
def test_a_frozen_model_that_changes_between_steps_is_warned_of_once(write):
    plan = plan_of(ours.mse)
    state, step = af.build(plan, af.DistState())
    state, _ = step(state, BATCH)
    write(plan.frozen["vae"].blocks[1][0].weight)
    with pytest.warns(UserWarning, match=r"a change between steps in 'vae'.*extras"):
        state, _ = step(state, BATCH)
    for _ in range(8):
        write(plan.frozen["vae"].blocks[1][0].weight)
        state, _ = step(state, BATCH)


def test_frozen_models_of_odd_tensors_are_not_warned_of():
    odd = nn.Module()
    odd.register_buffer("empty", torch.empty(0))
    odd.register_buffer("nothing", torch.tensor(float("nan")))
    odd.register_buffer("complex", torch.ones(3, dtype=torch.complex64))
    odd.register_buffer("sparse", torch.eye(3).to_sparse())
    plan = plan_of(ours.mse, {"odd": odd, "no": nn.Identity()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(plan, steps=3)


class TestCheckpoints:
    def test_hold_names_shapes_and_hashes_and_no_values(self, tmp_path):
        state, step = trained(plan_of())
        path = af.save(step, state, tmp_path)
        manifest = read_manifest(path)
        vae = step.plan.frozen["vae"]
        assert set(manifest.frozen) == {f"frozen/vae/{n}" for n in vae.state_dict()}
        assert not any("vae" in name for name in manifest.entries)
        assert manifest.frozen["frozen/vae/first.weight"].shape == (3, 3)
        json.loads(manifest.to_bytes())

    def test_are_those_of_any_world_size(self, tmp_path):
        def run(state):
            state, step = af.build(af.wrap_fsdp(frozen=True)(plan_of()), state)
            for _ in range(2):
                state, _ = step(state, af.shard_batch(BATCH, state))
                af.save(step, state, tmp_path)

        simulate(run, world_size=2)
        state, step = af.build(plan_of(), af.DistState())
        assert af.load(step, state, tmp_path).step == 2

    @pytest.mark.parametrize(
        ("frozen", "text"),
        [
            ({"vae": Encoder(seed=1)}, r"other values in frozen/vae/.*give each model the weights"),
            ({"vae": Encoder().float()}, r"frozen/vae/first.weight: float64 .* saved, float32 "),
            (
                {"text": Encoder()},
                r"frozen/text/first.weight: nothing saved, float64 \[3, 3\] here",
            ),
            ({}, r"frozen/vae/first.weight: float64 \[3, 3\] saved, nothing here"),
        ],
    )
    def test_of_other_frozen_models_are_refused(self, tmp_path, frozen, text):
        state, step = trained(plan_of())
        af.save(step, state, tmp_path)
        other = plan_of(lambda model, batch: ours.mse(model, batch), frozen)
        state, step = af.build(other, af.DistState())
        with pytest.raises(CheckpointError, match=f"(?s){text}"):
            af.load(step, state, tmp_path)

    def test_refuse_a_change_since_the_last_one(self, tmp_path):
        state, step = trained(plan_of(ours.mse))
        af.save(step, state, tmp_path)
        af.save(step, state, tmp_path / "again")
        step.plan.frozen["vae"].first.weight.data.mul_(2)
        with pytest.raises(
            ArgumentError, match=r"save: frozen models must stay as they are.*extras"
        ):
            af.save(step, state, tmp_path)

    def test_of_several_steps_know_the_models_of_each(self, tmp_path):
        state, one = trained(plan_of())
        _, other = trained(plan_of(frozen={"vae": Encoder(seed=1)}))
        path = af.save({"one": one, "other": other}, state, tmp_path)
        names = read_manifest(path).frozen
        assert {"frozen@one/vae/shift", "frozen@other/vae/shift"} < {*names}
        assert af.load({"one": one, "other": other}, state, tmp_path).step == state.step

    def test_no_optimizer_has_the_name_of_their_entries(self):
        model = ours.regression_model()
        with pytest.raises(ArgumentError, match='"frozen", as other parts of a checkpoint'):
            af.Plan(ours.mse, model, {"frozen": ours.sgd(model.parameters())})


def test_explain_lists_frozen_models():
    text = af.explain(af.place(frozen_dtype=torch.bfloat16)(plan_of()), af.DistState())
    assert (
        "frozen     vae: Encoder, 48 numbers, float64, by place(frozen_dtype=torch.bfloat16)"
        in text
    )
    assert "forward    loss_fn(Sequential, batch, frozen)" in text
    assert "frozen={'vae': Encoder}" in repr(plan_of())


def test_estimate_counts_frozen_models():
    options = {
        "make_batch": lambda: (torch.zeros(12, 3), torch.zeros(12, 1)),
        "loss_fn": lambda model, batch: ours.mse(model, batch),
    }
    [without] = af.contrib.estimate.estimate_memory(lambda: nn.Linear(3, 1), **options)
    [found] = af.contrib.estimate.estimate_memory(
        lambda: nn.Linear(3, 1),
        make_batch=options["make_batch"],
        loss_fn=lambda model, batch, frozen: ours.mse(
            model, (frozen["vae"](batch[0].bfloat16()).float(), batch[1])
        ),
        make_frozen=lambda: {"vae": nn.Linear(3, 3).requires_grad_()},
        frozen_dtype=torch.bfloat16,
    )
    assert (found.frozen, without.frozen) == (12 * 2, 0)
    assert found.parameters == without.parameters
    assert found.peak >= without.peak + 12 * 2
    with pytest.raises(
        ArgumentTypeError, match="make_frozen must give a mapping of names to models"
    ):
        af.contrib.estimate.estimate_memory(
            lambda: nn.Linear(3, 1), make_frozen=lambda: nn.Linear(1, 1)
        )
