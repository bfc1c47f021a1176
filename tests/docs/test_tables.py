"""Tables and sentences name what exists: calls of accel_fn and accelerate, extras, programs."""

import ast
import inspect
import io
import operator
import re
import tokenize
import tomllib

import accelerate
import accelerate.logging
import pytest
from accelerate import Accelerator

import accel_fn as af
from tests.support.processes import ROOT
from tests.tools.words import user_pages, without_code

DOCS = ROOT / "docs"
PROGRAMS = sorted((ROOT / "examples").glob("*.py"))


def text_of(page):
    """Return a page without its blocks of code."""
    return without_code((DOCS / page).read_text(encoding="utf-8"))


def trees(text):
    """Parse what stands between backticks; leave out commands and parts of lines."""
    for code in re.findall(r"`([^`]+)`", text):
        line = " ".join(code.split())
        body = " pass" if line.startswith("with ") else ""
        try:
            yield ast.parse(line + body)
        except SyntaxError:
            continue


def is_ellipsis(node):
    return isinstance(node, ast.Constant) and node.value is ...


def misfits(tree):
    """Yield the names and calls in a tree that accel_fn does not have."""
    for node in ast.walk(tree):
        try:
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("af."):
                operator.attrgetter(ast.unparse(node)[3:])(af)
            elif isinstance(node, ast.Call):
                bind(node)
        except (AttributeError, TypeError) as error:
            yield f"{ast.unparse(node)}: {error}"


def bind(call):
    """Bind the arguments of a call of accel_fn to its signature; `...` stands for further ones."""
    written = ast.unparse(call.func)
    name = written.removeprefix("af.")
    if written == name and name not in af.__all__:
        return
    values = [*call.args, *(each.value for each in call.keywords)]
    # A call without `af.` names only the arguments that the sentence is about.
    is_whole = written != name and values and not any(map(is_ellipsis, values))
    signature = inspect.signature(operator.attrgetter(name)(af))
    given = [each for each in call.args if not is_ellipsis(each)]
    options = {each.arg: each.value for each in call.keywords}
    (signature.bind if is_whole else signature.bind_partial)(*given, **options)


@pytest.mark.parametrize("page", user_pages(), ids=lambda page: page.name)
def test_calls_in_sentences_and_tables_fit_the_signatures(page):
    found = [each for tree in trees(text_of(page)) for each in misfits(tree)]
    assert not found


@pytest.mark.parametrize("page", user_pages(), ids=lambda page: page.name)
def test_outputs_on_a_page_have_no_control_characters(page):
    """A program that is run for a page may print colours."""
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", page.read_text(encoding="utf-8"))


OTHERS = {"get_peft_model_state_dict", "len", "parameters", "randn", "step", "tqdm", "zero_grad"}
"""Functions in the column of accelerate that it does not have."""


@pytest.mark.parametrize(
    ("page", "head"), [("from-accelerate.md", "Call by call"), ("differences.md", "Everyday calls")]
)
def test_functions_in_the_column_of_accelerate_are_its_own(page, head):
    table = text_of(page).partition(f"# {head}\n")[2].partition("\n#")[0]
    column = " ".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE))
    names = set(re.findall(r"(\w+)\(", column)) - OTHERS
    homes = Accelerator, accelerate, accelerate.utils, accelerate.logging
    assert len(names) > 10
    assert not [name for name in names if not any(hasattr(home, name) for home in homes)]


def test_the_page_lists_the_extras_and_what_all_leaves_out():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    listed = re.findall(r'^\| `pip install "\.\[(\w+)\]"`', text_of("install.md"), re.MULTILINE)
    assert set(listed) == {name for name, needed in extras.items() if needed}
    [everything] = extras["all"]
    left_out = {*listed} - {"all", "examples"} - {*re.findall(r"\w+", everything)}
    [row] = re.findall(r'^\| `pip install "\.\[all\]"` \| (.*) \|$', text_of("install.md"), re.M)
    assert set(re.findall(r"`(\w+)`", row)) == left_out


def test_every_program_is_on_the_page_of_next_steps():
    listed = set(re.findall(r"^\| `(\w+)\.py` \|", text_of("next-steps.md"), re.MULTILINE))
    assert listed == {path.stem for path in PROGRAMS}


def num_code_lines(path):
    """Count the lines with code: neither comments nor docstrings nor empty ones."""
    source = path.read_text(encoding="utf-8")
    no_code = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*no_code, tokenize.ENDMARKER):
            lines |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(
            node
        ):
            lines -= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    return len(lines)


def test_the_page_of_examples_counts_their_lines():
    rows = re.findall(r"^\| `(\w+)\.py` \| [^|]* \| (\d+) \|", text_of("examples.md"), re.MULTILINE)
    assert len(rows) > 10
    assert {name: int(number) for name, number in rows} == {
        name: num_code_lines(ROOT / "examples" / f"{name}.py") for name, _ in rows
    }
