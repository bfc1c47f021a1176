"""save_model and load_model: weights are equal to the bit, complete or absent, and checked before
use."""

import json
import os
import resource
import signal
import stat
import sys
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch as st
import torch
from torch import nn
from torch.nn.parallel import DataParallel
from torch.testing._internal.two_tensor import TwoTensor

import accel_fn as af
from accel_fn.checkpoint.save_weights import parse_size

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NAMES = """
    bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex64
    float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2
"""
DTYPES = [getattr(torch, name) for name in NAMES.split()]


class Bag(nn.Module):
    """A module with the tensors that it is given: parameters if possible, else buffers."""

    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)


class Tied(nn.Module):
    """An embedding whose weight may be tied to the head's."""

    def __init__(self, *, tied=True, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def bits(model):
    """Return every entry of a model as bytes."""
    return {
        name: tensor.resolve_conj().contiguous().view(-1).view(torch.uint8).tolist()
        for name, tensor in model.state_dict().items()
    }


def zeroed(model):
    """Make the same model with all bytes zero."""
    for tensor in model.state_dict().values():
        torch.as_strided(
            tensor.view(torch.uint8) if tensor.ndim else tensor.view(1).view(torch.uint8),
            (tensor.untyped_storage().nbytes(),),
            (1,),
            0,
        ).zero_()
    return model


def floats(count, start=0):
    return torch.arange(start, start + count).float()


def bag(value, num_entries=4):
    """Make a module with entries of 8 bytes each, all of one value."""
    return Bag(**{f"x{at}": torch.full((2,), float(value)) for at in range(num_entries)})


def loaded(folder):
    """Return the one value of all entries; None if there are no files."""
    model = bag(0)
    if not {SINGLE, INDEX} & set(names(folder)):
        return None
    af.load_model(model, folder)
    values = {float(value) for tensor in model.state_dict().values() for value in tensor}
    assert len(values) == 1
    return values.pop()


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def shards(count):
    return [f"model-{at:05d}-of-{count:05d}.safetensors" for at in range(1, count + 1)]


def write_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def refused(model, folder, match):
    """Assert that `load_model` refuses, and that the model is unchanged."""
    before = bits(model)
    with pytest.raises(ValueError, match=match) as caught:
        af.load_model(model, folder)
    assert isinstance(caught.value, af.AccelError)
    assert str(caught.value).startswith("load_model: ")
    assert bits(model) == before
    return str(caught.value)


# -- layout of the files


def test_a_small_model_is_one_file_that_safetensors_reads(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    af.save_model(model, tmp_path / "a" / "b")
    assert names(tmp_path / "a" / "b") == [SINGLE]
    found = st.load_file(tmp_path / "a" / "b" / SINGLE)
    assert found.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_a_large_model_is_shards_and_an_index(tmp_path):
    af.save_model(bag(7), tmp_path, max_shard_size=16)
    assert names(tmp_path) == [*shards(2), INDEX]
    first, second = shards(2)
    assert json.loads((tmp_path / INDEX).read_text()) == {
        "metadata": {"total_size": 32},
        "weight_map": {"x0": first, "x1": first, "x2": second, "x3": second},
    }
    assert st.load_file(tmp_path / second).keys() == {"x2", "x3"}


@pytest.mark.parametrize("limit", [1000, 8])
def test_every_file_names_its_format(tmp_path, limit):
    af.save_model(bag(7), tmp_path, max_shard_size=limit)
    assert all(metadata_of(path) == {"format": "pt"} for path in tmp_path.glob("*.safetensors"))


SIZES = {
    1: 1,
    "1B": 1,
    "5GB": 5 * 10**9,
    "2 MB": 2 * 10**6,
    "1.5KiB": 1536,
    "3MiB": 3 * 2**20,
    "1GiB": 2**30,
    "1TB": 10**12,
    "1KB": 1000,
}


@pytest.mark.parametrize(("size", "num_bytes"), SIZES.items())
def test_sizes_have_units(size, num_bytes):
    assert parse_size("save_model", size) == num_bytes


@pytest.mark.parametrize(
    "size",
    [
        *("5", "GB", "5Gb", "-5GB", "0GB", "0.1B", "", "5GB\n", "\u0665GB", 0),
        *(True, 1.5, None),
    ],
)
def test_what_is_no_size_is_refused(tmp_path, size):
    kind = ValueError if type(size) in (int, str) else TypeError
    with pytest.raises(kind, match=r"^save_model: max_shard_size must be an? (integer|number)"):
        af.save_model(bag(1), tmp_path / "new", max_shard_size=size)
    assert not (tmp_path / "new").exists()


def test_the_files_can_be_read_by_users_that_the_umask_allows(tmp_path):
    old = os.umask(0o027)
    try:
        af.save_model(bag(1), tmp_path, max_shard_size=8)
    finally:
        os.umask(old)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o640}


# -- what can be saved


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_to_the_bit(tmp_path, dtype):
    raw = torch.arange(48, dtype=torch.uint8) * (1 if dtype != torch.bool else 0) + 1
    number = raw.clone().view(dtype)[:1]
    if dtype != torch.float4_e2m1fn_x2:  # its elements are two to a byte, so there is no single one
        number = number.reshape(())
    model = Bag(a=raw.view(dtype).reshape(-1, 1), b=number)
    expected = bits(model)
    af.save_model(model, tmp_path, max_shard_size=1)
    af.load_model(zeroed(model), tmp_path)
    assert bits(model) == expected
    assert model.a.dtype == dtype


@pytest.mark.parametrize("limit", [1, "5GB"])
def test_tensors_of_any_layout_in_memory_come_back(tmp_path, limit):
    flat = floats(20)
    model = Bag(
        transposed=floats(6).reshape(2, 3).t(),
        channels=floats(24).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        stepped=floats(9)[1::2],
        empty=torch.empty(0, 3),
        other_empty=torch.empty(0, 3),
        number=torch.tensor(float("nan")),
        left=flat[:10],  # parts of one storage
        right=flat[10:],
        conjugate=torch.tensor([1 + 2j]).conj(),
        parameter=nn.Parameter(floats(3)),
    )
    expected, strides = bits(model), [t.stride() for t in model.state_dict().values()]
    af.save_model(model, tmp_path, max_shard_size=limit)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    af.load_model(model, tmp_path)
    assert bits(model) == expected
    assert [t.stride() for t in model.state_dict().values()] == strides


def test_keys_are_those_of_the_model_inside(tmp_path):
    model = nn.Linear(2, 1)
    expected = bits(model)
    af.save_model(DataParallel(model), tmp_path)
    assert st.load_file(tmp_path / SINGLE).keys() == {"weight", "bias"}
    af.load_model(DataParallel(zeroed(model)), tmp_path)
    assert bits(model) == expected


class WithState(nn.Module):
    def get_extra_state(self):
        return {"count": 3}

    def set_extra_state(self, state):
        pass


def overlapping():
    flat = floats(6)
    return Bag(a=flat[:4], b=flat[3:])


def columns():
    matrix = floats(12).reshape(3, 4)
    return Bag(a=matrix[:, ::2], b=matrix[:, 1::2])


def with_view(view, tensor=None):
    """Make a module with a tensor and another view of the same memory."""
    tensor = floats(6).reshape(2, 3) if tensor is None else tensor
    return Bag(a=tensor, b=view(tensor))


def reserved():
    model = nn.Module()
    model._buffers["__metadata__"] = floats(1)
    return model


SHARING = {
    "overlapping": overlapping(),
    "columns": columns(),
    "two dtypes": with_view(lambda tensor: tensor.view(torch.int16)[:, 1::4]),
    "turned": with_view(torch.t),
    "integers": with_view(lambda tensor: tensor.view(torch.int32)),
    "conjugated": with_view(torch.conj, torch.ones(2, dtype=torch.complex64)),
}
BAD_MODELS = {
    "extra state": (
        WithState(),
        "nothing but tensors in state_dict, got a dict for '_extra_state'",
    ),
    "sparse": (Bag(x=floats(3).to_sparse()), r"dense tensors, got a Tensor of layout .* for 'x'"),
    "two in one": (Bag(x=TwoTensor(floats(1), floats(1))), "dense tensors, got a TwoTensor"),
    "lazy": (nn.LazyLinear(2), "hold values, got a parameter without a shape for 'weight'"),
    "meta": (nn.Linear(2, 1, device="meta"), "hold values, got .* meta device for 'weight'"),
    "reserved": (reserved(), r"not use that name, got a tensor for '__metadata__'"),
} | {
    name: (model, r"got 'a' and 'b', which overlap; clone one of them")
    for name, model in SHARING.items()
}


@pytest.mark.parametrize(("model", "match"), BAD_MODELS.values(), ids=BAD_MODELS)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path, model, match):
    with pytest.raises(af.AccelError, match=f"^save_model: model must .*{match}"):
        af.save_model(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("shape", "dtype"), [(1, "complex128"), ((), "float4_e2m1fn_x2")])
