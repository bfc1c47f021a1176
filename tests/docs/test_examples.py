"""The tests run every example in README.md, in docs/ and in the docstrings, unchanged."""

from __future__ import annotations

import doctest
import importlib
import operator
import re
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sybil import Document
from sybil.parsers.myst import PythonCodeBlockParser
from torch import nn

import accel_fn as af
from tests.support.compilers import MARKS

ROOT = Path(__file__).parents[2]
LONG = "launching", "recipes", "choosing-a-mesh", "contrastive", "sharing"
DEAR = {"precision.md": MARKS, **{f"{name}.md": [pytest.mark.slow] for name in LONG}}
"""Pages that compile graphs, start many processes or train for seconds."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture(autouse=True)
def errors_with_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare errors with their notes: early releases of Python 3.11 compare only the last line."""

    def joined(*error: Any) -> list[str]:
        return ["".join(traceback.format_exception_only(*error))]

    monkeypatch.setattr(
        doctest,
        "traceback",
        SimpleNamespace(**{**vars(traceback), "format_exception_only": joined}),
    )


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=DEAR.get(page.name, [])) for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_python_blocks_of_a_page_run_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for example in Document.parse(str(page), PythonCodeBlockParser(doctest_optionflags=FLAGS)):
        example.evaluate()


def modules_with_examples() -> list[object]:
    """The names of modules whose text has examples: to import all takes seconds in each worker."""
    package = Path(af.__file__).parent
    paths = sorted(path for path in package.rglob("*.py") if ">>> " in path.read_text("utf-8"))
    names = [".".join(path.relative_to(package.parent).with_suffix("").parts) for path in paths]
    # What starts processes, and what imports a trainer.
    long = {name for name in names if name.endswith((".function.launch", ".transformers"))}
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in long)) for name in names]


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_of_docstrings_print_what_they_say(name: str) -> None:
    """Each docstring gets a fresh model, optimizer, batch and loss, which the examples do not
    define."""
    module = importlib.import_module(name.removesuffix(".__init__"))
    output: list[str] = []
    for test in doctest.DocTestFinder().find(module, globs={}):
        test.globs = namespace()
        doctest.DocTestRunner(optionflags=FLAGS).run(test, out=output.append)
    assert not output, "".join(output)


def namespace() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(4, 1)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return F.mse_loss(model(inputs), targets)

    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "batch": (torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)),
        "loss_fn": loss_fn,
    }


def test_no_python_stands_in_a_block_that_is_not_run() -> None:
    """The exceptions need a folder that accelerate wrote, which contrib/accelerate makes,
    are what a command prints, which test_guides.py runs, or start a job of SageMaker, of which
    test_where_to_run_page.py runs what it can."""
    assert [(page.name, text) for page in PAGES for text in not_run(page)] == []


def not_run(page: Path) -> list[str]:
    """Return the blocks of Python of a page that no test runs."""
    fences = re.findall(
        r"^ *```(\S+)\n(.*?)^ *```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    with_diffs = (
        *("README.md", "seeing-a-run.md", "choosing-a-mesh.md", "larger-models.md"),
        "scaling-up.md",
    )
    diffs_run = page.name in with_diffs or page.name.startswith("from-")
    run = {"python", "{eval-rst}", "diff" if diffs_run else "python"}
    texts = [text for language, text in fences if language not in run]
    python = re.compile(r"^(import |from \S+ import |.*= af\.)", re.MULTILINE)
    exceptions = ("load_accelerate", "$ accel-fn migrate", "from sagemaker")
    return [text for text in texts if python.search(text) and not any(map(text.count, exceptions))]


def side(diff: str, sign: str) -> str:
    """Return one side of a diff: the lines of both sides, and those with this sign."""
    lines = diff.splitlines()
    return "".join(f"{line[1:]}\n" for line in lines if line[:1] in ("", " ", sign))


def test_lines_to_write_for_a_larger_model_stand_in_the_program_of_the_page() -> None:
    text = (ROOT / "docs" / "larger-models.md").read_text(encoding="utf-8")
    [change] = re.findall(r"^```diff\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    program = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[0]
    assert side(change, "+") in program


SUBMODULES = ("checkpoint", "contrib.estimate", "data", "errors", "extend", "launcher", "testing")


def test_every_public_name_is_in_the_reference() -> None:
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    tables = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    documented = re.findall(r"^   ~?([\w.]+)$", tables, re.MULTILINE)
    assert len(documented) == len(set(documented))
    below = {
        f"{name}.{each}" for name in SUBMODULES for each in operator.attrgetter(name)(af).__all__
    }
    aliases = {"errors.AccelError", "testing.strategies"}
    assert {*af.__all__, *below} - aliases <= set(documented)
    assert {each for each in documented if "." not in each} == set(af.__all__)


def test_every_class_of_error_is_in_troubleshooting() -> None:
    """Each class is in the table that autosummary fills, and has a section of its own."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    classes = {*af.errors.__all__} - {"AccelError"}
    assert set(re.findall(r"^   (\w+)$", text, re.MULTILINE)) == classes
    assert set(re.findall(r"^### (\w+Error)$", text, re.MULTILINE)) == classes


def test_files_that_pages_name_exist() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", text))
    assert len(named) > 50
    homes = ROOT, ROOT / "tests", ROOT / "accel_fn"
    assert not [name for name in named if not any((home / name).is_file() for home in homes)]
