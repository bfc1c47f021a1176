"""Checkpoints and weight files without frozen parameters: adapters on a model that every program has."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import accel_fn as af
from accel_fn.errors import ArgumentError, CheckpointError
from accel_fn.testing import simulate
from accel_fn.testing.internals import export_model, hashes_of_frozen, read_manifest
from tests.support import strategies as ours

BASE = ("base.weight", "base.bias")


class Adapted(nn.Module):
    """A frozen layer with a buffer, and a small one that is trained."""

    counts = True

    def __init__(self, seed=0, base_seed=0, width=300):
        super().__init__()
        torch.manual_seed(base_seed)
        self.base = nn.Linear(3, width).double().requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        torch.manual_seed(seed)
        self.adapter = nn.Linear(width, 1).double()

    def forward(self, inputs):
        self.calls += self.counts
        return self.adapter(self.base(inputs).tanh())


def batch(state, step):
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(step)).double()
    return af.shard_batch((inputs, inputs.sum(1, keepdim=True)), state)


def make(state, wrap=af.wrap_ddp, **options):
    model = Adapted(**options)
    return model, *af.build(wrap()(af.Plan(ours.mse, model, ours.adamw(model.parameters()))), state)


def advance(state, step, count=2):
    for _ in range(count):
        state, _ = step(state, batch(state, state.step))
    return state


def trained(folder, state, wrap=af.wrap_ddp, **options):
    """Save after two steps; return the model after two more."""
    model, state, step = make(state, wrap)
    state = advance(state, step)
    af.save(step, state, folder, only="trained", **options)
    state = af.load(step, state, folder)  # waits for what is written in the background
    advance(state, step)
    return ours.whole(model.state_dict())


def resumed(folder, state, wrap=af.wrap_ddp, **options):
    """Load into a program with other adapters; return the model after two more steps."""
    model, state, step = make(state, wrap, seed=1, **options)
    state = af.resume(step, state, folder)
    assert state.step == 2
    advance(state, step)
    return ours.whole(model.state_dict())


ALONE, REPLICAS, SHARDS = (1, af.wrap_ddp), (2, af.wrap_ddp), (3, af.wrap_fsdp)


@pytest.mark.parametrize(("before", "after"), [(REPLICAS, SHARDS), (SHARDS, ALONE)])
def test_adapters_continue_in_any_world_on_the_base_of_the_program(tmp_path, before, after):
    (size_before, wrap_before), (size, wrap) = before, after
    saved = simulate(lambda state: trained(tmp_path, state, wrap_before), world_size=size_before)
    found = simulate(lambda state: resumed(tmp_path, state, wrap), world_size=size)
    compare = ours.assert_identical if size == size_before else ours.assert_close
    for each in found:
        compare(each, saved[0])


def test_adapters_of_another_base_are_refused_on_every_rank(tmp_path):
    world_size, wrap = SHARDS
    trained(tmp_path, af.DistState())

    def run(state):
        model, state, step = make(state, wrap, seed=1, base_seed=1)
        before = ours.whole(model.state_dict())
        with pytest.raises(CheckpointError) as caught:
            af.load(step, state, tmp_path)
        ours.assert_identical(ours.whole(model.state_dict()), before)
        return str(caught.value)

    assert set(simulate(run, world_size=world_size)) == {
        f"load: {tmp_path / 'step_00000002'} leaves out frozen parameters, which the program must have "
        "as they were saved, got other values in model/base.weight, model/base.bias; give each model the "
        "weights that training began with, then load"
    }


def test_adapters_go_on_another_base_where_that_is_meant(tmp_path, capsys):
    trained(tmp_path, af.DistState())
    model, state, step = make(af.DistState(), base_seed=1)
    before = model.base.weight.clone()
    af.load(step, state, tmp_path, strict=False)
    assert "got other values in model/base.weight, model/base.bias" in capsys.readouterr().err
    assert torch.equal(model.base.weight, before)
    assert step.plan.optimizer.state[model.adapter.weight]["step"] == 2


def test_a_parameter_that_one_of_several_steps_trains_is_saved_for_it(tmp_path):
    def steps(seed):
        model = Adapted(seed)
        plan = af.Plan(ours.mse, model, ours.sgd(model.parameters()))
        state, first = af.build(plan, af.DistState())
        model.adapter.requires_grad_(False)
        model.base.requires_grad_(True)
        return model, state, {"first": first, "second": af.build(plan, state)[1]}

    model, state, both = steps(0)
    state, _ = both["second"](state, batch(state, 0))
    path = af.save(both, state, tmp_path, only="trained")
    assert not read_manifest(path).frozen
    other, state, both = steps(1)
    af.load(both, state, tmp_path)
    ours.assert_identical(other.state_dict(), model.state_dict())


@pytest.mark.parametrize(("world_size", "wrap", "is_loaded"), [(*REPLICAS, True), (*SHARDS, False)])
def test_a_teacher_that_the_loop_moves_is_refused(tmp_path, world_size, wrap, is_loaded):
    def run(state):
        model, state, step = make(state, wrap)
        af.save(step, state, tmp_path, only="trained")
        if is_loaded:
            model, state, step = make(state, wrap)
            state = af.load(step, state, tmp_path)
        model.base.weight.data.mul_(0.5)
        with pytest.raises(ArgumentError) as caught:
            af.save(step, state, tmp_path, only="trained")
        af.save(step, state, tmp_path)
        return str(caught.value)

    assert set(simulate(run, world_size=world_size)) == {
        'save: only="trained" must leave out parameters that stay as they are, got a change since they '
        "were last saved or loaded in model/base.weight; save without only"
    }


def test_frozen_parameters_are_read_once(tmp_path, monkeypatch):
    _, state, step = make(af.DistState())
    first = af.save(step, state, tmp_path, only="trained")
    before = read_manifest(first).frozen
    monkeypatch.delattr(*hashes_of_frozen())
    state = advance(state, step)
    assert read_manifest(af.save(step, state, tmp_path, only="trained")).frozen == before


def test_a_write_of_one_element_is_noticed(tmp_path):
    model, state, step = make(af.DistState())
    af.save(step, state, tmp_path, only="trained")
    model.base.weight[299, 1] = 0.0  # none of the elements that are sampled
    with pytest.raises(ArgumentError, match="got a change since they were last saved or loaded in"):
        af.save(step, state, tmp_path, only="trained")


def test_only_is_trained_or_none_and_the_same_on_every_rank(tmp_path):
    def run(state):
        _, state, step = make(state)
        with pytest.raises(ArgumentError) as wrong:
            af.save(step, state, tmp_path, only="adapters")
        with pytest.raises(ArgumentError) as different:
            af.save(step, state, tmp_path, only="trained" if state.rank else None)
        return str(wrong.value), str(different.value)

    assert set(simulate(run, world_size=2)) == {
        (
            """save: only must be "trained" or None, got 'adapters'""",
            "save: only must be the same on every rank, got 'trained' on rank 1 and None on rank 0",
        )
    }


# -- save_model and load_model


@pytest.mark.parametrize(("world_size", "wrap", "limit"), [(*ALONE, "5GB"), (*SHARDS, 400)])
def test_weights_of_adapters_go_back_onto_their_base(tmp_path, world_size, wrap, limit):
    def run(state):
        model, state, step = make(state, wrap)
        advance(state, step)
        if state.is_main or wrap is af.wrap_fsdp:
            af.save_model(model, tmp_path, limit, only="trained")
        af.barrier(state)
        other, *_ = make(state, wrap, seed=1)
        assert af.load_model(other, tmp_path) == []
        whole = ours.whole(model.state_dict())
        ours.assert_identical(ours.whole(other.state_dict()), whole)
        return whole

    saved = simulate(run, world_size=world_size)[0]
    files = [load_file(path) for path in tmp_path.glob("*.safetensors")]
    names = {name for file in files for name in file}
    assert names == saved.keys() - set(BASE) == {"calls", "adapter.weight", "adapter.bias"}
    alone = Adapted(seed=1)
    af.load_model(alone, tmp_path)
    ours.assert_identical(alone.state_dict(), saved)


def test_weights_of_adapters_on_another_base_are_refused(tmp_path):
    world_size, wrap = SHARDS
    af.save_model(Adapted(), tmp_path, only="trained")

    def run(state):
        model, *_ = make(state, wrap, seed=1, base_seed=1)
        before = ours.whole(model.state_dict())
        with pytest.raises(ValueError, match=r"^load_model: ") as caught:
            af.load_model(model, tmp_path)
        ours.assert_identical(ours.whole(model.state_dict()), before)
        assert af.load_model(model, tmp_path, strict=False) == []
        now = ours.whole(model.state_dict())
        ours.assert_identical({n: now[n] for n in BASE}, {n: before[n] for n in BASE})
        return str(caught.value), now["adapter.weight"]

    for text, adapter in simulate(run, world_size=world_size):
        assert text == (
            f"load_model: model must be the one saved in {tmp_path}, got 2 differences:\n"
            "  base.weight: frozen and left out of the files, other values in the model\n"
            "  base.bias: frozen and left out of the files, other values in the model"
        )
        assert torch.equal(adapter, Adapted().adapter.weight)


def test_weights_of_adapters_are_loaded_under_other_names(tmp_path):
    af.save_model(Adapted(), tmp_path, only="trained")
    whole = nn.ModuleDict({"inner": Adapted(seed=1)})
    assert af.load_model(whole, tmp_path, rename="inner.{}".format) == []
    ours.assert_identical(whole["inner"].state_dict(), Adapted().state_dict())
    other = nn.ModuleDict({"inner": Adapted(base_seed=1)})
    with pytest.raises(ValueError, match=r"inner\.base\.weight: frozen and left out"):
        af.load_model(other, tmp_path, rename="inner.{}".format)


def test_a_checkpoint_of_adapters_is_exported_as_their_weights(tmp_path):
    model, state, step = make(af.DistState())
    path = af.save(step, advance(state, step), tmp_path / "run", only="trained")
    export_model(path, tmp_path / "weights", "", 10**9)
    other = Adapted(seed=1)
    af.load_model(other, tmp_path / "weights")
    ours.assert_identical(other.state_dict(), model.state_dict())
    with pytest.raises(ValueError, match=r"base\.weight: frozen and left out of the files"):
        af.load_model(Adapted(base_seed=1), tmp_path / "weights")


@pytest.mark.parametrize(
    ("model", "only", "text"),
    [
        (Adapted(), "lora", """only must be "trained" or None, got 'lora'"""),
        (
            Adapted().requires_grad_(False),
            "trained",
            "model must have a parameter that requires a gradient with only=\"trained\", got 'Adapted'",
        ),
    ],
    ids=["unknown", "frozen"],
)
def test_what_is_saved_of_a_model_must_be_something_that_it_trains(tmp_path, model, only, text):
    with pytest.raises(ValueError, match=f"^save_model: {text}$"):
        af.save_model(model, tmp_path, only=only)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("listed", ["[]", "{", '{"base.weight": 3}', '{"base.weight": ""}'])
def test_a_broken_list_of_frozen_parameters_is_refused(tmp_path, listed):
    tensors = {"weight": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors", {"accel_fn.frozen": listed})
    with pytest.raises(
        ValueError, match=r"must list a hash of each parameter in accel_fn\.frozen, got"
    ):
        af.load_model(nn.ParameterDict(tensors), tmp_path)
