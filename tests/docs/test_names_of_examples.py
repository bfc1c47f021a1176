"""No program under examples/ uses a name that the reference and a page of prose do not explain."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

import accel_fn as af
from accel_fn.testing import internals

ROOT = Path(__file__).parents[2]
LISTS = re.compile(r"api|architecture|benchmarks|differences|examples|from-\w+|mutants|next-steps")
"""Pages that list names, or compare them with those of other libraries, and explain none."""
OBJECTS: dict[str, tuple[type, ...]] = {
    "checkpoint": (af.checkpoint.Checkpoint,),
    "epoch": (af.Epoch, internals.ShownEpoch),
    "grads": (af.Grads,),
    "loader": (af.ShardedLoader,),
    "preemption": (af.Preemption,),
    "report": (af.Report,),
    "state": (af.DistState,),
    "step": (af.Step,),
}
"""The last word of a variable of the examples, and the classes of what it holds."""
REFERENCE = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/api").glob("*.md"))


def inline_code() -> list[str]:
    """The code that stands in sentences and tables of the pages that explain."""
    pages = [page for page in (ROOT / "docs").glob("*.md") if not LISTS.fullmatch(page.stem)]
    texts = (page.read_text(encoding="utf-8") for page in pages)
    prose = (re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE) for text in texts)
    return [code for text in prose for code in re.findall(r"`([^`\n]+)`", text)]


def programs() -> Iterator[ast.Module]:
    """The code of every example."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        yield ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        yield ast.parse("\n".join(each.source for each in cells if each.cell_type == "code"))


CODE = inline_code()
PROGRAMS = list(programs())


def names_used() -> set[str]:
    """Public names: `af.save`, or imported from the package."""
    nodes = [node for program in PROGRAMS for node in ast.walk(program)]
    attributes = [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)]
    modules = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    ours = [node for node in modules if str(node.module).split(".")[0] == "accel_fn"]
    imported = {alias.name for node in ours for alias in node.names}
    return imported | {text[3:] for text in attributes if re.fullmatch(r"af\.\w+", text)}


def members_used() -> set[tuple[str, str]]:
    """Attributes of variables that hold an object of ours, with the word of the variable."""
    nodes = [node for program in PROGRAMS for node in ast.walk(program)]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    named = {(ast.unparse(node.value).split("_")[-1], node.attr) for node in attributes}
    return {(word, name) for word, name in named if word in OBJECTS}


def options_used() -> set[tuple[str, str]]:
    """Keywords that calls of `af.name` give."""
    nodes = [node for program in PROGRAMS for node in ast.walk(program)]
    calls = [(node, ast.unparse(node.func)) for node in nodes if isinstance(node, ast.Call)]
    ours = [(node, name[3:]) for node, name in calls if re.fullmatch(r"af\.\w+", name)]
    return {(name, str(each.arg)) for node, name in ours for each in node.keywords}


def stands_in_prose(pattern: str) -> bool:
    return any(re.search(pattern, code) for code in CODE)


@pytest.mark.parametrize("name", sorted(names_used()))
def test_docs_explain_a_name_of_the_examples(name: str) -> None:
    assert re.search(rf"^\.\. auto\w+:: accel_fn\.(\w+\.)*{name}\b", REFERENCE, re.MULTILINE)
    assert stands_in_prose(rf"(?<![\w.-])(af\.)?{name}\b")


@pytest.mark.parametrize(("word", "name"), sorted(members_used()))
def test_docs_explain_an_attribute_of_the_examples(word: str, name: str) -> None:
    kinds = OBJECTS[word]
    methods = [inspect.getdoc(getattr(kind, name, None)) for kind in kinds]
    fields = [re.search(rf"^ +{name}: ", kind.__doc__ or "", re.MULTILINE) for kind in kinds]
    assert any(methods) or any(fields)
    assert stands_in_prose(rf"(^|\.){name}\b")


@pytest.mark.parametrize(("function", "name"), sorted(options_used()))
def test_docs_explain_an_option_of_the_examples(function: str, name: str) -> None:
    text = inspect.getdoc(getattr(af, function)) or ""
    assert re.search(rf"^ +{name}: ", text, re.MULTILINE)
    assert stands_in_prose(rf"\b{name}(=|$)")