def test_a_dtype_that_safetensors_does_not_know_is_refused(tmp_path, shape, dtype):
    model = Bag(x=torch.empty(shape, dtype=getattr(torch, dtype)))
    with pytest.raises(ValueError, match=rf"save_model: .* knows, got torch\.{dtype} for 'x'"):
        af.save_model(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("function", [af.save_model, af.load_model])
def test_arguments_of_other_types_are_refused(tmp_path, function):
    name = function.__name__
    with pytest.raises(TypeError, match=rf"^{name}: model must be a torch\.nn\.Module, got \{{"):
        function({}, tmp_path)
    with pytest.raises(TypeError, match=rf"^{name}: folder must be the path of a folder, got 3"):
        function(bag(1), 3)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=rf"^{name}: folder must be the path of a folder, got '"):
        function(bag(1), tmp_path / "file")


# -- several names for one tensor


def metadata_of(path):
    with st.safe_open(path, framework="pt") as file:
        return file.metadata()


@pytest.mark.parametrize("limit", [1, "5GB"])
def test_tied_weights_are_written_once_and_listed(tmp_path, limit):
    model = Tied()
    model.extra = nn.Linear(3, 2)
    af.save_model(model, tmp_path, max_shard_size=limit)
    found = [key for path in tmp_path.glob("*.safetensors") for key in st.load_file(path)]
    assert sorted(found) == ["embedding.weight", "extra.bias", "extra.weight"]
    first = SINGLE if limit != 1 else shards(3)[0]
    tied = metadata_of(tmp_path / first)["accel_fn.tied"]
    assert json.loads(tied) == {"head.weight": "embedding.weight"}


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
def test_files_without_ties_fill_them(tmp_path, name):
    model = Tied()
    st.save_file({name: torch.ones(5, 3)}, tmp_path / SINGLE)
    af.load_model(model, tmp_path)
    assert model.head.weight.eq(1).all()


