"""empty: what stays of a model without values, and what is refused."""

import re

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("places", torch.arange(5))


def make():
    """Make the small model without drawing its values, which needs some."""
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


MODULES = {
    "tied": Tied,
    "weight_norm": lambda: weight_norm(nn.Linear(3, 3)),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "lstm": lambda: nn.LSTM(3, 3),
    "batch norm": lambda: nn.BatchNorm1d(3),
    "list": lambda: nn.ParameterList([torch.ones(2)]),
}


@pytest.mark.parametrize("kind", MODULES.values(), ids=MODULES)
def test_parameters_have_shapes_and_no_values_and_buffers_have_both(kind):
    model, whole = af.empty(kind), kind()
    shapes = [(name, each.shape, each.dtype) for name, each in whole.named_parameters()]
    assert [(name, p.shape, p.dtype) for name, p in model.named_parameters()] == shapes
    assert all(each.is_meta for each in model.parameters())
    buffers = dict(model.named_buffers())
    ours.assert_identical(buffers, dict(whole.named_buffers()))


def test_ties_attributes_and_what_requires_no_gradient_stay():
    def make():
        model = Tied()
        model.embedding.weight.mark = "kept"
        model.norm = nn.LayerNorm(4).requires_grad_(False)
        model.scale = nn.Parameter(torch.ones(2), requires_grad=False)
        return model

    model = af.empty(make)
    assert model.head.weight is model.embedding.weight
    assert model.embedding.weight.mark == "kept"
    assert not model.scale.requires_grad
    assert not model.norm.weight.requires_grad
    _, step = af.build(af.wrap_fsdp()(ours.plan(model=model)), af.DistState())
    assert model.head.weight is model.embedding.weight
    assert model.embedding.weight.mark == "kept"
    assert step.plan.optimizer.param_groups[0]["params"][0] in {*model.parameters()}


def test_models_made_after_it_have_values():
    af.empty(nn.Linear, 2, 1)
    with pytest.raises(ZeroDivisionError):
        af.empty(lambda: 1 / 0)
    assert not nn.Linear(2, 1).weight.is_meta


REFUSED = {
    "no function": (3, TypeError, "empty: fn must be a function that returns a model, got 3"),
    "no model": (lambda: 3, TypeError, "empty: fn must return a torch.nn.Module, got 'int'"),
    "spectral_norm": (
        lambda: spectral_norm(nn.Linear(3, 3)),
        ValueError,
        "empty: buffers must be computed from values, got some on the meta device, as those that are "
        "computed from parameters: parametrizations.weight.0._u, parametrizations.weight.0._v; make",
    ),
}


