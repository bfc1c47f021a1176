"""The syntax tree of a script: its text, its names, and their places."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

import libcst as cst
from libcst.metadata import (
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    QualifiedNameProvider,
)

Loop: TypeAlias = cst.For | cst.While
Span = tuple[int, int]
Edit = tuple[int, int, str]
"""The beginning and the end of a part of the source, and the new text."""


class Source:
    """The syntax tree of a script. The questions that it answers need no knowledge of any library."""

    def __init__(self, wrapper: MetadataWrapper) -> None:
        self.module = wrapper.module
        self.text = wrapper.module.code
        self.parents = wrapper.resolve(ParentNodeProvider)
        self.positions = wrapper.resolve(PositionProvider)
        self._qualified = wrapper.resolve(QualifiedNameProvider)
        self._nodes = list(walk(self.module))
        self._calls = [node for node in self._nodes if isinstance(node, cst.Call)]

    def code(self, node: cst.CSTNode) -> str:
        """Return the source of a node, on one line."""
        if isinstance(node, cst.Name) and not node.lpar:
            return str(node.value)
        return joined(self.module.code_for_node(node).splitlines())

    def line(self, node: cst.CSTNode) -> int:
        """Return the number of a node's first line."""
        return int(self.positions[node].start.line)

    def head(self, node: cst.CSTNode) -> str:
        """Return the first line of a compound statement."""
        return str(self.module.code_for_node(node)).strip().splitlines()[0].rstrip(":")

    def span(self, node: cst.CSTNode) -> Span:
        """Return where the source of a node begins and ends."""
        where = self.positions[node]
        first, end = (self._offsets[at.line] + at.column for at in (where.start, where.end))
        return first, end

    @cached_property
    def _offsets(self) -> list[int]:
        """Return the offsets at which lines begin, by line number."""
        lines = self.text.splitlines(keepends=True)
        return [0, *accumulate(map(len, lines), initial=0)]

    def edited(self, node: cst.CSTNode, edits: Iterable[Edit]) -> str:
        """Return the source of a node with these edits. Skip an edit that lies inside another one."""
        start, end = self.span(node)
        at = self.positions[node].start.column
        text, done = " " * at, start
        for first, last, new in sorted(edits, key=lambda edit: (edit[0], -edit[1])):
            if first >= done:
                text += self.text[done:first] + new
                done = last
        return textwrap.dedent(text + self.text[done:end]).strip()

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes that enclose a node, the innermost first."""
        while not isinstance(node, cst.Module):
            node = self.parents[node]
            yield node

    def loop_around(self, node: cst.CSTNode) -> Loop | None:
        """Return the innermost loop around a node."""
        return next((each for each in self.ancestors(node) if isinstance(each, Loop)), None)

    def function_around(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """Return the innermost function around a node."""
        around = self.ancestors(node)
        return next((each for each in around if isinstance(each, cst.FunctionDef)), None)

    def function_name(self, node: cst.CSTNode) -> str:
        """Return the name of the function around a node; "" for the module."""
        function = self.function_around(node)
        return "" if function is None else str(function.name.value)

    def _branch(self, node: cst.CSTNode) -> str:
        """Return the condition of the innermost `if` around a node in its function; "" without one."""
        child = node
        for each in self.ancestors(node):
            if isinstance(each, cst.FunctionDef):
                break
            if isinstance(each, cst.If | cst.IfExp) and child is not each.test:
                test = self.code(each.test)
                return f"not ({test})" if child is each.orelse else test
            child = each
        return ""

    def stands_for_itself(self, node: cst.CSTNode) -> bool:
        """Return whether a node is an expression, not only the name of an attribute or of an argument."""
        parent = self.parents[node]
        is_part = isinstance(parent, cst.Attribute) and node is parent.attr
        return not is_part and not (isinstance(parent, cst.Arg) and node is parent.keyword)

    @cached_property
    def _assigned(self) -> dict[str, cst.BaseExpression]:
        """Return the value of each assignment, by the source of its target, such as `a, b`."""
        return {
            self.code(target.target): node.value
            for node in self._nodes
            if isinstance(node, cst.Assign)
            for target in node.targets
        }

    def maker(self, name: str) -> str:
        """Return the function whose result a name holds; "" if its value is not a call."""
        value = self._assigned.get(name)
        return self.code(value.func) if isinstance(value, cst.Call) else ""

    def assigns(self, name: str) -> bool:
        """Return whether the script has a variable of this name."""
        return any(
            name in re.findall(r"[\w.]+", self.code(each.target))
            for each in self._nodes
            if isinstance(each, cst.AssignTarget | cst.For | cst.AugAssign)
        )

    def names_in_making(self, name: str) -> set[str]:
        """Return the source of each node in the expression that makes an object, such as its variables."""
        made = self._assigned.get(name)
        return {self.code(each) for each in walk(made)} if made is not None else set()

    @cached_property
    def _calls_on(self) -> dict[str, list[cst.Call]]:
        """Return the calls of methods, by the object that they are called on."""
        found: dict[str, list[cst.Call]] = {}
        for call in self._calls:
            if isinstance(call.func, cst.Attribute):
                found.setdefault(self.code(call.func.value), []).append(call)
        return found

    def _methods_of(self, name: str) -> set[str]:
        calls = self._calls_on.get(name, [])
        return {each.func.attr.value for each in calls if isinstance(each.func, cst.Attribute)}


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield a node and all nodes in it, in order, except names in imports."""
    yield node
    if not isinstance(node, cst.Import | cst.ImportFrom):
        for child in node.children:
            yield from walk(child)


def last(name: str) -> str:
    """Return the last part of a dotted name."""
    return name.rpartition(".")[2]


def joined(lines: Iterable[str]) -> str:
    """Join the lines of a statement or expression to one line."""
    return " ".join(each.strip() for each in lines).replace("( ", "(").strip()