def test_equal_values_of_two_names_fill_one_tensor(tmp_path):
    value = torch.full((5, 3), float("nan"))
    st.save_file({"embedding.weight": value, "head.weight": value.clone()}, tmp_path / SINGLE)
    af.load_model(model := Tied(), tmp_path)
    assert model.head.weight.isnan().all()


def test_different_values_of_two_names_do_not_fill_one_tensor(tmp_path):
    af.save_model(Tied(tied=False), tmp_path)
    text = refused(Tied(), tmp_path, "got 1 difference:")
    assert "embedding.weight, head.weight: one tensor in the model, several in the files" in text


def test_a_tied_name_that_the_model_lacks_is_a_difference(tmp_path):
    af.save_model(Tied(), tmp_path)
    model = Tied()
    del model.head
    text = refused(model, tmp_path, "1 difference")
    assert "head.weight: nothing in the model, tied to embedding.weight in the files" in text


@pytest.mark.parametrize("text", ["[]", "{", '{"b": 3}', '{"b": ["a"]}', '{"b": "c"}', "[" * 10**5])
def test_ties_that_make_no_sense_are_refused(tmp_path, text):
    st.save_file({"a": floats(1)}, tmp_path / SINGLE, metadata={"accel_fn.tied": text})
    refused(Bag(a=floats(1)), tmp_path, r"model\.safetensors must tie names to its own keys")


