"""save and load: what is saved, what must match, and the error for every mistake."""

from __future__ import annotations

import copy
import json
import random
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from accel_fn.errors import CheckpointError
from accel_fn.testing import simulate
from accel_fn.testing.internals import read_manifest
from tests.support import strategies as ours
from tests.support.processes import launch

BATCH = (torch.ones(4, 3).double(), torch.zeros(4, 1).double())


def make(seed=0, *, optimizer=ours.adamw, recipe=None, model=None, state=None):
    """Make the step of a new program."""
    model = model or ours.regression_model(seed)
    plan = af.Plan(ours.mse, model, optimizer(model.parameters()))
    return af.build(recipe(plan) if recipe else plan, state or af.DistState())


def advance(state, step, count=2):
    for _ in range(count):
        state, _ = step(state, BATCH)
    return state


def kept(step):
    """Return parameters and optimizer state as plain data."""
    return step.plan.model.state_dict(), step.plan.optimizer.state_dict()


@contextmanager
def unchanged(step):
    """Assert that model and optimizer are the same before and after."""
    before = copy.deepcopy(kept(step))
    yield
    for now, then in zip(kept(step), before, strict=True):
        extra_state = now.pop("_extra_state", None), then.pop("_extra_state", None)
        assert extra_state[0] == extra_state[1]
        torch.testing.assert_close(now, then, rtol=0, atol=0)


def differences(folder, state, step, **options):
    """Return the lines of the error with which `load` refuses this step and leaves it unchanged."""
    with unchanged(step), pytest.raises(CheckpointError) as caught:
        af.load(step, state, folder, **options)
    head, *lines = str(caught.value).splitlines()
    assert head == f"load: {af.latest(folder)} must be of this program, got differences:"
    return [line.removeprefix("  ") for line in lines]


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": ours.sgd,
    "AdamW": ours.adamw,
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.05, amsgrad=True),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "tensor lr": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.05)),
    "groups": lambda parameters: torch.optim.SGD(
        [
            {"params": [each], "lr": 0.1 / (index + 1), "momentum": 0.5}
            for index, each in enumerate(parameters)
        ]
    ),
}


@pytest.mark.parametrize(
    ("optimizer", "steps_before"),
    [(each, 3 if name in ("AdamW", "Rprop") else 0) for name, each in OPTIMIZERS.items()],
    ids=OPTIMIZERS,
)
def test_a_run_resumes_to_the_bit_in_a_new_program(tmp_path, optimizer, steps_before):
    """The new program may have made some updates already."""
    state, step = make(optimizer=optimizer)
    state = advance(state, step)
    af.save(step, state, tmp_path)
    advance(state, step)
    new_state, new_step = make(7, optimizer=optimizer)
    new_state = advance(new_state, new_step, steps_before)
    new_state = af.load(new_step, new_state, tmp_path)
    assert new_state.step == 2
    advance(new_state, new_step)
    torch.testing.assert_close(kept(new_step), kept(step), rtol=0, atol=0)


def eagerly(model):
    return torch.compile(model, backend="eager")


def numbers(step):
    """Return the parameters' numbers, in order."""
    return [each.tolist() for each in step.plan.model.parameters()]


WRAPPERS = {"plain": lambda model: model, "compile": eagerly, "parallel": nn.DataParallel}


# torch.compile raises this warning itself
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("plain", "compile"),
        pytest.param("compile", "plain", marks=pytest.mark.slow),
        ("parallel", "plain"),
    ],
)
def test_keys_are_those_of_the_model_that_a_user_wrapped(tmp_path, saved, loaded):
    recipe = af.ema(0.5)
    make_in = lambda wrapper: make(model=WRAPPERS[wrapper](ours.regression_model()), recipe=recipe)
    state, step = make_in(saved)
    state = advance(state, step)
    path = af.save(step, state, tmp_path)
    _, other = make_in(loaded)
    af.load(other, state, tmp_path)
    keys = {name.split("/", 1)[1] for name in read_manifest(path).entries if "model/" in name}
    assert keys == ours.regression_model().state_dict().keys()
    assert numbers(other) == numbers(step)
    with af.averaged(other), af.averaged(step):
        assert numbers(other) == numbers(step)


