"""Each plug-in can be left out: all else works, and what it gave raises an error that names its extra."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import accel_fn as af

PACKAGE = Path(af.__file__).parent
PROJECT = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
GAVE = {
    "accelerate": ["checkpoint.load_accelerate", "contrib.accelerate"],
    "deepspeed": ["wrap_deepspeed", "contrib.deepspeed"],
    "estimate": ["contrib.estimate"],
    "migrate": ["contrib.migrate"],
    "runs": ["contrib.runs"],
    "transformers": ["contrib.transformers"],
}
COMMANDS = {
    "accelerate": ["launch --config accelerate.yaml train.py"],
    "deepspeed": ["launch --cpu --wrap deepspeed train.py"],
    "estimate": ["estimate --help"],
    "migrate": ["migrate train.py"],
    "runs": ["report .", "plot .", "watch ."],
    "transformers": [],
}
PROGRAM = """
import operator, sys
import accel_fn as af

gave = {*sys.argv[1:]}
PACKAGES = {"": af, **{f"{name}.": getattr(af, name) for name in (
    "checkpoint", "contrib", "data", "extend", "launcher", "testing")}}
every = {prefix + name for prefix, package in PACKAGES.items() for name in package.__all__}
for name in every - gave:
    operator.attrgetter(name)(af)

import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recipe = af.compose(af.wrap_as_launched(), af.clip(1.0))
loss_fn = lambda model, batch: model(batch).mean()
state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), af.DistState())
state, report = step(state, torch.ones(3, 2))
assert state.step == 1

for name in gave:
    try:
        operator.attrgetter(name)(af)
    except af.errors.ExtraError as error:
        print(error)
"""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "runs" else pytest.mark.slow) for name in GAVE],
)
def test_all_else_works_and_what_it_gave_names_the_extra(name, tmp_path):
    contrib = str(PACKAGE / "contrib")
    shutil.copytree(
        PACKAGE,
        tmp_path / "accel_fn",
        ignore=lambda at, _: (name, f"{name}.py") if at == contrib else (),
    )
    (tmp_path / "accelerate.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")
    (tmp_path / "train.py").write_text("import accel_fn as af\naf.wrap_as_launched()\n")
    lines = run(tmp_path, "-c", PROGRAM, *GAVE[name]).stdout.splitlines()
    assert sorted(lines) == sorted(missing(each.rpartition(".")[2], name) for each in GAVE[name])
    assert " launch " in run(tmp_path, "-m", "accel_fn", "--help").stdout
    for each in COMMANDS[name]:
        done = run(tmp_path, "-m", "accel_fn", *each.split(), code=1)
        if name == "deepspeed":  # the script fails, with its own traceback
            assert missing("wrap_deepspeed", name) in done.stderr
        else:
            what = "config" if name == "accelerate" else each.split()[0]
            assert done.stderr == f"Error: {missing(what, name)}\n"


def run(folder, *arguments, code=0):
    env = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done


def missing(what, name):
    return f'{what}: accel_fn.contrib.{name} must be installed; pip install "accel_fn[{name}]"'


def test_every_plug_in_is_left_out_by_a_test_and_has_an_extra():
    found = {path.stem for path in (PACKAGE / "contrib").iterdir()} - {"__init__", "__pycache__"}
    assert found == {*GAVE} == {*COMMANDS} == {*af.contrib.__dir__()} & found
    assert found <= PROJECT["project"]["optional-dependencies"].keys()


def test_the_contract_of_imports_names_every_module_that_is_not_public():
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    [contract] = [each for each in contracts if each["name"].startswith("plug-ins import")]
    assert "ignore_imports" not in contract
    forbidden = {each.removeprefix("accel_fn.") for each in contract["forbidden_modules"]}
    commands = {f"cli.{path.stem}" for path in (PACKAGE / "cli").glob("*.py")}
    public = {"cli", "contrib", "errors", "extend"}
    with_public_names = {"checkpoint", "data", "launcher", "testing"}
    tops = {path.stem for path in PACKAGE.iterdir() if path.suffix != ".typed"}
    private = tops - public - with_public_names - {"__init__", "__pycache__", "py"}
    inner = {f"{name}.**" for name in with_public_names}
    own = {"cli.__init__", "cli.__main__", "cli.output", "cli.targets"}
    assert forbidden == private | inner | (commands - own)