def test_a_name_that_is_tied_and_stored_is_refused(tmp_path):
    metadata = {"accel_fn.tied": '{"b": "a"}'}
    st.save_file({"a": floats(1), "b": floats(1)}, tmp_path / SINGLE, metadata=metadata)
    refused(Bag(a=floats(1), b=floats(1)), tmp_path, "a tied name once, got 'b' as a tensor too")


# -- loading


def test_loading_is_in_place_and_changes_values_alone(tmp_path):
    model, other = nn.Linear(2, 1), nn.Linear(2, 1).eval()
    other.bias.requires_grad_(False)
    other.weight.grad = torch.ones(1, 2)
    before = [(id(p), p.data_ptr(), p.requires_grad) for p in other.parameters()]
    random_state = torch.get_rng_state()
    af.save_model(model, tmp_path)
    af.load_model(other, tmp_path)
    assert bits(other) == bits(model)
    assert [(id(p), p.data_ptr(), p.requires_grad) for p in other.parameters()] == before
    assert other.weight.grad.eq(1).all()
    assert not other.training
    assert other.weight.is_leaf
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_model_can_be_saved_over_the_file_that_it_is_mapped_from(tmp_path):
    af.save_model(bag(3), tmp_path)
    model = bag(0)
    model.load_state_dict(st.load_file(tmp_path / SINGLE), assign=True)
    af.save_model(model, tmp_path)
    af.load_model(bag(0), tmp_path)
    assert bits(model) == bits(bag(3))


def test_all_differences_are_listed_at_once_and_nothing_is_written(tmp_path):
    af.save_model(
        Bag(same=floats(1), shape=floats(3), dtype=floats(2), extra=floats(1)), tmp_path, 1
    )
    model = Bag(same=floats(1, 5), shape=floats(4), dtype=floats(2).double(), missing=floats(1))
    text = refused(model, tmp_path, "must be the one saved in .*, got 4 differences:")
    assert text.split("\n  ")[1:] == [
        "shape: float32 [4] in the model, float32 [3] in the files",
        "dtype: float64 [2] in the model, float32 [2] in the files",
        "missing: float32 [1] in the model, nothing in the files",
        "extra: nothing in the model, float32 [1] in the files",
    ]


@pytest.mark.parametrize(("count", "more"), [(10, None), (11, "and 1 more")])
def test_at_most_ten_differences_are_listed(tmp_path, count, more):
    af.save_model(bag(1, num_entries=count), tmp_path)
    lines = refused(nn.Tanh(), tmp_path, f"got {count} differences").split("\n  ")[1:]
    assert lines[10:] == ([more] if more else [])


class Copying(nn.Linear):
    def state_dict(self, **options):
        return {name: tensor.clone() for name, tensor in super().state_dict(**options).items()}


def test_a_model_that_hands_out_copies_is_refused(tmp_path):
    af.save_model(nn.Linear(2, 1), tmp_path)
    refused(Copying(2, 1), tmp_path, "its own parameters and buffers .*, got a copy for 'weight'")


def test_a_tensor_that_cannot_be_written_is_refused(tmp_path):
    model = Bag(x=floats(2), y=torch.ones(1).expand(4))
    af.save_model(model, tmp_path)
    refused(model, tmp_path, r"none that was expanded, got strides \(0,\) for 'y'")


