"""The package itself: its exports, its imports and when they happen."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch.distributed as dist

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


@pytest.mark.slow
def test_testing_imports_no_hypothesis_until_strategies_are_used():
    code = (
        "import sys; from accel_fn.testing import simulate, assert_equivalent;"
        "print('hypothesis' in sys.modules); from accel_fn.testing import strategies;"
        "print('hypothesis' in sys.modules)"
    )
    assert in_a_new_process(code).split() == ["False", "True"]


def test_every_public_name_loads_and_is_documented():
    assert set(af.__all__) <= set(dir(af))
    values = {name: getattr(af, name) for name in af.__all__}
    aliases = {"GradFn", "Transform"}
    undocumented = {name for name, value in values.items() if callable(value) and not value.__doc__}
    assert undocumented - aliases == set()


def test_tests_take_public_names_from_the_package():
    """A move inside the package breaks no test that imports public names from the top."""
    tests = PACKAGE.parent / "tests"
    homes = {(module, name) for name, module in af._HOMES.items() if module != "accel_fn.errors"}
    assert [
        f"{path.relative_to(tests)}: {alias.name}"
        for path in tests.rglob("*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (node.module, alias.name) in homes
    ] == []


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Accelerator'"):
        af.Accelerator  # noqa: B018


@cache
def parsed(path):
    return ast.parse(path.read_text())


# The modules of torch.distributed that each module needs, beside the type of a group.
DISTRIBUTED = {
    "comm/backends.py": {"torch.distributed"},  # which backends this torch has
    "comm/primitives.py": {"torch.distributed"},  # collectives
    "comm/rendezvous.py": {
        "torch.distributed",
        "torch._C._distributed_c10d",
    },  # worlds of processes
    # groups of simulated ranks
    "comm/thread_groups.py": {"torch.distributed", "torch._C._distributed_c10d"},
    "comm/stores.py": {
        "torch.distributed",
        "torch._C._distributed_c10d",
    },  # stores that ranks meet in
    "comm/meeting.py": {
        "torch.distributed",
        "torch._C._distributed_c10d",
    },  # tries of ranks to meet
    "comm/mesh.py": {
        "torch.distributed",
        "torch._C._distributed_c10d",
        "torch.distributed.device_mesh",
    },
    "comm/mesh_groups.py": {"torch.distributed"},  # groups along the axes of a mesh
    "checkpoint/format/shard_plan.py": {
        "torch.distributed.checkpoint.default_planner",
        "torch.distributed.checkpoint.metadata",
    },
    "comm/dtensor.py": {"torch.distributed.tensor"},
    "transforms/ddp.py": {"torch.distributed.algorithms.ddp_comm_hooks", "torch.nn.parallel"},
    "transforms/fsdp/fsdp.py": {"torch.distributed.device_mesh", "torch.distributed.fsdp"},
    "transforms/fsdp/optimizer_trial.py": {
        "torch.distributed.device_mesh",
        "torch.distributed.tensor",
    },
    "transforms/fsdp/sharded_loss.py": {"torch.distributed.device_mesh"},
    "transforms/tp/same_blocks.py": {"torch.distributed.tensor"},
    "transforms/tp/split.py": {
        "torch.distributed.device_mesh",
        "torch.distributed.tensor",
        "torch.distributed.tensor.parallel",
    },
    "transforms/tp/wrap_tp.py": {"torch.distributed.tensor.parallel"},  # the type of a style
    "transforms/tp/model_plan.py": {
        "torch.distributed.tensor",
        "torch.distributed.tensor.parallel",
    },
    "transforms/tp/split_sequence.py": {
        "torch.distributed.device_mesh",
        "torch.distributed.tensor",
        "torch.distributed.tensor.parallel",
    },
    "transforms/tp/draws.py": {"torch.distributed.tensor", "torch.distributed.tensor.parallel"},
    "transforms/tp/styles.py": {"torch.distributed.tensor", "torch.distributed.tensor.parallel"},
    "transforms/deepspeed/deepspeed.py": {"torch._C._distributed_c10d"},  # the store of one rank
    "testing/simulation.py": {"torch._C._distributed_c10d", "torch.nn.parallel"},
    "launcher/processes/agent.py": {
        "torch.distributed.elastic.agent.server.api",
        "torch.distributed.elastic.agent.server.local_elastic_agent",
        "torch.distributed.elastic.multiprocessing",
        "torch.distributed.elastic.multiprocessing.api",
    },
    "launcher/machines/store_rendezvous.py": {  # the store of the machines' rendezvous
        "torch.distributed",
        "torch._C._distributed_c10d",
        "torch.distributed.elastic.rendezvous",
    },
    "launcher/processes/run.py": {
        "torch.distributed.elastic.agent.server.api",
        "torch.distributed.elastic.multiprocessing",
        "torch.distributed.elastic.rendezvous",
        "torch.distributed.elastic.rendezvous.registry",
    },
}


ROOTS = ("torch.distributed", "torch._C._distributed_c10d", "torch.nn.parallel")


def distributed_modules(path):
    """List the modules of torch.distributed that a module imports, except for the type of a
    group."""
    for node in ast.walk(parsed(path)):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [each.name for each in node.names]
        if isinstance(node, ast.ImportFrom):
            if names == ["ProcessGroup"]:
                continue
            wholes = [name for each in names if (name := f"{node.module}.{each}") in ROOTS]
            names = [node.module or "", *wholes]
        yield from (name for name in names if name.startswith(ROOTS))


def test_few_modules_use_torch_distributed_and_each_no_more_than_it_needs():
    found = {
        str(path.relative_to(PACKAGE)): modules
        for path in SOURCES
        if (modules := set(distributed_modules(path)))
    }
    assert found == DISTRIBUTED


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
        str(path.relative_to(PACKAGE))
        for path in SOURCES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and node.attr in collectives
        if ast.unparse(node.value) not in OURS
    }
    # the last closes groups, by a call that meets no other
    assert callers == {"comm/primitives.py", "comm/thread_groups.py"}


# Mutable objects that modules hold, and why none of them belongs to a run.
KEPT = {
    "comm/mesh.py _numbers": "a count, for names that no other mesh of this process has",
    "comm/mesh.py _alone": "a group of one rank, in which nothing is kept",
    "comm/thread_groups.py _numbers": "a count, for names that no other group of this process has",
    "comm/thread_groups.py _groups": "groups of worlds that are used again, which live to the end",
    "comm/primitives.py _calls": "a count of a thread, of which only differences are read",
    "comm/thread_groups.py _device": "what all simulated groups send by",
    "base/host_copies.py _SOURCES": "what a tensor that lives was copied from, on the host",
    "base/given_batches.py PLACES": "where in its loader a batch that lives stands",
    "base/given_batches.py _COUNTS": "how many samples a batch that lives has",
    "step/synced_batch_norm.py _SPARE": "a number",
    "transforms/schedule/rival_check.py _CHECKS": "the checks of schedulers that live",
    "base/rng.py GENERATORS": "a lock",
    "base/torch_compile.py _is_uncompiled": "whether a thread runs modules uncompiled, while it does",
    "checkpoint/format/manifest.py _form": "what a type is made of",
    "checkpoint/format/manifest.py _hints": "the fields of a class",
    "checkpoint/save.py _VERSION": "the version that is installed",
    "checkpoint/weights/entries.py _has_code": "a fact about a dtype",
    "data/set_epoch.py _LOCK": "a lock",
    "data/set_epoch.py _SHARED": "which epoch a data set that is being read was set to last",
    "data/random_generators.py _LOCK": "a lock",
    "data/streams/read_stream.py _STARTING": "a lock",
    "data/streams/read_stream.py _INFO_LOCK": "a lock",
    "data/seed_samples.py _epoch": "which epoch a sample is read for, while it is",
    "launcher/processes/traceback_lines.py _libraries": "where this Python's libraries are",
    "step/checks/draws.py _place_of_rate": "a fact about an operation of torch",
    "step/checks/draws.py draws_inside": "likewise",
    "step/checks/writes.py _written_by": "likewise",
    "step/checks/writes.py _internal": "a fact about torch's modules",
    "testing/simulation.py _idle": "simulated worlds that wait for the next simulation",
    "testing/simulation.py _lost": "ranks of simulations that failed",
    "testing/simulation.py _exiting": "whether this process ends",
    "testing/seed_turns.py _rank": "which simulated rank a thread is, while it is",
    "observe/log_files.py _LOGS": "the logs that are open, by path: plans that write to one share it",
    "observe/log_files.py _EVENTS": "the files of events that are open, by path",
    "observe/log_files.py _quoted": "names as JSON has them",
    "observe/over_loader.py _NOTHING": "rows of no shapes",
    "observe/recorder.py _IMPORTED": "when this process imported the file",
    "step/checks/graph.py _BUILT": "the parameters of all steps, which a loss of another one may reach",
    "transforms/ddp.py _TURNS": "which of the plans over a model has run the last backward",
    "comm/differentiable.py TRAINING": "which loss a thread computes, while it does",
    "comm/zero.py IS_GATHERED": "whether a program has parameters whole, while it does",
}
FIXED_WHEN_MADE = {
    "Averaging",
    "MappingProxyType",
    "ParamSpec",
    "Path",
    "TypeVar",
    "attrgetter",
    "click.Path",
    "itemgetter",
    "logging.getLogger",
    "nullcontext",
    "np.uint64",
    "re.compile",
    "struct.Struct",
    "torch.device",
    "tuple",
    "type",
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
        found |= {f"{path.relative_to(PACKAGE)} {name}" for name in names}
    # A sorted list, a text, code taken from torch.
    facts = {"__init__.py __all__", "__init__.py _STUB", "step/torch_internals.py _WRAPPER"}
    assert found - facts == set(KEPT)


HEAVY = (
    "IPython",
    "torch",
    "click",
    "cloudpickle",
    "deepspeed",
    "ipykernel",
    "libcst",
    "matplotlib",
    "pydantic",
    "rich",
    "safetensors",
    "torchao",
    "tqdm",
    "traitlets",
    "xxhash",
    "yaml",
)


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
        for function in ast.walk(parsed(path))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
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
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                where = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                assert "weights_only" in [each.arg for each in node.keywords], where
