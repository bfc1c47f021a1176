"""The package itself: what it exports, what it imports and when."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import accel_fn as af

PACKAGE = Path(af.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


def in_a_new_process(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_imports_neither_torch_nor_hypothesis():
    code = (
        "import sys, accel_fn, accel_fn.testing;"
        "print('torch' in sys.modules, 'hypothesis' in sys.modules)"
    )
    assert in_a_new_process(code) == "False False"


def test_the_test_bench_needs_no_hypothesis_until_strategies_are_asked_for():
    code = (
        "import sys; from accel_fn.testing import simulate, assert_equivalent;"
        "print('hypothesis' in sys.modules); from accel_fn.testing import strategies;"
        "print('hypothesis' in sys.modules)"
    )
    assert in_a_new_process(code).split() == ["False", "True"]


@pytest.mark.parametrize("name", af.__all__)
def test_every_public_name_loads_and_is_documented(name):
    value = getattr(af, name)
    assert name in dir(af)
    if callable(value) and not name.startswith("Transform"):
        assert value.__doc__


def test_the_names_for_type_checkers_are_those_that_load():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    imported = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("accel_fn")
        for alias in node.names
    }
    loaded = {name: f"accel_fn.{module}.{name}" for name, module in af._HOMES.items()}
    assert imported == loaded


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Accelerator'"):
        af.Accelerator  # noqa: B018


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_worlds_are_joined_and_talk_in_one_module_each_beside_the_simulated_groups():
    users = {
        str(path.relative_to(PACKAGE))
        for path in SOURCES
        if any(
            name in ("torch.distributed", "torch._C._distributed_c10d") for name in imports(path)
        )
    }
    types_only = {"_state.py", "testing/_simulation.py"}  # the type of a group
    stores_only = {"launching/_meeting.py"}  # where machines meet before there is a world
    assert users - types_only - stores_only == {
        "_comm.py",
        "_joining.py",
        "_meshes.py",
        "testing/_threads.py",
    }


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_stand_at_the_top_of_a_module(path):
    tree = ast.parse(path.read_text())
    inside = [
        node.lineno
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert inside == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_says_its_job_in_a_sentence(path):
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
    assert first
    assert first[0].endswith(".")