def test_tensors_that_overlap_are_not_loaded_into(tmp_path):
    af.save_model(Bag(a=floats(4), b=floats(3)), tmp_path)
    refused(overlapping(), tmp_path, "got 'a' and 'b', which overlap")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_models_on_an_accelerator_are_saved_and_loaded(tmp_path):
    device = torch.accelerator.current_accelerator()
    model, other = Tied(seed=1).to(device), Tied(seed=2).to(device)
    af.save_model(model, tmp_path, max_shard_size=1)
    af.load_model(other, tmp_path)
    assert bits(other) == bits(model)
    assert other.head.weight.device.type == device.type


# -- files that are not to be trusted


def test_an_empty_folder_and_none_are_refused(tmp_path):
    match = "must hold model.safetensors or model.safetensors.index.json, got neither"
    refused(bag(1), tmp_path, match)
    refused(bag(1), tmp_path / "none", match)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 20,
        b"\x02" + bytes(7) + b"{}" + bytes(8),
        b"\x02" + bytes(7) + b"[]",
        st.save({"x0": floats(2)})[:-1],
    ],
    ids=["empty", "header", "bytes left", "no dict", "cut short"],
)
@pytest.mark.parametrize("name", [SINGLE, "part.safetensors"])
def test_a_broken_file_is_named(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    if name != SINGLE:
        write_index(tmp_path, {"x0": name})
    refused(bag(1), tmp_path, f"{name} must be a whole safetensors file, got ")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 10**6, b"NaN,"])
def test_an_index_that_is_no_json_is_refused(tmp_path, content):
    (tmp_path / INDEX).write_bytes(content)
    refused(bag(1), tmp_path, f"{INDEX} must be JSON, got ")


@pytest.mark.parametrize("content", [[], None, {}, {"weight_map": []}, {"weight_map": "x"}])
def test_an_index_without_a_map_is_refused(tmp_path, content):
    (tmp_path / INDEX).write_text(json.dumps(content))
    refused(bag(1), tmp_path, f"{INDEX} must have a weight_map from keys to file names, got ")


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "sub/model.safetensors",
        "..",
        "",
        "C:model.safetensors",
        "sub\\model.safetensors",
        "model.bin",
        "model.safetensors\0.safetensors",
        "model.safetensors/",
        3,
        None,
        ["a.safetensors"],
        "/absolute",
    ],
)
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    st.save_file({"x": floats(1)}, tmp_path / SINGLE)
    st.save_file({"x": floats(1)}, folder / "sub" / SINGLE)
    write_index(folder, {"x": str(folder / "sub" / SINGLE) if name == "/absolute" else name})
    refused(Bag(x=floats(1)), folder, "must name .safetensors files beside it, without any path")


@pytest.mark.parametrize("name", [SINGLE, "part.safetensors", INDEX])
def test_a_link_that_leads_out_of_the_folder_is_refused(tmp_path, name):
    folder = tmp_path / "folder"
    folder.mkdir()
    st.save_file({"x": floats(1, 5)}, tmp_path / "secret")
    write_index(folder, {"x": "part.safetensors"})
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../secret")
    refused(Bag(x=floats(1)), folder, f"{name} must be a file of its folder, got a link to ")


