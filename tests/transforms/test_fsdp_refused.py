"""wrap_fsdp refuses these plans on every rank, before anything is changed."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours
from tests.support.block_models import Block, Tied, stack


def refused(recipe, words, *, model=None, optimizer=ours.sgd, world_size=2):
    """Assert that every rank refuses the plan, and that nothing was changed."""
    models = [stack() if model is None else model() for _ in range(world_size)]

    def run(state):
        mine = models[state.rank]
        before = {name: id(each) for name, each in mine.named_parameters(remove_duplicate=False)}
        with pytest.raises(ValueError, match=words) as caught:
            af.build(recipe(af.Plan(ours.mse, mine, optimizer(mine.parameters()))), state)
        after = {name: id(each) for name, each in mine.named_parameters(remove_duplicate=False)}
        assert after == before
        return isinstance(caught.value, af.AccelError)

    assert simulate(run, world_size=world_size) == [True] * world_size


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (
            af.compose(af.wrap_ddp(), af.wrap_fsdp()),
            "strategy, got wrap_ddp() and wrap_fsdp(); leave out one of wrap_ddp and wrap_fsdp",
        ),
        (
            af.wrap_fsdp(replicate=2),
            "wrap_fsdp(replicate) must divide the number of ranks, 3, got 2",
        ),
        (
            af.wrap_fsdp(blocks="layers"),
            "wrap_fsdp(blocks) must match modules with parameters, got 'layers', which matches none of "
            "Stack; there are Block, Linear, ModuleList, Sequential",
        ),
        (af.wrap_fsdp(blocks=(Block, nn.Conv2d)), "got 'Conv2d', which matches none of Stack"),
    ],
    ids=["wrap_ddp", "replicate", "a name", "a class"],
)
def test_what_cannot_be_built_is_refused(recipe, words):
    refused(recipe, f"^build: .*{re.escape(words)}", world_size=3)


def with_parameter(parameter):
    def make():
        model = stack()
        model.extra = parameter
        return model

    return make


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            lambda: Tied(inside=True).double(),
            "tie parameters within a block, or outside of all, got blocks.0.inner.0.weight and "
            "blocks.1.inner.0.weight; name other blocks",
        ),
        (
            with_parameter(nn.Parameter(torch.ones(()))),
            "hold parameters that can be cut, got extra; give it the shape [1]",
        ),
        (
            with_parameter(nn.Parameter(torch.ones(2, 3).t())),
            "hold contiguous parameters, got extra; make it so",
        ),
        (
            with_parameter(nn.Parameter(torch.ones(2, dtype=torch.float32))),
            "train parameters of one dtype, torch.float32, got first.weight; convert it",
        ),
    ],
    ids=["tied", "0-dim", "transposed", "dtype"],
)
def test_what_cannot_be_sharded_is_refused_by_name(model, words):
    refused(af.wrap_fsdp(), f"^build: wrap_fsdp's model must .*{re.escape(words)}$", model=model)


WHOLE_ONLY = {
    "Adafactor": torch.optim.Adafactor,
    "Rprop": torch.optim.Rprop,
    "SGD(fused=True)": lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True),
    "Adagrad(fused=True)": lambda parameters: torch.optim.Adagrad(parameters, fused=True),
}


@pytest.mark.parametrize(("name", "optimizer"), WHOLE_ONLY.items(), ids=WHOLE_ONLY)
def test_optimizers_that_cannot_update_shards_are_refused(name, optimizer):
    words = f"^build: wrap_fsdp's optimizer must .*, got {re.escape(name)}; "
    refused(af.wrap_fsdp(), words, optimizer=optimizer)


def test_what_an_optimizer_holds_in_other_shapes_is_refused():
    def with_rows(parameters):
        optimizer = ours.sgd(parameters)
        optimizer.state[optimizer.param_groups[0]["params"][0]]["rows"] = torch.ones(5).double()
        return optimizer

    words = "got 'rows' of shape [5] for one of [5, 3]; make a new optimizer"
    refused(af.wrap_fsdp(), re.escape(words), optimizer=with_rows)


def test_a_model_in_shards_is_refused_a_second_time():
    def run(state):
        plan = af.wrap_fsdp()(ours.plan(model=stack()))
        state, _ = af.build(plan, state)
        words = "wrap_fsdp's model must hold parameters whole, got first.weight; build once"
        with pytest.raises(af.AccelError, match=words):
            af.build(plan, state)

    simulate(run, world_size=2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"blocks": 3},
            "blocks must be a class of modules, a name of a module, several of these, or None",
        ),
        ({"blocks": [int]}, "blocks must be a class of modules"),
        ({"replicate": 0}, "replicate must be an integer >= 1, got 0"),
        ({"replicate": 1.5}, "replicate must be an integer >= 1, got 1.5"),
        ({"reshard_after_forward": 2}, "reshard_after_forward must be True or False, got 2"),
        ({"offload": "cpu"}, "offload must be True or False, got 'cpu'"),
        (
            {"param_dtype": "bf16"},
            "param_dtype must be a floating-point torch.dtype or None, got 'bf16'",
        ),
        (
            {"reduce_dtype": torch.int32},
            "reduce_dtype must be a floating-point torch.dtype or None",
        ),
    ],
    ids=str,
)
def test_settings_are_checked_when_they_are_given(settings, words):
    with pytest.raises(ValueError, match=f"^wrap_fsdp: {re.escape(words)}"):
        af.wrap_fsdp(**settings)


@pytest.mark.parametrize("transform", [af.wrap_fsdp, af.checkpoint_activations])
@pytest.mark.parametrize("blocks", [[], ()], ids=str)
def test_a_choice_of_no_blocks_is_refused_when_it_is_given(transform, blocks):
    words = f"blocks must name one block at least, got {blocks}; leave it out for the repeated ones"
    with pytest.raises(ValueError, match=f"^{transform.__name__}: {re.escape(words)}$"):
        transform(blocks=blocks)


@pytest.mark.parametrize("recipe", [af.compose(), af.wrap_ddp(), af.local_sgd(2)])
def test_a_model_of_dtensors_is_refused_with_what_takes_it(recipe):
    def run(state):
        model = nn.Linear(4, 2)
        mesh = af.device_mesh(state)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        words = r"model must hold its parameters whole, got weight, a DTensor; add wrap_tp\(\)"
        with pytest.raises(ValueError, match=words):
            af.build(recipe(af.Plan(lambda m, x: m(x).mean(), model, optimizer)), state)

    simulate(run, world_size=2)


def test_muon_is_refused_for_the_reason_that_holds():
    def matrices(parameters):
        return torch.optim.Muon([each for each in parameters if each.ndim == 2])

    words = "of a shard of a matrix it computes another update, got Muon; use AdamW, for example, or wrap_ddp"
    refused(af.wrap_fsdp(), words, optimizer=matrices)


def test_a_parameter_that_is_replaced_after_build_is_refused():
    def run(state):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state, step = af.build(
            af.wrap_fsdp()(af.Plan(lambda m, x: m(x).mean(), model, optimizer)), state
        )
        state, _ = step(state, torch.ones(2, 4))
        model.weight = nn.Parameter(torch.ones(2, 4))
        with pytest.raises(
            ValueError, match="must hold the parameters that build sharded, got another weight"
        ):
            step(state, torch.ones(2, 4))

    simulate(run, world_size=2)
