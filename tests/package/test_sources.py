"""Rules of the library's own text: collectives, kept values, imports, errors and waits."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import torch.distributed as dist

import accel_fn as af
from tests.package.sources import PACKAGE, SOURCES, nodes, parsed

# Objects of the package, generators or pipes, whose methods are named like collectives.
OURS = ("primitives", "self", "super()", "channel", "connection", "mean", "reader", "writer")


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
    assert callers == {"primitives.py", "groups.py"}


# Mutable objects that modules hold, and why none of them belongs to a run.
KEPT = {
    "_numbers": "a count, for names that no other mesh of this process has",
    "_alone": "a group of one rank, in which nothing is kept",
    "_silent_group": "a group that sends nothing, in which nothing is kept",
    "_groups": "groups of worlds that are used again, which live to the end",
    "_calls": "a count of a thread, of which only differences are read",
    "_device": "what all simulated groups send by",
    "_SOURCES": "what a tensor that lives was copied from, on the host",
    "PLACES": "where in its loader a batch that lives stands",
    "_COUNTS": "how many samples a batch that lives has",
    "_SPARE": "a number",
    "_CHECKS": "the checks of schedulers that live",
    "GENERATORS": "a lock",
    "_making": "whether a thread makes a model without values, while it does",
    "_watch_registrations": "that torch calls a function of ours",
    "_is_uncompiled": "whether a thread runs modules uncompiled, while it does",
    "_form": "what a type is made of",
    "_FORWARD": "whether a thread runs a block of a sequence, while it does",
    "_over_context": "a class for each class of strategies",
    "_register": "that the registries of transformers know an attention",
    "_hints": "the fields of a class",
    "_VERSION": "the version that is installed",
    "_code_of": "a fact about a dtype",
    "_writings": "the files of a model that lives which a thread writes",
    "_LOCK": "a lock",
    "GLOBAL_LOCK": "a lock",
    "_distributed": "permutations, which a size and a seed give",
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
    *(
        "Averaging",
        "Kind",
        "MappingProxyType",
        "ParamSpec",
        "Path",
        "TypeVar",
        "attrgetter",
        "click.Path",
    ),
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
    *("rich", "safetensors", "torchao", "tqdm", "traitlets", "transformers", "xxhash", "yaml"),
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


CLASSES = {*af.errors.__all__}


# Errors of others that the package raises, and why.
FOREIGN = {
    "SignalException": "as torch's agent expects of a handler",
    "StopIteration": "the end of an iterator",
    "AttributeError": "what Python expects for a name that a module does not have",
    "ValueError": "caught where a manifest is read: a CheckpointError",
    "click": "the command line's own errors, which click prints",
    "dist.DistStoreError": "as torch's stores raise it; caught where ranks meet",
    "pickle.PicklingError": "caught by gather: a BatchError",
    "CannotReplayError": "caught by the comparison of a loss, of which it is the reason",
    "RuntimeError": "an error of the user's data set, as torch raises it again",
    "EOFError": "as a pipe raises it whose writer is gone",
    "TypeError": "caught where an optimizer is compiled: a PlanError",
    "SystemExit": "the end of the process",
}


def raised_names(path):
    """List the names after `raise` in a file, without variables that hold a caught error."""
    for node in nodes(path, ast.Raise):
        call = node.exc
        if call is not None:
            name = ast.unparse(call.func if isinstance(call, ast.Call) else call)
            is_variable = not isinstance(call, ast.Call) and name.islower()
            is_conditional = isinstance(call, ast.IfExp)
            if not (is_variable or is_conditional):
                yield name


def functions_that_make_errors():
    """List the functions whose annotation promises one of our errors."""
    for path in SOURCES:
        for node in nodes(path, ast.FunctionDef):
            if ast.unparse(node.returns or node.args) in CLASSES:
                yield node.name


def test_every_error_that_is_raised_on_purpose_is_ours():
    ours = {*CLASSES, *functions_that_make_errors()}
    found = {
        "click" if name.startswith("click.") else name
        for path in SOURCES
        for name in raised_names(path)
        # private: of its module
        if name.removeprefix("self.") not in ours and not name.startswith("_")
    }
    again = {"failure.kind", "type(error)", "failures.pop", "error", "ending.error"}
    assert found - again <= FOREIGN.keys()


def test_no_class_of_errors_stands_anywhere_else():
    found = {
        node.name
        for path in SOURCES
        if path != PACKAGE / "errors.py"
        for node in nodes(path, ast.ClassDef)
        if not node.name.startswith("_")
        if any(ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases)
    }
    # one is never raised, but the cause of another error; one never leaves the comparison
    assert found == {"RankTraceback", "CannotReplayError"}


ROOT = Path(__file__).parents[2]


PAGE = (ROOT / "docs/waits.md").read_text()


ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| `")
]


WAITS = {"wait", "result", "acquire", "synchronize", "flock", "sleep", "communicate"}


def waits(path):
    """Whether a file calls what waits: a wait, a join of a thread or a process, a queue's get."""
    for node in nodes(path, ast.Call):
        if not isinstance(node.func, ast.Attribute):
            continue
        name, of = node.func.attr, ast.unparse(node.func.value)
        joins = name == "join" and re.search(r"thread|process|worker|writing|reader|self$", of)
        gets = name == "get" and re.search(r"ready|endings|queue$", of)
        if name in WAITS or joins or gets:
            return True
    return False


def test_each_file_that_waits_has_a_row():
    waiting = {f"{path.relative_to(PACKAGE)}" for path in SOURCES if waits(path)}
    assert waiting - {file for row in ROWS for file in re.findall(r"`(.+?\.py)`", row[0])} == set()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_files_and_tests_of_a_row_exist(row):
    files, ended, tests = row
    assert ended
    for file in re.findall(r"`(.+?\.py)`", files):
        assert (ROOT / "accel_fn" / file).exists()
    named = re.findall(r"`(.+?)::(.+?)`", tests)
    assert named
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text()
