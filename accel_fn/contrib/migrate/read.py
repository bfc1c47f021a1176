"""Read a script that uses accelerate, without running it: its lines, and their replacements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

from accel_fn.contrib.migrate.facts import Facts, joined, walk
from accel_fn.contrib.migrate.table import DIFFERENCES, TABLE
from accel_fn.errors import ArgumentError, message

_FIRST = (
    "place",
    "with_amp",
    "compiled",
    "wrap_ddp",
    "wrap_fsdp",
    "wrap_deepspeed",
    "local_sgd",
    "accumulate",
)
"""The first transforms of the recipe; other transforms follow in the script's order."""
_LONGEST = 60
"""The most characters of an argument in a replacement."""


@dataclass(frozen=True)
class Use:
    """A name of accelerate in a line, and its replacement."""

    name: str
    replacement: str | None
    """The code in place of the name; None if the name goes, "" if the line stays."""
    part: str = ""
    """The part of the line that is replaced; empty for the whole line."""
    why: str = ""
    differences: tuple[int, ...] = ()
    is_known: bool = True


@dataclass
class Line:
    """A statement of the script, or the head of a compound one."""

    number: int
    source: str
    num_lines: int
    uses: list[Use] = field(default_factory=list)

    @property
    def goes(self) -> bool:
        """Whether the line goes without a replacement."""
        return all(use.is_known and use.replacement is None and not use.part for use in self.uses)


@dataclass(frozen=True)
class Script:
    """The replacements for a script that uses accelerate, line by line, and its recipe."""

    lines: list[Line]
    recipe: list[str]
    num_lines: int

    @property
    def num_replaced(self) -> int:
        """The number of lines with a replacement."""
        return sum(
            line.num_lines for line in self.lines if any(use.replacement for use in line.uses)
        )

    @property
    def num_going(self) -> int:
        """The number of lines that go without a replacement."""
        return sum(line.num_lines for line in self.lines if line.goes)


def read_script(path: Path) -> Script:
    """Read a script; refuse one that is not Python, or that does not use accelerate."""
    try:
        module = cst.parse_module(path.read_bytes())
    except cst.ParserSyntaxError as error:
        got = f"{path}, whose line {error.raw_line} is not"
        raise ArgumentError(f"migrate: script must be Python, got {got}") from None
    except (UnicodeDecodeError, SyntaxError, LookupError) as error:
        raise ArgumentError(f"migrate: script must be text, got {path}: {error}") from None
    reader = _Reader(module)
    if not reader.facts.imports_accelerate:
        repair = "programs of other libraries have guides: docs/from-ddp.md, docs/from-fabric.md"
        raise ArgumentError(message("migrate", "script", "import accelerate", str(path), repair))
    reader.read()
    return Script(
        [reader.lines[number] for number in sorted(reader.lines)],
        _recipe(reader.transforms),
        len(module.code.splitlines()),
    )


def _recipe(found: list[str]) -> list[str]:
    """Return the transforms of the recipe, each once, in an order that reads well."""
    names = {_name(each) for each in found}
    wraps = [] if names & {"wrap_fsdp", "wrap_deepspeed", "local_sgd"} else ["af.wrap_ddp()"]
    transforms = dict.fromkeys(["af.place()", *wraps, *found])
    return sorted(
        transforms,
        key=lambda each: _FIRST.index(_name(each)) if _name(each) in _FIRST else len(_FIRST),
    )


def _name(transform: str) -> str:
    return transform.removeprefix("af.").partition("(")[0]


class _Arguments(dict[str, str]):
    """The arguments of a call by name; a missing or long argument reads as three dots."""

    def __missing__(self, name: str) -> str:
        return "..."

    def __getitem__(self, name: str) -> str:
        value = super().__getitem__(name)
        return value if len(value) <= _LONGEST else "..."


