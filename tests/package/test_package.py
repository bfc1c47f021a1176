"""The package itself: its exports, its imports and when they happen."""

import ast
import importlib
import operator
import re
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import accel_fn as af
from accel_fn.names import CALLS, NAMES
from tests.package.sources import PACKAGE, SOURCES, nodes, parsed


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


# Objects of the package, generators or pipes, whose methods are named like collectives.
OURS = ("primitives", "self", "channel", "connection", "mean", "reader", "writer")


def test_one_module_alone_calls_collectives():
    words = ("reduce", "gather", "scatter", "all", "broadcast", "barrier", "send", "recv")
    collectives = {
        name
        for home in (dist, dist.ProcessGroup)
        for name in dir(home)
        if name.startswith(words) and callable(getattr(home, name))
    }
    assert {"all_reduce", "allreduce", "alltoall_base", "barrier", "send"} <= collectives
    callers = {
        path.name
        for path in SOURCES
        for node in nodes(path, ast.Attribute)
        if node.attr in collectives and ast.unparse(node.value) not in OURS
    }
    # the last closes groups, by a call that meets no other
    assert callers == {"primitives.py", "thread_groups.py"}


# Mutable objects that modules hold, and why none of them belongs to a run.
KEPT = {
    "_numbers": "a count, for names that no other mesh of this process has",
    "_alone": "a group of one rank, in which nothing is kept",
    "_groups": "groups of worlds that are used again, which live to the end",
    "_calls": "a count of a thread, of which only differences are read",
    "_device": "what all simulated groups send by",
    "_SOURCES": "what a tensor that lives was copied from, on the host",
    "PLACES": "where in its loader a batch that lives stands",
    "_COUNTS": "how many samples a batch that lives has",
    "_SPARE": "a number",
    "_CHECKS": "the checks of schedulers that live",
    "GENERATORS": "a lock",
    "_is_uncompiled": "whether a thread runs modules uncompiled, while it does",
    "_form": "what a type is made of",
    "_hints": "the fields of a class",
    "_VERSION": "the version that is installed",
    "_has_code": "a fact about a dtype",
    "_LOCK": "a lock",
    "_SHARED": "which epoch a data set that is being read was set to last",
    "_STARTING": "a lock",
    "_INFO_LOCK": "a lock",
    "_epoch": "which epoch a sample is read for, while it is",
    "_libraries": "where this Python's libraries are",
    "_place_of_rate": "a fact about an operation of torch",
    "draws_inside": "likewise",
    "_written_by": "likewise",
    "_internal": "a fact about torch's modules",
    "_idle": "simulated worlds that wait for the next simulation",
    "_lost": "ranks of simulations that failed",
    "_exiting": "whether this process ends",
    "_rank": "which simulated rank a thread is, while it is",
    "_LOGS": "the logs that are open, by path: plans that write to one share it",
    "_EVENTS": "the files of events that are open, by path",
    "_quoted": "names as JSON has them",
    "_NOTHING": "rows of no shapes",
    "_IMPORTED": "when this process imported the file",
    "_BUILT": "the parameters of all steps, which a loss of another one may reach",
    "_TURNS": "which of the plans over a model has run the last backward",
    "TRAINING": "which loss a thread computes, while it does",
    "IS_GATHERED": "whether a program has parameters whole, while it does",
}
FIXED_WHEN_MADE = {
    *("Averaging", "MappingProxyType", "ParamSpec", "Path", "TypeVar", "attrgetter", "click.Path"),
    *("itemgetter", "logging.getLogger", "nullcontext", "np.uint64", "re.compile"),
    *("struct.Struct", "torch.device", "tuple", "type"),
}
TABLES = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
WRITERS = {
    *("add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove"),
    *("setdefault", "sort", "update"),
}


def kept(tree):
    """List a module's names for objects that may change: made by a call, global, a cache, or a
    table."""
    made, tables = set(), set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any(
            "cache" in ast.unparse(each) for each in node.decorator_list
        ):
            made.add(node.name)
        made |= {
            name for each in ast.walk(node) if isinstance(each, ast.Global) for name in each.names
        }
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = {each.id for at in targets for each in ast.walk(at) if isinstance(each, ast.Name)}
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        for value in values:
            if isinstance(value, TABLES):
                tables |= names
            elif isinstance(value, ast.Call) and ast.unparse(value.func) not in FIXED_WHEN_MADE:
                made |= names
    return made, tables


def written(tree):
    """List the names that a module writes into."""
    for node in ast.walk(tree):
        into = isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(
            node.ctx, ast.Load
        )
        calls = isinstance(node, ast.Attribute) and node.attr in WRITERS
        if (into or calls) and isinstance(node.value, ast.Name):
            yield node.value.id


def test_modules_keep_nothing_of_a_run():
    found = set()
    for path in SOURCES:
        made, tables = kept(parsed(path))
        names = made | tables.intersection(written(parsed(path)))
        found |= names
    # A sorted list, a text, code taken from torch.
    assert found - {"__all__", "__dir__", "__getattr__", "_WRAPPER"} <= set(KEPT)


HEAVY = {
    *("IPython", "torch", "click", "cloudpickle", "deepspeed", "ipykernel", "libcst", "matplotlib"),
    *("pydantic", "rich", "safetensors", "torchao", "tqdm", "traitlets", "xxhash", "yaml"),
}


@cache
def is_heavy(module):
    """Is it torch, a library that takes its time, or a module that imports one at its top?"""
    root, _, rest = module.partition(".")
    if root != "accel_fn":
        return root in HEAVY
    file = PACKAGE.joinpath(*rest.split("."))
    file = file.with_suffix(".py") if file.with_suffix(".py").exists() else file / "__init__.py"
    return file.exists() and any(map(is_heavy, imported_at_the_top(file)))


def imported_at_the_top(path):
    for node in parsed(path).body:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)


def test_imports_stand_at_the_top_of_a_module():
    """An import inside a function is lazy on purpose, for torch or another library that takes its time."""
    inside = [
        f"{path}:{node.lineno} {name}"
        for path in SOURCES
        for function in nodes(path, ast.FunctionDef, ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module]
            if isinstance(node, ast.ImportFrom)
            else [each.name for each in node.names]
        )
        if not is_heavy(name)
    ]
    assert inside == []


def test_every_module_names_its_job_in_a_sentence():
    first_lines = {
        path: (ast.get_docstring(parsed(path)) or "").partition("\n")[0] for path in SOURCES
    }
    assert [path for path, line in first_lines.items() if not line.endswith(".")] == []


def test_every_file_is_unpickled_by_a_rule_that_its_call_states():
    """A variable of the environment changes torch's default, by which code in a file would run."""
    for path in SOURCES:
        for node in nodes(path, ast.Call):
            if ast.unparse(node.func) == "torch.load":
                where = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                assert "weights_only" in [each.arg for each in node.keywords], where