def test_a_snapshot_of_a_hubs_cache_is_read(tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    st.save_file({"x": floats(1, 5)}, blobs / "123")
    write_index(snapshot, {"x": "part.safetensors"})
    (snapshot / "part.safetensors").symlink_to("../../blobs/123")
    af.load_model(model := Bag(x=floats(1)), snapshot)
    assert model.x.tolist() == [5]


NO_FILES = {
    "missing": lambda path: None,
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "link to itself": lambda path: path.symlink_to(path.name),
}


@pytest.mark.timeout(20)  # `load_model` must not wait for a pipe
@pytest.mark.parametrize("make", NO_FILES.values(), ids=NO_FILES)
def test_a_shard_that_is_no_file_is_named(tmp_path, make):
    write_index(tmp_path, {"x": "part.safetensors"})
    make(tmp_path / "part.safetensors")
    refused(bag(0), tmp_path, "part.safetensors must be a file, got none")
    os.mkfifo(tmp_path / SINGLE)
    refused(bag(0), tmp_path, f"{SINGLE} must be a file, got none")


INDEXES = {
    "key of another shard": (
        {"x0": 1, "x1": 1, "x2": 2, "x3": 1},
        r"must name the file that holds each key, got \('x3', 'model-00001",
    ),
    "key not listed": (
        {"x0": 1, "x2": 2, "x3": 2},
        "must list every key of its files, got no 'x1'",
    ),
}


@pytest.mark.parametrize(("index", "match"), INDEXES.values(), ids=INDEXES)
def test_an_index_that_is_not_that_of_its_shards_is_refused(tmp_path, index, match):
    af.save_model(bag(1), tmp_path, 16)
    write_index(tmp_path, {key: shards(2)[number - 1] for key, number in index.items()})
    refused(bag(0), tmp_path, match)


def test_a_key_in_two_shards_is_named(tmp_path):
    st.save_file({"x": floats(1), "y": floats(1)}, tmp_path / "a.safetensors")
    st.save_file({"x": floats(1, 5)}, tmp_path / "b.safetensors")
    write_index(tmp_path, {"x": "b.safetensors", "y": "a.safetensors"})
    model = Bag(x=floats(1), y=floats(1))
    refused(model, tmp_path, "b.safetensors must hold no key of another file, got x")


# -- complete or absent


def no_links(*paths):
    raise OSError("no links here")


FILES = {1000: [SINGLE], 16: [*shards(2), INDEX], 8: [*shards(4), INDEX]}


@pytest.mark.parametrize(
    ("before", "after", "links"),
    [(1000, 16, True), (16, 1000, True), (16, 16, True), (16, 16, False), (8, 16, True)],
)
def test_a_new_set_takes_the_place_of_the_old_one(tmp_path, monkeypatch, before, after, links):
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    kept = ["config.json", "model-ema.safetensors", "model.fp16.safetensors", "x.safetensors"]
    for name in kept:
        (tmp_path / name).touch()
    af.save_model(bag(1), tmp_path, before)
    af.save_model(bag(2), tmp_path, after)
    assert names(tmp_path) == sorted(kept + FILES[after])
    assert loaded(tmp_path) == 2


def test_a_save_that_fails_leaves_the_old_set_and_nothing_else(tmp_path, monkeypatch):
    af.save_model(bag(1), tmp_path, 8)
    before, synced, fsync = names(tmp_path), [], os.fsync

    def full(file):
        synced.append(file)
        if len(synced) == 3:
            raise OSError("no space left")
        fsync(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        af.save_model(bag(2), tmp_path, 8)
    assert names(tmp_path) == before
    assert loaded(tmp_path) == 1


def test_a_full_disk_is_an_error_of_the_system(tmp_path):
    child = os.fork()
    if not child:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            af.save_model(Bag(x=floats(1000)), tmp_path)
        except OSError as error:
            text = str(error)
            is_named = text.startswith("save_model: ") and "could not be written: " in text
            os._exit(7 if is_named else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert names(tmp_path) == []


def test_a_set_that_is_replaced_while_it_is_read_is_refused(tmp_path, monkeypatch):
    af.save_model(bag(1), tmp_path, 16)
    resolve, seen = os.path.realpath, []

    def replacing(path, **options):
        if Path(path).name == shards(2)[1] and not seen:
            seen.append(path)
            af.save_model(bag(2), tmp_path, 16)
        return resolve(path, **options)

    monkeypatch.setattr(os.path, "realpath", replacing)
    refused(bag(0), tmp_path, "must stay as it is while it is read, got a new set; load again")


@pytest.fixture
def done(monkeypatch):
    """Record in order what is synced, put in place and removed; random parts of names are left
    out."""
    seen = []

    def name(path):
        return Path(path).name.partition(".new-")[0] + ("*" if ".new-" in str(path) else "")

    def noted(word, function, named):
        def call(*arguments):
            seen.append(f"{word} {name(named(*arguments))}")
            return function(*arguments)

        return call

    monkeypatch.setattr(
        os, "fsync", noted("sync", os.fsync, lambda fd: os.readlink(f"/proc/self/fd/{fd}"))
    )
    for word, owner, function in [("put", os, "rename"), ("remove", Path, "unlink")]:
        called = noted(word, getattr(owner, function), lambda *paths: paths[-1])
        monkeypatch.setattr(owner, function, called)
    return seen


PARTS = [f"model-{at:05d}-of-00002" for at in (1, 2)]
PLACED = ["sync model.safetensors.index*", "put model.safetensors.index.json", "sync folder"]
DONE = {
    (1000, 1000): ["sync model*", "sync folder", f"put {SINGLE}", "sync folder"],
    (1000, 16): [
        *(f"sync {name}*" for name in PARTS),
        "sync folder",
        *(f"put {name}.safetensors" for name in PARTS),
        "sync folder",
        *PLACED,
        f"remove {SINGLE}",
    ],
    (16, 16): [
        *(f"sync {name}*" for name in PARTS),
        "sync folder",
        *PLACED,
        *(f"put {name}.safetensors" for name in PARTS),
        "sync folder",
        *PLACED,
        *(f"remove {name}*" for name in PARTS),
    ],
    (16, 1000): [
        "sync model*",
        "sync folder",
        f"put {SINGLE}",
        "sync folder",
        *(f"remove {name}.safetensors" for name in PARTS),
        f"remove {INDEX}",
    ],
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads names of open files from /proc")
@pytest.mark.parametrize(("before", "after"), DONE)
def test_each_step_is_on_the_disk_before_the_next(tmp_path, done, before, after):
    folder = tmp_path / "folder"
    af.save_model(bag(1), folder, before)
    done.clear()
    af.save_model(bag(2), folder, after)
    first = next((at for at, step in enumerate(done) if step.startswith("remove")), len(done) - 1)
    assert done[:first] + sorted(done[first:-1]) == DONE[before, after]
    assert done[-1] == "sync folder"


TOUCHING = ("os.rename", "os.remove", "os.link", "os.chmod", "open")


def kill_at(place, action):
    """Run a function in a forked process that kills itself before its n-th file operation."""
    child = os.fork()
    if child:
        return os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    left = place

    def count(event, arguments):
        nonlocal left
        if event in TOUCHING:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(count)
        action()
    finally:
        os._exit(0)


@pytest.mark.parametrize(
    ("before", "after", "links"),
    [
        (1000, 1000, True),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                (None, 16, True),
                (16, 16, True),  # with equal numbers of shards, links are used
                (16, 16, False),
                (1000, 16, True),
                (16, 1000, True),
                (16, 8, True),
            ]
        ),
    ],
)
def test_a_kill_before_any_file_operation_leaves_a_whole_set(
    tmp_path, monkeypatch, before, after, links
):
    """Every kill is tried on what the last one left, which is harder than a clean folder."""
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    if before:
        af.save_model(bag(1), tmp_path, before)
    seen = [loaded(tmp_path)]
    place, killed = 0, True
    while killed:
        killed = kill_at(place, partial(af.save_model, bag(2 + place), tmp_path, after))
        found = loaded(tmp_path)
        assert found in (seen[-1], 2 + place)
        seen.append(found)
        place += 1
    assert place > 5
    assert seen[-1] == 1 + place
    assert names(tmp_path) == FILES[after]


# -- readers of other libraries


@pytest.mark.slow
def test_transformers_reads_what_is_saved_and_what_it_saves_is_read(tmp_path):
    import transformers  # takes seconds, which each worker that collects would pay

    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))  # with tied weights
    gpt2.config.save_pretrained(tmp_path)
    af.save_model(gpt2, tmp_path, "2KB")
    assert (tmp_path / INDEX).exists()
    other = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert bits(other) == bits(gpt2)
    gpt2.save_pretrained(tmp_path / "theirs", max_shard_size="2KB")
    af.load_model(zeroed(other), tmp_path / "theirs")
    assert bits(other) == bits(gpt2)