def test_what_was_saved_before_the_first_update_takes_later_state_away(tmp_path):
    state, step = make()
    af.save(step, state, tmp_path)
    before = ours.regression_model().state_dict()
    state = af.load(step, advance(state, step), tmp_path)
    assert (state.step, step.plan.optimizer.state_dict()["state"]) == (0, {})
    ours.assert_identical(step.plan.model.state_dict(), before)


def test_tensors_are_filled_where_they_are(tmp_path):
    state, step = make()
    state = advance(state, step)
    af.save(step, state, tmp_path)
    places = [each.data_ptr() for each in step.plan.model.parameters()]
    moments = step.plan.optimizer.state[next(step.plan.model.parameters())]
    place = moments["exp_avg"].data_ptr()
    af.load(step, advance(state, step), tmp_path)
    assert [each.data_ptr() for each in step.plan.model.parameters()] == places
    moments = step.plan.optimizer.state[next(step.plan.model.parameters())]
    assert moments["exp_avg"].data_ptr() == place


def draw():
    """Draw from each generator of this process."""
    return [random.random(), np.random.rand(), torch.rand(2).tolist()]


def test_generators_continue_where_they_stood(tmp_path):
    state, step = make()
    af.save(step, state, tmp_path)
    drawn = draw()
    draw()
    af.load(step, state, tmp_path)
    assert draw() == drawn


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_the_generator_of_the_device_continues_where_it_stood(tmp_path):
    device = torch.accelerator.current_accelerator()
    state, step = make(model=ours.regression_model().to(device), state=af.DistState(device=device))
    torch.rand(3, device=device)
    af.save(step, state, tmp_path)
    drawn = torch.rand(2, device=device)
    af.load(step, state, tmp_path)
    assert torch.equal(torch.rand(2, device=device), drawn)


def test_generators_of_new_ranks_are_derived_and_that_is_logged(tmp_path, capsys):
    state, step = make(recipe=af.wrap_ddp())
    af.save(step, state, tmp_path)

    def run(state):
        state, step = make(recipe=af.wrap_ddp(), state=state)
        af.load(step, state, tmp_path)

    simulate(run, world_size=2)
    assert capsys.readouterr().err == (
        "ranks that share a batch: 1 when saved, 2 now; random generators of the new ranks are derived "
        "from seed, rank and step\n"
    )


@pytest.mark.slow
def test_generators_of_new_ranks_are_those_of_seed_rank_and_step(tmp_path):
    """The same numbers come on every load, and different ones for other ranks or steps."""
    state, step = make(state=af.DistState(seed=3))
    saved = {}
    for _ in range(2):
        af.save(step, state, tmp_path)
        saved[state.step] = draw()
        state = advance(state, step, 1)
    script = f"""
        import json
        import accel_fn as af
        from tests.checkpoint.test_checkpoint import draw, make
        with af.distributed(device="cpu", seed=3) as state:
            state, step = make(recipe=af.wrap_ddp(), state=state)
            for at in (0, 1, 0, 1):
                af.load(step, state, {str(tmp_path)!r}, at=at)
                say(json.dumps([state.rank, at, draw()]))
    """
    lines = launch(script, num_processes=3).splitlines()
    derived = {}
    for rank, at, drawn in map(json.loads, lines):
        assert derived.setdefault((rank, at), drawn) == drawn
        assert rank or drawn == saved[at]
    assert len({str(drawn) for drawn in derived.values()}) == 6


class Counter:
    """An extra of the user's that keeps a number."""

    def __init__(self, number=0):
        self.number = number

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, saved):
        self.number = saved["number"]


def test_a_dict_is_filled_in_place_by_what_was_saved(tmp_path):
    def run(state):
        state, step = make(recipe=af.wrap_ddp(), state=state)
        best = {"loss": 0.5 + state.rank, "at": "step 3", "where": torch.ones(2), 7: [1, 2]}
        af.save(step, state, tmp_path, extras={"best": best})
        again = {"loss": float("inf"), "new": 1}
        af.load(step, state, tmp_path, extras={"best": again})
        assert again.pop("where").tolist() == [1, 1]
        return again

    common = {"at": "step 3", 7: [1, 2], "new": 1}
    assert simulate(run, world_size=2) == [{"loss": 0.5, **common}, {"loss": 1.5, **common}]


