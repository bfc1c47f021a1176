"""load_model casts what files hold, and fills by a function what they do not hold."""

import re

import pytest
import torch
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours


def body():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = body()
        self.head = nn.Linear(4, 2)


def in_body(name):
    return f"body.{name}"


def reset(module):
    module.reset_parameters()


def test_files_in_half_precision_fill_parameters_in_single_precision(tmp_path):
    saved, model = body(), body()
    af.save_model(saved, tmp_path, dtype=torch.bfloat16)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"0\.weight: float32 \[4, 3\] in the model, bfloat16"):
        af.load_model(model, tmp_path)
    with pytest.raises(ValueError, match=r"0\.weight: float32 \[4, 3\] in the model, bfloat16"):
        af.load_model(model, tmp_path, dtype=torch.float16)
    ours.assert_identical(model.state_dict(), before)
    af.load_model(model, tmp_path, dtype=torch.bfloat16)
    expected = {
        name: each.to(torch.bfloat16).to(each.dtype) if each.is_floating_point() else each
        for name, each in saved.state_dict().items()
    }
    ours.assert_identical(model.state_dict(), expected)
    af.load_model(saved, tmp_path, dtype=torch.bfloat16)
    ours.assert_identical(saved.state_dict(), expected)


def test_shards_are_cast_too(tmp_path):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).double()

    af.save_model(make(), tmp_path, dtype=torch.float16)

    def run(state):
        model = af.empty(make)
        af.build(af.wrap_fsdp()(ours.plan(model=model)), state)
        af.load_model(model, tmp_path, dtype=torch.float16)
        return ours.whole(model.state_dict())

    expected = {name: each.half().double() for name, each in make().state_dict().items()}
    for found in simulate(run, world_size=2):
        ours.assert_identical(found, expected)


def test_a_new_head_is_filled_and_the_rest_is_that_of_the_files(tmp_path):
    saved, model = body(), Classifier()
    with torch.no_grad():
        saved[1].running_mean.fill_(3.0)
        model.head.weight.fill_(float("nan"))
    af.save_model(saved, tmp_path)
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    assert af.load_model(model, tmp_path, rename=in_body, init=reset) == []
    assert torch.equal(torch.rand(2), expected)
    ours.assert_identical(model.body.state_dict(), saved.state_dict())
    assert model.head.weight.isfinite().all()
    again = Classifier()
    af.load_model(again, tmp_path, rename=in_body, init=reset)
    ours.assert_identical(again.state_dict(), model.state_dict())


def test_what_files_hold_of_a_module_is_not_overwritten_by_init(tmp_path):
    model, part = nn.BatchNorm1d(4), nn.Module()
    part.register_buffer("running_mean", torch.full((4,), 3.0))
    part.bias = nn.Parameter(torch.full((4,), 2.0))
    af.save_model(part, tmp_path)
    left_out = af.load_model(model, tmp_path, strict=False, init=reset)
    assert [line.partition(":")[0] for line in left_out] == [
        "weight",
        "running_var",
        "num_batches_tracked",
    ]
    assert model.bias.tolist() == [2.0] * 4
    assert model.running_mean.tolist() == [3.0] * 4
    assert model.weight.tolist() == [1.0] * 4


def test_names_that_only_the_files_have_are_still_refused(tmp_path):
    af.save_model(nn.ModuleDict({"old": nn.Linear(2, 2), "body": nn.Linear(3, 4)}), tmp_path)
    with pytest.raises(ValueError, match=r"got 2 differences:\n +old\.bias: nothing in the model"):
        af.load_model(
            nn.ModuleDict({"body": nn.Linear(3, 4), "head": nn.Linear(1, 1)}), tmp_path, init=reset
        )


def test_files_without_a_name_of_the_model_are_refused(tmp_path):
    af.save_model(body(), tmp_path)
    with pytest.raises(ValueError, match=r"body\.0\.weight: .* nothing in the files"):
        af.load_model(Classifier(), tmp_path, init=reset, strict=False)


def fail(module):
    raise KeyError("no such kind")


def leave(module):
    nn.init.zeros_(module.weight)


def reshape(module):
    module.weight = nn.Parameter(torch.zeros(1))


REFUSED = {
    "neither": ({}, "load_model: folder must be given without init, got None; give the folder"),
    "init": ({"init": 3}, "load_model: init must be a function of a module, or None, got 'int'"),
    "dtype": (
        {"init": reset, "dtype": torch.int8},
        "load_model: dtype must be a floating-point torch.dtype or None, got torch.int8",
    ),
    "raises": (
        {"init": fail},
        "load_model: init must fill 0, a Linear, got KeyError: 'no such kind'",
    ),
    "leaves": (
        {"init": leave},
        "load_model: init must fill every parameter that no file holds, got no value for 0.bias, of shape "
        "[4]; write to it, as in nn.init.zeros_(module.bias)",
    ),
    "another shape": (
        {"init": reshape},
        "load_model: init must fill every parameter that no file holds, got shape [1] for 0.weight",
    ),
}


@pytest.mark.parametrize(("given", "words"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_does_not_fill_a_model_is_refused(given, words, world_size):
    def run(state):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
        af.build(af.wrap_fsdp()(ours.plan(model=model)), state)
        parameters = [*model.parameters()]
        with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
            af.load_model(model, **given)
        assert [*map(id, model.parameters())] == [*map(id, parameters)]

    simulate(run, world_size=world_size)


def test_init_that_fails_on_one_rank_raises_on_all():
    def run(state):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
        af.build(af.wrap_fsdp()(ours.plan(model=model)), state)
        kinds = {0: (ValueError, "init must fill 0"), 1: (RuntimeError, "failed on rank 0")}
        kind, words = kinds[state.rank]
        with pytest.raises(kind, match=words):
            af.load_model(model, init=fail if state.is_main else reset)

    simulate(run, world_size=2)


def test_a_model_on_the_meta_device_is_refused_with_the_repair(tmp_path):
    af.save_model(nn.Linear(2, 1), tmp_path)
    words = "got a tensor on the meta device for 'weight'; call it after build with wrap_fsdp or wrap_tp"
    with pytest.raises(ValueError, match=words):
        af.load_model(af.empty(nn.Linear, 2, 1), tmp_path)
