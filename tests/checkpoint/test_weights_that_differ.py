"""save_model(dtype=), load_model(rename=, strict=): weights of another dtype, other names, a part of them."""

import json
import re

import pytest
import safetensors.torch as st
import torch
from torch import nn

import accel_fn as af

HALF = torch.bfloat16


class Mixed(nn.Module):
    """Parameters, and buffers that are no floating-point numbers, with tied names."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
        self.head = nn.Linear(3, 2)
        self.also = self.head
        self.register_buffer("count", torch.tensor(2**40 + 1))
        self.register_buffer("mask", torch.tensor([True, False]))


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("limit", ["5GB", 20])
def test_floating_point_tensors_are_written_in_the_dtype_asked_for(tmp_path, limit):
    model = Mixed()
    before = values(model)
    af.save_model(model, tmp_path, limit, dtype=HALF)
    found = {}
    for path in tmp_path.glob("*.safetensors"):
        found |= st.load_file(path)
    for name, value in found.items():
        expected = before[name].to(HALF) if before[name].is_floating_point() else before[name]
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected)
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())
    if limit == 20:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        size = sum(value.nbytes for value in found.values())
        assert index["metadata"]["total_size"] == size
    half = Mixed(seed=1).to(HALF)
    assert af.load_model(half, tmp_path) == []
    assert torch.equal(half.head.weight, before["head.weight"].to(HALF))


def test_shards_are_split_by_the_size_in_the_file(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    af.save_model(model, tmp_path, 256, dtype=HALF)
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, "bf16"], ids=str)
def test_a_dtype_that_is_no_floating_point_one_is_refused(tmp_path, dtype):
    text = f"save_model: dtype must be a floating-point torch.dtype or None, got {dtype!r}"
    with pytest.raises(TypeError, match=re.escape(text)):
        af.save_model(Mixed(), tmp_path, dtype=dtype)
    assert not list(tmp_path.iterdir())


def test_every_name_has_a_name_of_its_own(tmp_path):
    af.save_model(nn.Linear(2, 1), tmp_path)
    model = nn.Linear(2, 1)
    text = "load_model: rename must return different names for 'bias' and 'weight', got 'weight'"
    with pytest.raises(ValueError, match=text):
        af.load_model(model, tmp_path, rename=lambda name: "weight")
    text = "load_model: rename must return the name of 'bias' in the model, or None to leave it out"
    with pytest.raises(TypeError, match=re.escape(text)):
        af.load_model(model, tmp_path, rename=lambda name: 1)


def test_a_tensor_without_a_name_is_left_out(tmp_path):
    old, model = nn.Linear(2, 1), nn.Linear(2, 1, bias=False)
    af.save_model(old, tmp_path)
    assert (
        af.load_model(model, tmp_path, rename=lambda name: name if name == "weight" else None) == []
    )
    assert torch.equal(model.weight, old.weight)
    with pytest.raises(ValueError, match="weight: float32 \\[1, 2\\] in the model, nothing in the"):
        af.load_model(model, tmp_path, rename=lambda name: None)


def test_a_value_that_a_kept_name_needs_is_not_left_out(tmp_path):
    model = Mixed()
    af.save_model(model, tmp_path)
    text = (
        "load_model: rename must leave out 'also.weight', too, which the files tie to 'head.weight'"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        af.load_model(model, tmp_path, rename=lambda n: None if n == "head.weight" else n)


def test_tensors_that_both_have_are_loaded_and_the_others_are_listed(tmp_path):
    model, other = (
        Mixed(),
        nn.ModuleDict({"encoder": Mixed(seed=1).encoder, "new": nn.Linear(1, 1)}),
    )
    new = values(other["new"])
    af.save_model(model, tmp_path)
    left_out = af.load_model(other, tmp_path, strict=False)
    assert torch.equal(other["encoder"][0].weight, model.encoder[0].weight)
    assert all(torch.equal(value, new[name]) for name, value in other["new"].state_dict().items())
    assert left_out[0] == "new.weight: float32 [1, 1] in the model, nothing in the files"
    assert "mask: nothing in the model, bool [2] in the files" in left_out
    named = {line.partition(":")[0] for line in left_out}
    assert named == {
        *("new.weight", "new.bias", "count", "mask"),
        *("head.weight", "head.bias", "also.weight", "also.bias"),
    }


def test_files_without_any_tensor_of_the_model_are_refused(tmp_path):
    """Names with a prefix that was forgotten would load nothing."""
    af.save_model(nn.ModuleDict({"net": nn.Linear(2, 1)}), tmp_path)
    with pytest.raises(ValueError, match=r"weight: float32 .* in the model, nothing in the files"):
        af.load_model(nn.Linear(2, 1), tmp_path, strict=False)


def test_strict_is_a_flag(tmp_path):
    with pytest.raises(TypeError, match="load_model: strict must be True or False, got 'no'"):
        af.load_model(nn.Linear(2, 1), tmp_path, strict="no")