def test_tensors_of_a_dict_stay_on_their_device(tmp_path):
    state, step = make()
    af.save(step, state, tmp_path, extras={"values": {"x": torch.ones(2)}})
    values = {"x": torch.zeros(2, device="meta")}
    af.load(step, state, tmp_path, extras={"values": values})
    assert values["x"].device.type == "meta"


def test_a_generator_draws_on_as_if_the_run_had_not_stopped(tmp_path):
    state, step = make()
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    af.save(step, state, tmp_path, extras={"noise": generator})
    expected = torch.rand(5, generator=generator)
    again = torch.Generator()
    af.load(step, state, tmp_path, extras={"noise": again})
    assert torch.equal(torch.rand(5, generator=again), expected)


def test_a_dict_of_other_things_is_refused(tmp_path):
    state, step = make()
    with pytest.raises(ValueError, match="save: extras/best must hold tensors, numbers, strings"):
        af.save(step, state, tmp_path, extras={"best": {"model": Counter()}})


def shared(num_samples=40, batch_size=4, *, seed=0, generator=None, **options):
    data = TensorDataset(torch.arange(num_samples))
    options = {"shuffle": True, **options}
    generator = None if generator is None else torch.Generator().manual_seed(generator)
    loader = DataLoader(data, batch_size, generator=generator, **options)
    return af.shard_loader(loader, af.DistState(seed=seed))


def test_a_tensor_of_one_element_is_saved_whatever_its_stride(tmp_path):
    model = ours.regression_model()
    model.register_buffer("first", torch.arange(6.0).reshape(2, 3)[1:, 1])
    state, step = make(model=model)
    af.save(step, state, tmp_path)
    model.first.zero_()
    af.load(step, state, tmp_path)
    assert model.first.tolist() == [4.0]


def test_another_number_of_virtual_ranks_is_a_difference(tmp_path):
    af.save(*reversed(make(recipe=af.reproducible(4))), tmp_path)
    for recipe, here in ((af.reproducible(8), "8 here"), (af.wrap_ddp(), "nothing here")):
        assert f"num_virtual_ranks: 4 saved, {here}" in differences(tmp_path, *make(recipe=recipe))
    assert af.load(*reversed(make(recipe=af.reproducible(4))), tmp_path).step == 0


OTHER_DATA = {
    "longer": (shared(48), "num_samples: 40 saved, 48 here"),
    "more batches": (shared(48), "batches_per_epoch: 10 saved, 12 here"),
    "as many batches": (shared(39), "num_samples: 40 saved, 39 here"),
    "batch size": (shared(batch_size=5), "batch_size: 4 saved, 5 here"),
    "order": (shared(shuffle=False), "shuffle: True saved, False here"),
    "rest": (shared(drop_last=True), "drop_last: False saved, True here"),
    "seed": (shared(seed=3), "seed: 0 saved, 3 here"),
    "generator": (shared(generator=3), "seed: 0 saved, "),
    "read ahead": (af.prefetch(shared(39), af.DistState()), "num_samples: 40 saved, 39 here"),
    "windows": (af.group_batches(shared(80), 2), "num_samples: 40 saved, 80 here"),
    "sampler": (shared(shuffle=False, sampler=range(8)), "num_samples: 40 saved, 8 here"),
}


@pytest.mark.parametrize(("loader", "expected"), OTHER_DATA.values(), ids=OTHER_DATA)
def test_other_data_are_refused_before_anything_is_overwritten(tmp_path, loader, expected):
    """The error is one list with all other differences; the loader is an extra."""
    state, step = make()
    extras = {"counter": Counter(4), "data": shared()}
    af.save(step, advance(state, step), tmp_path, extras=extras)
    state, other = make(3, recipe=af.clip(1.0))
    extras = {"counter": Counter(9), "data": loader}
    lines = differences(tmp_path, state, other, extras=extras)
    assert lines[0] == "gradients: nothing saved, ['clip'] here"
    assert any(line.startswith(f"extras/data: {expected}") for line in lines)
    assert extras["counter"].number == 9


