"""Mutants drawn by a seed over all files: an operator, condition, constant, statement or argument changed."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
ARITHMETIC = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.Pow: "*",
    ast.BitOr: "&",
    ast.BitAnd: "|",
}
NO_CODE = (
    "__init__.py",
)  # a lazy table of names, which tests of the package compare with its stub


@dataclass(frozen=True)
class Drawn:
    """A change of one file of the library: bytes `start` to `end` become `new`."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    new: str

    def planted(self, source: bytes) -> bytes:
        """The file with this bug."""
        return source[: self.start] + self.new.encode() + source[self.end :]

    def shown(self, source: bytes) -> str:
        """Before and after, in one line."""
        old = " ".join(source[self.start : self.end].decode().split())
        return f"{old[:60]} -> {self.new[:60]}"


def draw(root: Path, seed: int, number: int) -> list[Drawn]:
    """Draw this many changes, each as likely as any other."""
    every = [
        each
        for path in sorted(root.rglob("*.py"))
        if path.name not in NO_CODE
        for each in changes(path.relative_to(root).as_posix(), path.read_bytes())
    ]
    return random.Random(seed).sample(every, min(number, len(every)))


def changes(file: str, source: bytes) -> Iterator[Drawn]:
    """All changes of a file."""
    text = _Text(source)
    for node in _code(ast.parse(source)):
        for kind in KINDS:
            for name, start, end, new in kind(node, text):
                yield Drawn(file, node.lineno, name, start, end, new)  # type: ignore[attr-defined]


class _Text:
    """Where the nodes of a file stand in its bytes."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        lines = source.splitlines(keepends=True)
        self._starts = [0, *accumulate(map(len, lines))]

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def of(self, node: ast.expr) -> str:
        return self.source[slice(*self.span(node))].decode()


Change = tuple[str, int, int, str]


def _comparisons(node: ast.AST, text: _Text) -> Iterator[Change]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = text.of(node.left), text.of(node.comparators[0])
        new = f"({left} {COMPARISONS[type(node.ops[0])]} {right})"
        yield "comparison", *text.span(node), new


def _operators(node: ast.AST, text: _Text) -> Iterator[Change]:
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        new = f"({text.of(node.left)} {ARITHMETIC[type(node.op)]} {text.of(node.right)})"
        yield "operator", *text.span(node), new
    elif isinstance(node, ast.BoolOp):
        other = " or " if isinstance(node.op, ast.And) else " and "
        new = other.join(f"({text.of(each)})" for each in node.values)
        yield "operator", *text.span(node), f"({new})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "operator", *text.span(node), text.of(node.operand)


def _conditions(node: ast.AST, text: _Text) -> Iterator[Change]:
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "condition", *text.span(node.test), f"(not ({text.of(node.test)}))"


def _constants(node: ast.AST, text: _Text) -> Iterator[Change]:
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield "constant", *text.span(node), repr(not node.value)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield "constant", *text.span(node), repr(node.value + 1)  # type: ignore[operator]


def _statements(node: ast.AST, text: _Text) -> Iterator[Change]:
    """Calls for their effect, waits for collectives among them, sums in place, and results."""
    if isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
    ):
        yield "statement", *text.span(node), "pass"
    elif isinstance(node, ast.Return) and node.value and text.of(node.value) != "None":
        yield "statement", *text.span(node), "return None"


def _arguments(node: ast.AST, text: _Text) -> Iterator[Change]:
    if isinstance(node, ast.Call) and len(node.args) > 1:
        first, second = node.args[:2]
        if ast.Starred not in map(type, node.args) and text.of(first) != text.of(second):
            (start, begin), (end, stop) = text.span(first), text.span(second)
            between = text.source[begin:end].decode()
            yield "arguments", start, stop, text.of(second) + between + text.of(first)


KINDS = (_comparisons, _operators, _conditions, _constants, _statements, _arguments)


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a file that run: no annotations, no docstrings, no texts of errors, no type checks."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Raise | ast.JoinedStr | ast.Assert | ast.arg):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.AnnAssign):
            if child.value is not None:
                yield child.value
                yield from _code(child.value)
            continue
        if isinstance(child, ast.FunctionDef) and child.returns is not None:
            child.returns = None
        yield child
        yield from _code(child)