class _Reader:
    """Goes through a script once, and finds its lines and the transforms of its recipe."""

    def __init__(self, module: cst.Module) -> None:
        wrapper = MetadataWrapper(module)
        self.positions = wrapper.resolve(PositionProvider)
        self.parents = wrapper.resolve(ParentNodeProvider)
        self.facts = Facts(wrapper)
        self.source = module.code.splitlines()
        self.lines: dict[int, Line] = {}
        self.transforms: list[str] = []

    def read(self) -> None:
        for node in walk(self.facts.module):
            if isinstance(node, cst.Import | cst.ImportFrom):
                if self.facts.is_of_accelerate(node):
                    self._add_use(node, "import", goes=bool(self.lines))
            elif isinstance(node, cst.For):
                self._read_loop(node)
            elif isinstance(node, cst.If) and node in self.facts.counting_ifs:
                self._add_use(node, "count", goes=True)
            elif isinstance(node, cst.Assign):
                self._read_assignment(node)
            elif isinstance(node, cst.Call) and self.facts.makes_loader(node):
                self._read_loader(node)
            elif isinstance(node, cst.Attribute | cst.Name):
                self._read_name(node)

    def _read_name(self, node: cst.Attribute | cst.Name) -> None:
        function = self.facts.name_in_accelerate(node)
        if function is not None:
            self._read_function(node, function)
        elif isinstance(node, cst.Attribute) and self.facts.is_accelerator(node.value):
            self._read_member(node, node.attr.value)
        elif isinstance(node, cst.Attribute):
            self._read_prepared(node)
        elif self.facts.is_accelerator(node) and self._stands_alone(node):
            self._add_use(node, "accelerator")

    def _read_function(self, node: cst.CSTNode, name: str) -> None:
        """Add the use of a class or function of accelerate, with the arguments of its call."""
        around = list(self._up_to_statement(node))
        if any(isinstance(each, cst.Annotation) for each in around):
            parameters = [each for each in around if isinstance(each, cst.Param)]
            self._add_use(parameters[0] if parameters else node, "annotation")
            return
        self._add_use(node, name)
        call = self.parents[node]
        if name != "Accelerator" or not isinstance(call, cst.Call):
            return
        for argument in call.args:
            if argument.keyword is None:
                self._add_use(node, f"Accelerator({self.facts.code(argument).rstrip(', ')})")
            else:
                self._add_use(argument, f"Accelerator({argument.keyword.value})")

    def _read_member(self, node: cst.Attribute, name: str) -> None:
        """Add the use of an attribute or method of the accelerator."""
        call = self.parents[node]
        if name == "prepare" and isinstance(call, cst.Call):
            self._read_prepare(node, call)
        elif name == "gather" and isinstance(call, cst.Call) and self._known_figure(call):
            self._add_use(node, f"accelerator.gather({self._known_figure(call)})")
        elif name == "reduce" and re.search("[\"']mean[\"']", self.facts.code(call)):
            self._add_use(node, "accelerator.reduce(mean)")
        elif name in ("gather", "gather_for_metrics") and self.facts.evaluates(node):
            self._add_use(node, "accelerator.gather_for_metrics(in a loop)")
        elif name == "autocast" and self.facts.trains(node):
            self._add_use(node, "accelerator.autocast(in a loop)")
        elif name == "device" and self._only_moves(node):
            self._add_use(node, "move", goes=True)
        else:
            self._add_use(node, f"accelerator.{name}")

    def _known_figure(self, call: cst.Call) -> str:
        """Return the field of the report that a call gathers; empty if no report has it."""
        text = self.facts.code(call)
        return next((name for name in ("loss", "grad_norm") if name in text), "")

    def _read_prepare(self, node: cst.Attribute, call: cst.Call) -> None:
        names = [self.facts.code(each.value) for each in call.args if not each.star]
        kinds = {
            kind: [name for name in names if self.facts.kind(name) == kind]
            for kind in ("model", "optimizer", "loader", "scheduler")
        }
        if kinds["model"] or not names:
            values = {kind: found[0] for kind, found in kinds.items() if found}
            self._add_use(node, "accelerator.prepare(model)", values)
        if len(kinds["model"]) > 1:
            self._add_use(node, "accelerator.prepare(models)")
        for name in kinds["loader"]:
            self._add_use(node, "accelerator.prepare(loader)", {"loader": name})
        for name in kinds["scheduler"]:
            of_epochs = " of epochs" if name in self.facts.schedulers_of_epochs else ""
            self._add_use(node, f"accelerator.prepare(scheduler{of_epochs})", {"scheduler": name})

    def _read_prepared(self, node: cst.Attribute) -> None:
        """Add the call of a method of the model, the optimizer, a loader or a scheduler."""
        name = self.facts.code(node.value)
        key = f"{self.facts.kinds.get(name)}.{node.attr.value}"
        if key == "scheduler.step" and name in self.facts.schedulers_of_epochs:
            key = "scheduler.step(epoch)"
        if key in TABLE:
            self._add_use(node, key, {"name": name})

    def _read_loop(self, node: cst.For) -> None:
        """Add the use of a loop that trains, goes over epochs, or evaluates."""
        loader = self.facts.training_loops.get(node)
        if loader is not None:
            head = self.facts.code(node.iter)
            over = re.sub(rf"\b{re.escape(loader)}\b", "epoch", head)
            counts = over.startswith("enumerate(")
            count = self.facts.code(node.target).split(",")[0] if counts else ""
            key = "loader.loop(step)" if count == "step" else "loader.loop"
            target = f"{count.replace('step', 'index')}, batch" if counts else "batch"
            self._add_use(node, key, {"target": target, "iter": over})
        elif node in self.facts.epoch_loops and isinstance(node.iter, cst.Call):
            count = self.facts.code(node.iter.args[-1].value) if node.iter.args else "..."
            since = ", since=state" if self.facts.resumes else ""
            self._add_use(node, "loader.epochs", {"num_epochs": count + since})
        elif node in self.facts.evaluation_loops:
            self._add_use(node, "loader.evaluation", {"loader": self.facts.evaluation_loops[node]})

    def _read_assignment(self, node: cst.Assign) -> None:
        """Add the use of a line that computes the loss, or divides it by an update's batches."""
        if node in self.facts.losses:
            self._add_use(node, "loss", {"value": self.facts.code(node.value)})
        elif node in self.facts.divisions:
            numbers = (self.facts.num_microbatches, "accelerator.gradient_accumulation_steps")
            known = self.facts.divisions[node] in numbers
            self._add_use(node, "divide" if known else "divide(by another number)")

    def _read_loader(self, node: cst.Call) -> None:
        """Add the use of a loader that the script trains on, where it is made."""
        has_size = any(each.keyword and each.keyword.value == "batch_size" for each in node.args)
        accumulated = has_size and self.facts.num_microbatches
        self._add_use(node.func, "loader(accumulated)" if accumulated else "loader")

    def _add_use(
        self,
        node: cst.CSTNode,
        key: str,
        values: Mapping[str, str] | None = None,
        *,
        goes: bool = False,
    ) -> None:
        """Add the replacement of a name."""
        line = self._line(node)
        found = "is_*_available" if re.fullmatch(r"is_\w+_available", key) else key
        row = TABLE.get(found)
        if row is None:
            line.uses.append(Use(key, None, self._shown(node), is_known=False))
            return
        if row.why and any(use.why == row.why for use in line.uses):
            return
        filled = _Arguments({**self.facts.values, **self._arguments(node, row.arguments)})
        filled.update(values or {})
        replacement = row.replacement
        if replacement is not None:
            replacement = None if goes else replacement.format_map(filled)
        part = "" if goes or self._is_whole(node, replacement) else self._shown(node)
        differences = tuple(
            number
            for number in row.differences
            if DIFFERENCES[number].only_if in {"", *self.facts.traits}
        )
        line.uses.append(Use(key, replacement, part, row.why.format_map(filled), differences))
        if row.transform:
            self.transforms.append(row.transform.format_map(filled))

    def _arguments(self, node: cst.CSTNode, names: str) -> dict[str, str]:
        """Return the arguments of a call by name; for a constructor's argument, this one alone."""
        if isinstance(node, cst.Arg) and node.keyword is not None:
            return {node.keyword.value: self.facts.code(node.value)}
        call = self.parents[node]
        if not isinstance(call, cst.Call):
            return {}
        positional = [each for each in call.args if each.keyword is None and not each.star]
        found = {
            name: self.facts.code(each.value)
            for name, each in zip(names.split(), positional, strict=False)
        }
        for each in call.args:
            if each.keyword is not None:
                found[each.keyword.value] = self.facts.code(each.value)
        found["all"] = ", ".join(self.facts.code(each).rstrip(", ") for each in call.args)
        return found

    def _up_to_statement(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes around a node, up to its statement or decorator."""
        while not isinstance(node, cst.BaseStatement | cst.Decorator | cst.Module):
            node = self.parents[node]
            yield node

    def _line(self, node: cst.CSTNode) -> Line:
        statement = [node, *self._up_to_statement(node)][-1]
        where = self.positions[statement]
        number, end = where.start.line, where.end.line
        if isinstance(statement, cst.BaseCompoundStatement):
            end = number
        text = joined(self.source[number - 1 : end])
        return self.lines.setdefault(number, Line(number, text, end - number + 1))

    def _is_whole(self, node: cst.CSTNode, replacement: str | None) -> bool:
        """Return whether the statement is only this name, so that all of it is replaced."""
        if isinstance(node, cst.Arg | cst.Param):
            return False
        if isinstance(node, cst.Import | cst.ImportFrom | cst.For | cst.Assign):
            return True
        for each in self._up_to_statement(node):
            if isinstance(each, cst.With) and len(each.items) > 1:
                return False
            if isinstance(each, cst.BaseCompoundStatement) and replacement is not None:
                return False
            is_part = isinstance(each, cst.BaseExpression | cst.Arg | cst.Decorator | cst.Param)
            if is_part and not isinstance(each, cst.Call):
                return False
        return True

    def _shown(self, node: cst.CSTNode) -> str:
        text = self.facts.code(node).rstrip(", ")
        call = self.parents[node]
        if isinstance(call, cst.Call) and node is call.func:
            text += "(...)" if call.args else "()"
        return text

    def _stands_alone(self, node: cst.Name) -> bool:
        """Return whether the accelerator itself is passed on here."""
        parent = self.parents[node]
        if isinstance(parent, cst.Arg):
            call = self.parents[parent]
            known = isinstance(call, cst.Call) and self.facts.name_in_accelerate(call.func)
            return node is not parent.keyword and not known
        return isinstance(parent, cst.Param) and parent.annotation is None

    def _only_moves(self, node: cst.Attribute) -> bool:
        """Return whether the line only moves a variable to the device: `x = x.to(device)`."""
        call = self.parents[self.parents[node]]
        if not isinstance(call, cst.Call) or not isinstance(call.func, cst.Attribute):
            return False
        around = self.parents[call]
        moved = self.facts.code(call.func.value)
        if isinstance(around, cst.Assign):
            return self.facts.code(around.targets[0].target) == moved
        return isinstance(around, cst.Expr)