def test_the_same_data_are_taken_also_as_they_were_described_before(tmp_path):
    state, step = make()
    af.save(step, state, tmp_path, extras={"data": shared()})
    af.load(step, state, tmp_path, extras={"data": shared()})
    shared().load_state_dict({"batches_per_epoch": 10})
    text = "loader must be that of the run that was saved, got num_samples: 40 saved, 39 here; give"
    with pytest.raises(ValueError, match=text):
        shared(39).load_state_dict(shared().state_dict())


def test_an_extra_that_refuses_leaves_the_run_as_it_was_on_every_rank(tmp_path):
    class Bad(Counter):
        def load_state_dict(self, saved):
            raise KeyError("lost")

    def run(state):
        state, step = make(recipe=af.wrap_ddp(), state=state)
        af.save(step, state, tmp_path, extras={"extra": Counter()})
        _, other = make(3, recipe=af.wrap_ddp(), state=state)
        with unchanged(other), pytest.raises((KeyError, RuntimeError), match="lost"):
            af.load(other, state, tmp_path, extras={"extra": Bad() if state.rank else Counter()})

    simulate(run, world_size=2)


def test_the_manifest_describes_the_run_in_plain_json(tmp_path):
    state, step = make(recipe=af.compose(af.clip(0.5), af.accumulate(2)))
    path = af.save(step, advance(state, step), tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())["checkpoint"]
    assert list(manifest["explained"].values()) == [af.explain(step.plan, state)]
    assert (manifest["world_size"], manifest["step"], manifest["seed"]) == (1, 2, 0)
    assert (manifest["accel_fn"], manifest["torch"]) == (af.__version__, torch.__version__)
    assert {*manifest["files"], "manifest.json"} == {each.name for each in path.iterdir()}


def test_tensors_lie_in_files_as_aligned_as_in_memory(tmp_path):
    """A copy between two places of equal alignment is faster."""
    state, step = make(model=Odd())
    path = af.save(step, advance(state, step), tmp_path)
    entries = read_manifest(path).entries
    chunks = [chunk for entry in entries.values() for chunk in entry.chunks]
    assert [chunk.start % 64 for chunk in chunks] == [0] * len(chunks)
    laid = sorted((chunk.start, chunk.length) for chunk in chunks if chunk.length)
    gaps = [after - start - length for (start, length), (after, _) in pairwise(laid)]
    assert all(0 <= gap < 64 for gap in gaps)


