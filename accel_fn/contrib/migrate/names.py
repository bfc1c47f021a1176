"""Find the names that a piece of a script reads, assigns, or changes in place."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from accel_fn.contrib.migrate.source import walk

_ASSIGNS = cst.AssignTarget | cst.AnnAssign | cst.AugAssign | cst.NamedExpr | cst.For


def names_in(node: cst.CSTNode | None) -> Iterator[str]:
    """Yield the names of a node: variables, and attributes of self."""
    if isinstance(node, cst.Name):
        yield node.value
    elif isinstance(node, cst.Attribute):
        if isinstance(node.value, cst.Name) and node.value.value == "self":
            yield f"self.{node.attr.value}"
        else:
            yield from names_in(node.value)
    elif isinstance(node, cst.Arg):
        # The keyword names a parameter of the called function, not a variable.
        yield from names_in(node.value)
    elif isinstance(node, cst.BaseComp | cst.Lambda):
        own = {
            name
            for each in walk(node)
            if isinstance(each, cst.CompFor | cst.Param)
            for name in names_in(each.target if isinstance(each, cst.CompFor) else each.name)
        }
        yield from (name for child in node.children for name in names_in(child) if name not in own)
    elif node is not None:
        for child in node.children:
            yield from names_in(child)


def writes(node: cst.CSTNode) -> Iterator[str]:
    """Yield the names that a statement assigns or changes in place."""
    for each in walk(node):
        if isinstance(each, _ASSIGNS):
            yield from _targets(each.target)
        elif isinstance(each, cst.Expr) and isinstance(each.value, cst.Call):
            function = each.value.func
            if isinstance(function, cst.Attribute) and function.attr.value.endswith("_"):
                yield from _targets(function.value)


def _targets(node: cst.CSTNode) -> Iterator[str]:
    """Yield the names in a target; only `a` for `a[i]` and `a.b`."""
    if isinstance(node, cst.Subscript):
        yield from _targets(node.value)
    else:
        yield from names_in(node)


def reads(node: cst.CSTNode) -> Iterator[str]:
    """Yield the names that a statement reads."""
    if isinstance(node, cst.Assign):
        yield from names_in(node.value)
        for each in node.targets:
            if isinstance(each.target, cst.Subscript | cst.Attribute):
                yield from names_in(each.target)
    else:
        yield from names_in(node)