@pytest.mark.parametrize(("fn", "kind", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_model_without_values_is_refused(fn, kind, words):
    with pytest.raises(kind, match=f"^{re.escape(words)}"):
        af.empty(fn)


@pytest.mark.parametrize(
    "wrap", [af.compose(), af.wrap_ddp(), af.reproducible(num_virtual_ranks=2)]
)
def test_build_refuses_what_no_transform_gives_memory(wrap):
    plan = wrap(ours.plan(model=af.empty(make)))
    words = (
        "build: model must hold values, or be sharded by wrap_fsdp or wrap_tp, got tensors on the meta "
        "device: 0.weight, 0.bias, 2.weight and 1 more; add wrap_fsdp()"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        af.build(plan, af.DistState())


def test_a_model_that_is_empty_on_one_rank_alone_is_refused_on_all():
    def run(state):
        model = ours.regression_model() if state.is_main else af.empty(make)
        with pytest.raises(
            RuntimeError, match=r"^build: plan .* requires_grad=True empty on rank 1"
        ):
            af.build(af.wrap_fsdp()(ours.plan(model=model)), state)

    simulate(run, world_size=2)


def small():
    """Make a model with a counter, a table that no file holds, and a norm."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    model.register_buffer("table", torch.ones(2).double(), persistent=False)
    return model


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_buffer_on_the_meta_device_that_no_file_fills_is_refused(tmp_path, world_size):
    af.save_model(small(), tmp_path)

    def run(state):
        with torch.device("meta"):
            model = small()
        plan = ours.plan(model=model)
        state, step = af.build(af.wrap_fsdp(sync_batchnorm=True)(plan), state, check_loss=False)
        af.load_model(model, tmp_path)
        batch = torch.randn(4, 3).double(), torch.randn(4, 1).double()
        with pytest.raises(
            ValueError, match=r"^step: model must have values .*, got none for table;"
        ):
            step(state, batch)
        model.table.fill_(1.0)
        state, report = step(state, batch)
        return bool(torch.isfinite(report.loss))

    assert all(simulate(run, world_size=world_size))


def test_numbers_that_are_no_floats_count_as_filled_by_a_load_alone(tmp_path):
    class Codes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1).double()
            self.codes = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)

        def forward(self, rows):
            return self.linear(rows)

    model = af.empty(Codes)
    state, step = af.build(af.wrap_fsdp()(ours.plan(model=model)), af.DistState())
    batch = torch.randn(4, 3).double(), torch.randn(4, 1).double()
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(1)
    with pytest.raises(ValueError, match=r"^step: .* got none for codes; call load_model"):
        step(state, batch)
    af.load_model(model, init=lambda module: [each.fill_(2) for each in module.parameters(False)])
    state, _ = step(state, batch)
    assert model.codes.tolist() == [2, 2]
    af.save(step, state, tmp_path)
    other = af.empty(Codes)
    state, step = af.build(af.wrap_fsdp()(ours.plan(model=other)), af.DistState())
    state = af.load(step, state, tmp_path)
    step(state, batch)
    assert other.codes.tolist() == [2, 2]


def test_a_filled_model_is_not_looked_at_again():
    model = af.empty(small)
    state, step = af.build(af.wrap_fsdp()(ours.plan(model=model)), af.DistState(), checks=())
    af.load_model(model, init=reset)
    assert len(step.observers.every) == 1
    batch = torch.randn(4, 3).double(), torch.randn(4, 1).double()
    step(state, batch)
    assert step.observers.every == ()


def reset(module):
    module.reset_parameters()


@pytest.mark.parametrize("wrap", [af.wrap_ddp(), af.wrap_fsdp()])
def test_stages_of_transformers_are_refused(wrap):
    model = ours.regression_model()
    model._pp_stage = object()
    words = r"^build: model must have all of its layers on every rank, got one that transformers has cut"
    with pytest.raises(ValueError, match=words):
        af.build(wrap(ours.plan(model=model)), af.DistState())


def test_a_rank_without_rows_of_a_parameter_raises_by_name_too():
    def run(state):
        model = af.empty(lambda: nn.Linear(3, 1).double())
        state, step = af.build(af.wrap_fsdp()(ours.plan(model=model)), state)
        words = (
            r"^step: model must have values before its first step, got none for weight, bias; call"
        )
        with pytest.raises(ValueError, match=words):
            step(state, (torch.randn(2, 3).double(), torch.randn(2, 1).double()))

    simulate(run, world_size=2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_pass_over_a_loader_before_the_model_is_filled_raises(world_size):
    data = TensorDataset(torch.randn(6, 3).double(), torch.randn(6, 1).double())

    def run(state):
        state, step = af.build(af.wrap_fsdp()(ours.plan(model=af.empty(make))), state)
        loader = af.shard_loader(DataLoader(data, 2), state)
        passes = {
            "evaluate": lambda: af.evaluate(step, state, loader),
            "predict": lambda: af.predict(
                step, state, loader, lambda model, batch: model(batch[0])
            ),
        }
        for function, run_pass in passes.items():
            with pytest.raises(ValueError, match=f"^{function}: model must have values"):
                run_pass()

    simulate(run, world_size=world_size)


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["loss", "step"])
def test_compiled_steps_of_an_empty_model_follow_its_memory(scope):
    compiled = af.compiled(scope=scope)
    batch = torch.ones(4, 3).double(), torch.zeros(4, 1).double()

    def train(fn):
        model = fn(make)
        plan = af.compose(af.wrap_fsdp(), compiled)(ours.plan(model=model))
        state, step = af.build(plan, af.DistState())
        af.load_model(model, init=reset)
        for _ in range(2):
            state, _ = step(state, batch)
        return model.state_dict()

    ours.assert_identical(train(af.empty), train(lambda fn: fn()))