class Odd(nn.Module):
    """A module with tensors of every layout and kind, and extra state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 1).double())
        self.image = nn.Parameter(
            torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last), requires_grad=False
        )
        self.register_buffer("turned", torch.arange(6).reshape(2, 3).t())
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("halves", torch.rand(3).bfloat16())
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("waves", torch.rand(2, dtype=torch.complex64))
        self.words = "some"

    def forward(self, inputs):
        return inputs @ self.weight

    def get_extra_state(self):
        return {"words": self.words}

    def set_extra_state(self, state):
        self.words = state["words"]


def test_any_tensors_and_extra_state_come_back(tmp_path):
    model = Odd()
    model.words = "others"
    state, step = make(model=model)
    af.save(step, advance(state, step), tmp_path)
    again = Odd()
    state, other = make(model=again)
    af.load(other, state, tmp_path)
    assert again.words == "others"
    tensors = {
        name: each for name, each in model.state_dict().items() if isinstance(each, torch.Tensor)
    }
    ours.assert_identical(again.state_dict(), tensors)
    assert again.image.is_contiguous(memory_format=torch.channels_last)


class Copying(nn.Linear):
    """Its `state_dict` returns copies and a tensor as extra state, as a quantised layer may."""

    scale = torch.ones(2)

    def state_dict(self, *arguments, **options):
        kept = super().state_dict(*arguments, **options)
        return {name: value.clone() for name, value in kept.items()}

    def get_extra_state(self):
        return self.scale

    def set_extra_state(self, state):
        self.scale = state.clone()


class Hiding(nn.Linear):
    """Its `state_dict` leaves out a large fixed tensor, and has extra state."""

    words = "mine"

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("table", torch.zeros(2))

    def state_dict(self, *arguments, **options):
        kept = super().state_dict(*arguments, **options)
        return {name: value for name, value in kept.items() if name != "table"}

    def get_extra_state(self):
        return {"words": self.words}

    def set_extra_state(self, state):
        self.words = state["words"]


@pytest.mark.parametrize(
    ("kinds", "difference"),
    [
        ((Hiding, nn.Linear), "extra state saved, nothing here"),
        ((nn.Linear, Hiding), "nothing saved, extra state here"),
    ],
    ids=["gone", "new"],
)
def test_extra_state_that_is_gone_or_new_is_a_difference(tmp_path, kinds, difference):
    saved, here = [kind(3, 1).double() for kind in kinds]
    af.save(*reversed(make(model=saved)), tmp_path)
    program = make(model=here)
    assert differences(tmp_path, *program) == [f"model/_extra_state: {difference}"]
    af.load(*reversed(program), tmp_path, strict=False)
    assert torch.equal(here.weight, saved.weight)


class Demanding(Hiding):
    """It loads everything through its own `load_state_dict`."""

    def load_state_dict(self, saved):
        assert "weight" in saved
        return super().load_state_dict(saved, strict=False)


@pytest.mark.parametrize("kind", [Hiding, Demanding])
def test_a_model_that_leaves_a_tensor_out_gets_its_extra_state_back(tmp_path, kind):
    state, step = make(model=(model := kind(3, 1).double()))
    model.words = "others"
    af.save(step, advance(state, step), tmp_path)
    state, other = make(model=(again := kind(3, 1).double()))
    again.table.fill_(5)
    af.load(other, state, tmp_path)
    assert again.words == "others"
    assert again.table.tolist() == [5, 5]
    torch.testing.assert_close(again.weight, model.weight, rtol=0, atol=0)


class Expanding(nn.Linear):
    """A tensor of it holds several elements in one place."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("mask", torch.arange(3)[:, None].expand(3, 4))


def test_a_tensor_with_several_elements_in_one_place_is_refused_by_name(tmp_path):
    state, step = make(model=(model := Expanding(3, 1).double()))
    expanded, model.mask = model.mask, model.mask.clone()
    af.save(step, state, tmp_path)
    model.mask = expanded
    for function in (af.save, af.load):
        text = rf"{function.__name__}: step must hold .*, got strides \(1, 0\) for 'model/mask'; clone it"
        with pytest.raises(ValueError, match=text):
            function(step, state, tmp_path)


class Renaming(nn.Linear):
    """Its `state_dict` uses other names for its tensors, and `load_state_dict` takes these."""

    def state_dict(self, *arguments, **options):
        kept = super().state_dict(*arguments, **options)
        return {f"old.{name}": value for name, value in kept.items()}

    def load_state_dict(self, saved, **options):
        return super().load_state_dict(
            {name.removeprefix("old."): value for name, value in saved.items()}, **options
        )


@pytest.mark.parametrize("kind", [Copying, Renaming])
def test_a_model_that_does_not_give_its_own_tensors_gets_them_back(tmp_path, kind):
    state, step = make(model=(model := kind(3, 1).double()))
    model.scale = torch.tensor([2.0, 3.0])
    state = advance(state, step)
    af.save(step, state, tmp_path)
    state, other = make(model=(again := kind(3, 1).double()))
    af.load(other, state, tmp_path)
    ours.assert_identical(dict(again.named_parameters()), dict(model.named_parameters()))
    torch.testing.assert_close(kept(other)[1], kept(step)[1], rtol=0, atol=0)
    assert kind is Renaming or again.scale.tolist() == [2.0, 3.0]


@dataclass
class Counting:
    """A function of a transform that keeps a number."""

    count: int = 0

    def __call__(self, state, report):
        self.count += 1
        return state

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, saved):
        self.count = saved["count"]


