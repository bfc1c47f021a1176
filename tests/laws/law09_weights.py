"""load_model restores what save_model got, for any model and any division into files."""

import json
import math
import tempfile
from pathlib import Path

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import accel_fn as af

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.float8_e5m2]
limits = st.integers(1, 400)
shapes = st.lists(st.integers(0, 4), max_size=3)


@st.composite
def tensors(draw):
    """Draw bytes of any value, nan included, as any dtype, with dimensions in any order."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = torch.tensor(list(draw(st.binary(min_size=num_bytes, max_size=num_bytes))))
    order = draw(st.permutations(range(len(shape))))
    return raw.to(torch.uint8).view(dtype).reshape(shape).permute(order)


@st.composite
def models(draw):
    """Draw a module with buffers on two levels, some of them under several names."""
    model = nn.Module()
    model.add_module("inner", nn.Module())
    owned = draw(st.lists(tensors(), max_size=5))
    places = draw(st.lists(st.integers(0, len(owned) - 1), max_size=8)) if owned else []
    for at, place in enumerate(places):
        (model.inner if at % 2 else model).register_buffer(f"x{at}", owned[place])
    return model


def bits(model):
    return {
        name: bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
        for name, tensor in model.state_dict().items()
    }


def blank(model, *, tied):
    """Make a model of the same names, shapes and dtypes, all zero."""
    seen = {}
    other = nn.Module()
    other.add_module("inner", nn.Module())
    for name, tensor in model.state_dict().items():
        zeros = torch.zeros_like(tensor)
        if tied:
            zeros = seen.setdefault(tensor.data_ptr() or name, zeros)
        *inner, last = name.split(".")
        (other.inner if inner else other).register_buffer(last, zeros)
    return other


@given(model=models(), limit=limits, tied=st.booleans())
def test_what_is_saved_comes_back_to_the_bit(model, limit, tied):
    with tempfile.TemporaryDirectory() as folder:
        af.save_model(model, folder, limit)
        other = blank(model, tied=tied)
        af.load_model(other, folder)
        assert bits(other) == bits(model)


@given(first=models(), second=models(), limits=st.tuples(limits, limits))
@example(first=nn.Linear(3, 4), second=nn.Linear(4, 3), limits=(50, 50))
def test_nothing_of_an_older_set_stays(first, second, limits):
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as fresh:
        af.save_model(first, folder, limits[0])
        af.save_model(second, folder, limits[1])
        af.save_model(second, fresh, limits[1])
        assert contents(folder) == contents(fresh)


def contents(folder):
    """Return each file without the order of its header's notes, which safetensors leaves open."""
    return {path.name: sorted(path.read_bytes()) for path in Path(folder).iterdir()}


@given(model=models(), limit=limits)
def test_no_file_is_above_the_limit_unless_it_holds_one_tensor(model, limit):
    with tempfile.TemporaryDirectory() as folder:
        af.save_model(model, folder, limit)
        files = {path.name: load_file(path) for path in Path(folder).glob("*.safetensors")}
        sizes = {name: sum(t.nbytes for t in held.values()) for name, held in files.items()}
        assert all(
            size <= limit or len(files[name]) == 1
            for name, size in sizes.items()
            if any(t.nbytes for t in files[name].values())
        )
        index = Path(folder) / "model.safetensors.index.json"
        assert index.exists() == (len(files) > 1)
        if index.exists():
            assert json.loads(index.read_text())["metadata"]["total_size"] == sum(sizes.values())
