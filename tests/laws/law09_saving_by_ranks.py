"""save_model on any number of ranks writes the files that one process writes, to the byte."""

import itertools
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate
from tests.laws.law13_split_checkpoints import PLACES, built, model_of
from tests.support.processes import launch

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of outputs that are views

SHARDED = {name: PLACES[name] for name in PLACES if name not in ("replicas", "one process")}
SHARDED |= {
    "shards of one rank": ({"dp": 1}, af.wrap_fsdp()),
    "two shards": ({"dp": 2}, af.wrap_fsdp()),
    "four shards": ({"dp": 4}, af.wrap_fsdp()),
    "replicated shards": ({"dp": 4}, af.wrap_fsdp(replicate=2)),
}
SIZES = [each.nbytes for each in model_of(0).state_dict().values()]
limits = st.one_of(st.integers(1, sum(SIZES)), st.sampled_from(["1KB", "5GB"]))
dtypes = st.sampled_from([None, torch.bfloat16])


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def trained_in_part(model):
    """Freeze the blocks: the rest, and what is tied to it, is trained."""
    for name, each in model.named_parameters():
        each.requires_grad_("block" not in name and "layers" not in name)
    return model


def of_one_process(*limit, only=None, **options):
    model = trained_in_part(model_of(0)) if only else model_of(0)
    with tempfile.TemporaryDirectory() as folder:
        af.save_model(model, folder, *limit, only=only, **options)
        return contents(folder)


def of_ranks(place, *limit, only=None, **options):
    mesh, recipe = SHARDED[place]

    def run(state):
        _, step = built(state, recipe, seed=0)
        model = trained_in_part(step.plan.model) if only else step.plan.model
        af.save_model(model, folder, *limit, only=only, **options)

    with tempfile.TemporaryDirectory() as folder:
        simulate(run, mesh=mesh)
        return contents(folder)


@given(place=st.sampled_from([*SHARDED]), limit=limits, dtype=dtypes)
@example(place="wrap_fsdp", limit=1, dtype=None)
@example(place="wrap_tp of four", limit=1, dtype=torch.bfloat16)
@example(place="shards", limit=1500, dtype=None)
def test_the_files_are_those_of_one_process_to_the_byte(place, limit, dtype):
    expected = of_one_process(limit, dtype=dtype)
    assert of_ranks(place, limit, dtype=dtype) == expected


@pytest.mark.parametrize("limit", [1, 2000])
@pytest.mark.parametrize("place", ["wrap_fsdp", "shards"])
def test_hashes_of_what_is_left_out_stand_in_the_files_of_all_ranks(place, limit):
    expected = of_one_process(limit, only="trained")
    assert any(b"accel_fn.frozen" in each for each in expected.values())
    assert of_ranks(place, limit, only="trained") == expected


@pytest.mark.parametrize("limit", [1, "5GB"])
def test_files_that_are_written_in_the_background_are_the_same(tmp_path, limit):
    mesh, recipe = SHARDED["wrap_fsdp"]

    def run(state):
        _, step = built(state, recipe, seed=0)
        model = step.plan.model
        af.save_model(model, tmp_path / "copied", limit, wait=False)
        with torch.no_grad():
            for each in model.parameters():
                each.zero_()
        af.save_model(model, tmp_path / "zeros")  # waits for the files above

    simulate(run, mesh=mesh)
    assert contents(tmp_path / "copied") == of_one_process(limit)


def test_what_one_process_writes_in_the_background_was_copied(tmp_path):
    model = model_of(0)
    af.save_model(model, tmp_path / "copied", 1, wait=False)
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    af.save_model(model, tmp_path / "zeros")  # waits for the files above
    assert contents(tmp_path / "copied") == of_one_process(1)


def test_the_files_go_round_the_ranks(tmp_path, monkeypatch):
    mesh, recipe = SHARDED["wrap_fsdp"]
    write, opened = Path.open, {}

    def noted(path, mode="r", **options):
        if mode == "xb":
            opened[path.name.partition(".")[0]] = threading.current_thread().name
        return write(path, mode, **options)

    monkeypatch.setattr(Path, "open", noted)

    def run(state):
        _, step = built(state, recipe, seed=0)
        af.save_model(step.plan.model, tmp_path, 1)

    simulate(run, mesh=mesh)
    count = len(SIZES) - 1  # two of the tensors are tied
    assert opened == {
        f"model-{at + 1:05d}-of-{count:05d}": f"rank {rank} of 4"
        for at, rank in zip(range(count), itertools.cycle([0, 1, 2, 3]), strict=False)
    }


SCRIPT = """
import accel_fn as af
from tests.laws import law09_saving_by_ranks as tests

with af.distributed(device="cpu", timeout_s=60, mesh=tests.SHARDED["wrap_fsdp"][0]) as state:
    _, step = tests.built(state, tests.SHARDED["wrap_fsdp"][1], seed=0)
    model = step.plan.model
    af.save_model(model, {folder!r} + "/a", 1)
    af.save_model(model, {folder!r} + "/b", 1, wait=False)
    af.save_model(model, {folder!r} + "/c", 2000, state=state)
"""


@pytest.mark.slow
def test_four_processes_write_the_files_of_one(tmp_path):
    launch(SCRIPT.format(folder=str(tmp_path)), num_processes=4)
    one, two = of_one_process(1), of_one_process(2000)
    assert contents(tmp_path / "a") == one
    assert contents(tmp_path / "b") == one
    assert contents(tmp_path / "c") == two