def another_model():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Linear(1, 1)).double()


def rows(batch):
    return len(batch[0])


def in_two_groups(parameters):
    first, *others = parameters
    return torch.optim.AdamW([{"params": [first]}, {"params": others}])


ALL = "['0.weight', '0.bias', '2.weight', '2.bias']"
MISTAKES = {
    "optimizer": ({"optimizer": ours.sgd}, "optimizer: AdamW saved, SGD here"),
    "weight_fn": (
        {"recipe": lambda plan: replace(plan, weight_fn=rows)},
        "weight_fn: count_samples saved, rows here",
    ),
    "groups": (
        {"optimizer": in_two_groups},
        f"optimizer groups: [{ALL}] saved, [['0.weight'], ['0.bias', '2.weight', '2.bias']] here"
        '; give match="names" to load into other groups of parameters',
    ),
    "shape": (
        {"model": another_model()},
        "model/0.weight: float64 [5, 3] saved, float64 [4, 3] here",
    ),
    "more": ({"model": another_model()}, "model/3.weight: nothing saved, float64 [1, 1] here"),
    "fewer": (
        {"model": nn.Sequential(nn.Linear(3, 1)).double()},
        "model/2.weight: float64 [1, 5] saved, nothing here",
    ),
    "dtype": (
        {"model": ours.regression_model().float()},
        "model/0.weight: float64 [5, 3] saved, float32 [5, 3] here",
    ),
    "seed": ({"state": af.DistState(seed=3)}, "seed: 0 saved, 3 here"),
}


TRANSFORMS = {
    "clip": (af.clip(1.0), "gradients", "['clip']"),
    "average": (af.ema(0.9), "after_update", "['ema']"),
    "schedule": (af.schedule(lambda _: 1.0), "after_update", "['schedule(LambdaLR)']"),
}
OTHERS = {
    **{name: (None, *row) for name, row in MISTAKES.items()},
    **{
        f"{name} added": (None, {"recipe": recipe}, f"{slot}: nothing saved, {functions} here")
        for name, (recipe, slot, functions) in TRANSFORMS.items()
    },
    **{
        f"{name} gone": (recipe, {}, f"{slot}: {functions} saved, nothing here")
        for name, (recipe, slot, functions) in TRANSFORMS.items()
    },
}


@pytest.mark.parametrize(("recipe", "changes", "difference"), OTHERS.values(), ids=OTHERS)
def test_another_program_is_refused_before_anything_is_overwritten(
    tmp_path, recipe, changes, difference
):
    af.save(*reversed(make(recipe=recipe)), tmp_path)
    assert difference in differences(tmp_path, *make(**changes))


def test_what_fits_is_filled_where_the_program_was_changed_on_purpose(tmp_path, capsys):
    counter = Counting(5)
    state, step = make()
    af.save(step, advance(state, step), tmp_path)
    other = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1), nn.Linear(1, 1)).double()
    last = other[3].weight.clone()
    recipe = lambda plan: replace(plan, after_update=(counter,))
    state, new = make(model=other, recipe=recipe)
    state = af.load(new, state, tmp_path, extras={"new": (extra := Counter(7))}, strict=False)
    assert (state.step, counter.count, extra.number) == (2, 5, 7)
    assert torch.equal(other[3].weight, last)
    ours.assert_identical(
        {name: each for name, each in other.state_dict().items() if not name.startswith("3.")},
        step.plan.model.state_dict(),
    )
    assert new.plan.optimizer.state_dict()["state"] == {}
    text = capsys.readouterr().err
    assert text.startswith(f"{tmp_path / 'step_00000002'} is of another program:\n")
    assert "  model/3.weight: nothing saved, float64 [1, 1] here\n" in text
    assert "  after_update: nothing saved, ['Counting'] here\n" in text


