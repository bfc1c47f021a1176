"""Plain files with replaced values are refused, and nothing is changed, or they are loaded
whole."""

from __future__ import annotations

import copy
import os
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import StepLR

import accel_fn as af
from accel_fn.errors import CheckpointError
from accel_fn.testing import simulate
from tests.checkpoint.test_checkpoint import Counter, Hiding
from tests.checkpoint.test_checkpoint_files import remark
from tests.support import strategies as ours

BATCH = (torch.ones(4, 3), torch.zeros(4, 1))
ZERO = torch.zeros(())
ANY = [
    *(None, True, 3, -1, 10**400, 2.5, float("nan"), float("inf"), 1j, "text", b"bytes"),
    *([], [1], [None] * 3, {}, {"a": 1}, {3: {}}),
    *(ZERO, torch.zeros(2), torch.zeros(625), torch.zeros(3, dtype=torch.int64)),
]
GONE = object()


def make(state=None, seed=0):
    """Make a program with state of every kind: buffers, extra state, groups, a loss scale,
    transforms."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Hiding(4, 1))
    groups = [{"params": [*part.parameters()]} for part in model]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.05) if seed > 8 else 0.05)
    recipe = af.compose(
        af.wrap_ddp(),
        af.with_amp("fp16", init_scale=8.0),
        af.schedule(StepLR(optimizer, 2)),
        af.ema(0.9),
        af.skip_spikes(),
        af.freeze("0", until=1),
    )
    return af.build(recipe(af.Plan(ours.mse, model, optimizer)), state or af.DistState())


def train(state, step, count=2):
    for _ in range(count):
        state, _ = step(state, BATCH)
    return state


def whole(step, counter):
    """Return the program and its generators, to the bit."""
    plan = step.plan
    parts = [plan.model, plan.optimizer, *plan.after_update, *plan.accept]
    values = [each.state_dict() for each in parts if hasattr(each, "state_dict")]
    generators = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
    return as_text([*values, *generators, counter.number])


def as_text(value):
    """Write each number with all its digits."""
    if isinstance(value, dict):
        return str({key: as_text(each) for key, each in value.items()})
    if isinstance(value, list | tuple):
        return str([as_text(each) for each in value])
    is_array = isinstance(value, torch.Tensor | np.ndarray)
    return f"{value.dtype} {value.tolist()}" if is_array else repr(value)


@dataclass(repr=False)
class Saved:
    """A checkpoint, and the content of its plain files."""

    path: Path
    contents: dict


@pytest.fixture(scope="module")
def saved():
    with tempfile.TemporaryDirectory() as folder:
        state, step = make()
        path = af.save(step, train(state, step), folder, extras={"counter": Counter(4)})
        files = ("common.pt", "rank_00000.pt")
        yield Saved(path, {name: torch.load(path / name) for name in files})


def places(value, place=()):
    """Yield the path to every value in nested containers."""
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list | tuple) else items
    for key, each in items:
        yield (*place, key)
        yield from places(each, (*place, key))


def replaced(content, place, value):
    key, *rest = place
    found = copy.copy(content) if isinstance(content, dict) else list(content)
    if rest:
        found[key] = replaced(content[key], rest, value)
    elif value is GONE:
        del found[key]
    else:
        found[key] = value
    return tuple(found) if isinstance(content, tuple) else found


def load_forged(saved, file, place, value, make_step=make):
    """Load the checkpoint into a run that has trained; return the error if it was refused and
    changed nothing."""
    path, contents = saved.path, saved.contents
    with tempfile.TemporaryDirectory() as folder:
        forged = Path(shutil.copytree(path, Path(folder) / path.name))
        torch.save(replaced(contents[file], place, value), forged / file)
        remark(forged, file)
        state, step = make_step(seed=7)
        state, counter = train(state, step, 3), Counter(9)
        before = whole(step, counter)
        try:
            af.load(step, state, folder, extras={"counter": counter})
        except CheckpointError as error:
            assert whole(step, counter) == before
            return error
        assert place[0] == "extras/counter" or counter.number == 4
        return None


@ours.share(0.6)
@given(data=st.data())
def test_a_replaced_value_is_refused_and_changes_nothing_or_is_loaded(saved, data):
    """A value that the program cannot know, such as another learning rate, may be loaded."""
    file = data.draw(st.sampled_from(["common.pt", "rank_00000.pt"]))
    place = data.draw(st.sampled_from([*places(saved.contents[file])]))
    load_forged(saved, file, place, data.draw(st.sampled_from([*ANY, GONE])))


def kinds(value):
    """Return values of another type or another size."""
    is_number = type(value) in (int, float) or (torch.is_tensor(value) and not value.ndim)
    numbers = [each for each in ANY if type(each) in (int, float) or each is ZERO]
    others = [each for each in ANY if type(each) is not type(value)]
    if is_number:
        others = [each for each in others if not any(each is number for number in numbers)]
        others += [float("nan"), 10**400]
    if torch.is_tensor(value):
        others += [torch.zeros(7), torch.zeros(2, 2)]
    return [*others, GONE]


STRICT = {
    ("common.pt", ("scaler",)),
    ("common.pt", ("steps", "", "optimizers", "optimizer", "others", "param_groups")),
    ("rank_00000.pt", ("random",)),
}
OPEN = {"foreach", "fused", "capturable", "differentiable", "initial_lr", "decoupled_weight_decay"}
FILLED_BY_TORCH = {"amsgrad", "maximize"}  # where a group of an older torch has none


@ours.share(0.6)
@given(data=st.data())
def test_a_setting_of_another_type_or_size_is_refused(saved, data):
    """The settings are those of the optimizer, the loss scale and the random generators."""
    file, start = data.draw(st.sampled_from(sorted(STRICT)))
    inside = saved.contents[file]
    for key in start:
        inside = inside[key]
    ways = [way for way in places(inside) if not OPEN & {*way} and "params" not in way]
    way = data.draw(st.sampled_from(ways))
    for key in way:
        inside = inside[key]
    value = data.draw(st.sampled_from(kinds(inside)))
    free = inside is None or ("python" in way and way[-1] == 2)  # a number that may be None
    free = free or (value is GONE and FILLED_BY_TORCH.intersection(way))
    assert load_forged(saved, file, (*start, *way), value) or free


def test_a_loss_scale_without_one_of_its_values_is_refused(saved):
    assert load_forged(saved, "common.pt", ("scaler", "skipped"), GONE)


def test_words_of_a_generator_may_be_a_list(saved):
    place = ("random", "python", 1)
    words = saved.contents["rank_00000.pt"]["random"]["python"][1].tolist()
    assert load_forged(saved, "rank_00000.pt", place, words) is None


@pytest.mark.filterwarnings("ignore:step. model should have no BatchNorm")
def test_a_buffer_of_another_rank_s_that_does_not_fit_is_refused_on_all(tmp_path):
    def save(state):
        state, step = make(state)
        state, _ = step(state, (torch.full((4, 3), 1.0 + state.rank), torch.zeros(4, 1)))
        step.plan.model[1].running_mean.fill_(state.rank)
        af.save(step, state, tmp_path)

    simulate(save, world_size=2)
    path = tmp_path / "step_00000001" / "rank_00001.pt"
    content = torch.load(path)
    assert content["buffers"].keys() == {"model/1.running_mean"}
    content["buffers"]["model/1.running_mean"] = torch.zeros(5)
    torch.save(content, path)
    remark(path.parent, path.name)

    def load(state):
        state, step = make(state, seed=7)
        before = copy.deepcopy(step.plan.model.state_dict())
        with pytest.raises(RuntimeError, match="running_mean: float32 \\[5\\] saved, float32 \\[4"):
            af.load(step, state, tmp_path)
        assert as_text(step.plan.model.state_dict()) == as_text(before)

    simulate(load, world_size=2)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "kind"),
    [("manifest.json", os.mkfifo), ("common.pt", os.mkdir), ("tensors_00000.bin", os.mkfifo)],
)
def test_what_is_no_regular_file_is_refused_and_not_waited_for(saved, tmp_path, name, kind):
    path = Path(shutil.copytree(saved.path, tmp_path / saved.path.name))
    (path / name).unlink()
    kind(path / name)
    state, step = make()
    with pytest.raises(CheckpointError, match=f"{name} must be a regular file"):
        af.load(step, state, tmp_path)
    assert "must be a regular file" in af.checkpoint.list_checkpoints(tmp_path)[0].damage
