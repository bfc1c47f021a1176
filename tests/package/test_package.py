"""The package itself: its exports, its imports and when they happen."""

import importlib
import operator
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

import accel_fn as af
from accel_fn.names import CALLS, NAMES


def test_every_public_name_loads_and_is_documented():
    assert set(af.__all__) <= set(dir(af))
    values = {name: getattr(af, name) for name in af.__all__}
    aliases = {"GradFn", "Transform"}
    undocumented = {name for name, value in values.items() if callable(value) and not value.__doc__}
    assert undocumented - aliases == set()


STUB = re.compile(r"^from (accel_fn\S+) import \(?\s*(\w+) as (\w+)", re.MULTILINE)


@pytest.mark.parametrize("package", [af, af.checkpoint, af.data, af.launcher])
def test_type_checkers_and_programs_find_the_same_names(package):
    stub = Path(package.__file__).with_suffix(".pyi").read_text()
    named = {name: module for module, name, _ in STUB.findall(stub)}
    assert sorted(named) == package.__all__
    for name, module in named.items():
        assert getattr(importlib.import_module(module), name) is getattr(package, name)


@pytest.mark.parametrize("name", NAMES)
def test_an_old_name_is_refused_with_the_new_one(name):
    new = NAMES[name].split("(")[0].removeprefix("accel_fn.")
    assert operator.attrgetter(new)(af)
    with pytest.raises(AttributeError, match=re.escape(f"it is {NAMES[name]} now")):
        getattr(af, name)


def test_an_old_call_is_refused_with_the_new_one(tmp_path):
    model = nn.Linear(1, 1)
    plan = af.Plan(lambda model, batch: model(batch).sum(), model, SGD(model.parameters()))
    state, step = af.build(plan, af.DistState())
    loader = [torch.ones(1, 1)]
    old = {
        "build": (state, plan),
        "draw": (state, torch.rand),
        "evaluate": (step, loader, state),
        "load": (tmp_path, state, step),
        "log_values": (state, step, {}),
        "predict": (step, loader, state, model),
        "resume": (tmp_path, state, step),
        "save": (tmp_path, state, step),
    }
    for name, given in {**old, "load_accelerate": (tmp_path, step, state)}.items():
        home = af.checkpoint if name == "load_accelerate" else af
        with pytest.raises(TypeError, match=re.escape(f"; the call is {CALLS[name]}")):
            getattr(home, name)(*given)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Accelerator'"):
        af.Accelerator  # noqa: B018