@pytest.mark.parametrize("widths", [(3, 4, 1), (3, 5, 1, 1)], ids=["shape", "more"])
def test_what_a_transform_keeps_starts_fresh_where_it_does_not_fit(tmp_path, capsys, widths):
    """An example is the average of a layer that was replaced."""
    recipe = af.compose(af.ema(0.5), af.schedule(lambda _: 1.0))
    state, step = make(recipe=recipe)
    af.save(step, advance(state, step), tmp_path)
    model = nn.Sequential(*(nn.Linear(*each) for each in pairwise(widths))).double()
    state, other = make(model=model, recipe=recipe)
    state = af.load(other, state, tmp_path, strict=False)
    text = capsys.readouterr().err
    assert "  after_update/0 ema starts fresh: its state was saved in other shapes" in text
    assert other.plan.after_update[0].state_dict()["num_updates"] == 0
    assert other.plan.after_update[1].state_dict() == step.plan.after_update[1].state_dict()
    advance(state, other)


def test_what_a_transform_keeps_in_other_shapes_is_a_difference(tmp_path):
    """An example is the norms of a window of another length."""
    state, step = make(recipe=af.skip_spikes(window=8))
    af.save(step, advance(state, step), tmp_path)
    state, other = make(recipe=af.skip_spikes(window=16))
    assert differences(tmp_path, state, other) == [
        "transforms/accept/0 skip_spikes/norms: float32 [8] saved, float32 [16] here"
    ]
    advance(af.load(other, state, tmp_path, strict=False), other)


def test_extras_that_do_not_fit_are_left_and_logged(tmp_path, capsys):
    state, step = make()
    extras = {"counter": Counter(4), "data": shared(), "old": Counter()}
    af.save(step, advance(state, step), tmp_path, extras=extras)
    extras = {"counter": Counter(9), "data": shared(48), "new": Counter(7)}
    assert af.load(step, state, tmp_path, extras=extras, strict=False).step == 2
    assert (extras["counter"].number, extras["new"].number) == (4, 7)
    text = capsys.readouterr().err
    assert "  extras: ['counter', 'data', 'old'] saved, ['counter', 'data', 'new'] here\n" in text
    assert "  extras/data: num_samples: 40 saved, 48 here" in text


def test_at_names_a_checkpoint_by_its_step_or_its_name(tmp_path):
    state, step = make()
    for _ in range(3):
        state = advance(state, step, 1)
        af.save(step, state, tmp_path)
    found = [af.load(step, state, tmp_path, at=at).step for at in (2, "step_00000001", "latest")]
    assert found == [2, 1, 3]
    with pytest.raises(
        CheckpointError, match=r"load: at=7 must be a checkpoint in .* steps 1, 2, 3$"
    ):
        af.load(step, state, tmp_path, at=7)
    with pytest.raises(CheckpointError, match=r"at='latest' must .*, got steps none"):
        af.load(step, state, tmp_path / "nowhere")


_, STEP = make()
MISTAKES_OF_ONE = {
    "folder": ((3,), {}, "folder must be the path of a folder, got 3"),
    "other folder": (("elsewhere",), {}, r"folder must be the same .* got 'elsewhere' on rank 1"),
    "step": (("run", {"a": 3}), {}, "step must be a Step or a dict of Steps"),
    "number": (("run", 3), {}, "step must be a Step or a dict of Steps, got 3"),
    "no step": (("run", {}), {}, "step must be a Step or a dict of Steps"),
    "bad extra": (
        (),
        {"extras": {"n": 3}},
        r"extras\['n'\] must have state_dict and load_state.*, or be a dict",
    ),
    "bad name": (("run", {"a/b": STEP}), {}, "step must have names that are text without /, got"),
    "no name": (
        ("run", {None: STEP}),
        {},
        "step must have names that are text without /, got None",
    ),
    "extras": (
        (),
        {"extras": {"n": Counter()}},
        r"extras must be the same .* got \['n'\] on rank 1",
    ),
    "no extras": ((), {"extras": 3}, "extras must be a dict, by names, got 3"),
    "empty": ((), {"extras": np.zeros(2)}, "extras must be a dict, by names, got array"),
    "name": ((), {"extras": {3: Counter()}}, "extras must be a dict, by names, got {3: "),
}
OF_SAVE = MISTAKES_OF_ONE | {
    "wait": ((), {"wait": 1}, "wait must be True or False, got 1"),
    "other wait": ((), {"wait": False}, "wait must be the same .* got False on rank 1 and True on"),
    "keep": ((), {"keep": "all"}, "keep must be an integer >= 1, got 'all'"),
    "score": ((), {"score": "high"}, "score must be a number, got 'high'"),
    "flag as score": ((), {"score": True}, "score must be a number, got True"),
    "other score": ((), {"score": 0.5}, "score must be the same on every rank, got 0.5 on rank 1"),
    "keep_best": ((), {"keep_best": -1}, "keep_best must be an integer >= 0, got -1"),
    "keep_best alone": (
        (),
        {"keep_best": 2},
        "keep_best must be given beside keep, got 2; without keep, all checkpoints stay",
    ),
    "other keep_best": ((), {"keep": 1, "keep_best": 1}, "keep must be the same on every rank"),
    "beside": ((), {"beside": "file"}, "beside must be a function of a path, got 'file'"),
    "other beside": ((), {"beside": print}, "beside must be the same on every rank"),
    "other keep": ((), {"keep": 3}, "keep must be the same on every rank, got 3 on rank 1"),
}
OF_LOAD = MISTAKES_OF_ONE | {
    "at": ((), {"at": True}, r"at must be \"latest\", the number of a step or the name of a"),
    "negative at": ((), {"at": -1}, r"at must be \"latest\", the number of a step or the name"),
    "path at": ((), {"at": Path("run")}, r"at must be .*'\); give its path as folder"),
    "other at": ((), {"at": 0}, "at must be the same .* got 0 on rank 1 and 'latest' on rank 0"),
    "gone": (("nowhere",), {}, "folder must be the same on every rank"),
    "strict": ((), {"strict": None}, "strict must be True or False, got None"),
}


@pytest.mark.parametrize(("function", "mistakes"), [("save", OF_SAVE), ("load", OF_LOAD)])
def test_what_one_rank_alone_is_given_wrongly_is_refused_on_all(
    tmp_path, monkeypatch, function, mistakes
):
    """The other ranks raise at once and do not wait."""
    monkeypatch.chdir(tmp_path)

    def run(state):
        state, step = make(recipe=af.wrap_ddp(), state=state)
        af.save(step, state, "run")
        for given, options, text in mistakes.values():
            folder, steps = (*given, *("run", step)[len(given) :]) if state.rank else ("run", step)
            with pytest.raises((ValueError, RuntimeError), match=f"{function}: .*{text}"):
                getattr(af, function)(steps, state, folder, **(options if state.rank else {}))
            af.barrier(state)

    simulate(run, world_size=2)
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("name", ["step", "call"])
def test_ranks_that_are_at_other_steps_are_refused(tmp_path, name):
    def run(state):
        state, step = make(recipe=af.wrap_ddp(), state=state)
        text = rf"save: state\.{name} must be the same .* got 1 on rank"
        with pytest.raises(ValueError, match=text):
            af.save(step, replace(state, **{name: state.rank}), tmp_path)

    simulate(run, world_size=2)


class WithoutInit(torch.optim.Optimizer):
    """An optimizer that never called torch's `__init__`, as some of other libraries do."""

    def __init__(self, parameters):
        self.defaults = {"lr": 0.1}
        self.state = defaultdict(dict)
        self.param_groups = [{"params": [*parameters], "lr": 0.1}]

    def step(self, closure=None):
        with torch.no_grad():
            for each in self.param_groups[0]["params"]:
                each -= 0.1 * each.grad

    def state_dict(self):
        return {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}

    def load_state_dict(self, saved):
        self.param_groups[0]["lr"] = saved["param_groups"][0]["lr"]


def test_an_optimizer_that_never_called_torchs_init_is_loaded(tmp_path):
    def built():
        model = nn.Linear(2, 1)
        plan = af.Plan(
            lambda model, rows: model(rows).mean(), model, WithoutInit(model.parameters())
        )
        return model, af.build(plan, af.DistState())

    saved, (state, step) = built()
    af.save(step, state, tmp_path)
    model, (state, step) = built()
    af.load(step, state, tmp_path)
    assert torch.equal(model.weight, saved.weight)
