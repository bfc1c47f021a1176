"""Read a script that uses accelerate, without running it: its lines, and their replacements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper

from accel_fn.contrib.migrate.facts import Facts
from accel_fn.contrib.migrate.loops import Backward, Loop, Prediction
from accel_fn.contrib.migrate.source import joined, last, walk
from accel_fn.contrib.migrate.table import DIFFERENCES, TABLE
from accel_fn.errors import ArgumentError, message

_FIRST = (
    "place",
    "with_amp",
    "compiled",
    "wrap_as_launched",
    "wrap_ddp",
    "wrap_fsdp",
    "wrap_deepspeed",
    "local_sgd",
    "accumulate",
)
"""The first transforms of the recipe; other transforms follow in the script's order."""
_WRAPS = {"wrap_fsdp", "wrap_deepspeed", "wrap_as_launched"}
_LONGEST = 60
"""The most characters of an argument in a replacement."""


@dataclass(frozen=True)
class Use:
    """A name of accelerate in a line, and its replacement."""

    name: str
    replacement: str | None
    """The code that replaces the name. None: the name is deleted. "": the line stays."""
    part: str = ""
    """The part of the line that is replaced; empty for the whole line."""
    why: str = ""
    differences: tuple[int, ...] = ()
    is_known: bool = True


@dataclass
class Line:
    """A statement of the script, or the first line of a compound one."""

    number: int
    source: str
    num_lines: int
    uses: list[Use] = field(default_factory=list)

    @property
    def goes(self) -> bool:
        """Return whether the line is deleted without a replacement."""
        return all(use.is_known and use.replacement is None and not use.part for use in self.uses)


@dataclass(frozen=True)
class Script:
    """The replacements for a script that uses accelerate, line by line, and its recipe."""

    lines: list[Line]
    recipe: list[str]
    loops: list[Loop]
    num_lines: int

    @property
    def num_replaced(self) -> int:
        """Return the number of lines with a replacement."""
        return sum(
            line.num_lines for line in self.lines if any(use.replacement for use in line.uses)
        )

    @property
    def num_going(self) -> int:
        """Return the number of lines that are deleted without a replacement."""
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
        _recipe([each for each, _ in reader.all_transforms()]),
        reader.loops(),
        len(module.code.splitlines()),
    )


def _recipe(found: list[str]) -> list[str]:
    """Return the transforms of the recipe with `place` and a wrap, each once, in a readable order."""
    names = {_name(each) for each in found}
    if len(names & _WRAPS) > 1:
        # A script with several wraps chooses one by its launch's settings, as wrap_as_launched
        # does.
        found = [each for each in found if _name(each) not in _WRAPS] + ["af.wrap_as_launched()"]
    wraps = [] if names & {*_WRAPS, "local_sgd"} else ["af.wrap_ddp()"]
    transforms = dict.fromkeys(["af.place()", *wraps, *found])
    return sorted(
        transforms,
        key=lambda each: _FIRST.index(_name(each)) if _name(each) in _FIRST else len(_FIRST),
    )


def _name(transform: str) -> str:
    return transform.removeprefix("af.").partition("(")[0]


class _Arguments(dict[str, str]):
    """The arguments of a call by name; a missing one is printed as three dots."""

    def __missing__(self, name: str) -> str:
        return "..."


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST else "..."


class _Reader:
    """Walks through a script once, and finds its lines and the transforms of its recipe."""

    def __init__(self, module: cst.Module) -> None:
        self.facts = Facts(MetadataWrapper(module))
        self.source = module.code.splitlines()
        self.lines: dict[int, Line] = {}
        self.transforms: list[tuple[str, int]] = []
        """The transforms of the recipe, each with its line."""
        self._backwards = [Backward(self.facts, each) for each in self.facts.backwards]
        self._frozen = {name for each in self._backwards for name in each.frozen}
        updates = [each for each in self._backwards if each.own_optimizers]
        self._updates = updates or self._backwards[-1:]
        """The backwards that are followed by an update."""
        self._in_loss = {node for each in self._backwards for node in each.kept}
        self._done: set[cst.CSTNode] = set()
        """Nodes inside of code that is replaced as a whole. `read` skips them."""

    def loops(self) -> list[Loop]:
        """Return the code that replaces each loop."""
        joined_lines = []
        for each in self._backwards:
            if each not in self._updates:
                joined_lines.append(str(each.number))
            elif joined_lines:
                lines = ", ".join(joined_lines)
                why = f"the backward of line {lines} is part of the same update: return the sum of the losses"
                each.by_hand[why] = None
                joined_lines = []
        return [self._loop(each) for each in self._updates]

    def all_transforms(self) -> list[tuple[str, int]]:
        """Return the transforms of the recipe, each with the line that it comes from."""
        k = self.facts.num_microbatches
        split = ", split=None" if self.facts.is_grouped else ""
        return [*self.transforms, *([(f"af.accumulate({k}{split})", 0)] if k else [])]

    def _suffix(self, backward: Backward) -> str:
        """Return the suffix of a loop's names; "" if the script has only one loop."""
        if len(self._updates) < 2:
            return ""
        names = [last(each.models[0]) if each.models else "" for each in self._updates]
        own = last(backward.models[0]) if backward.models else ""
        is_one = own and names.count(own) == 1
        return f"_{own}" if is_one else f"_{self._updates.index(backward) + 1}"

    def _loop(self, backward: Backward) -> Loop:
        """Write the code of a loop; with several loops, each has its own part of the transforms."""
        later = [each for each in self._updates if each.number > backward.number]
        end = later[0].number if later else 10**9
        transforms = [
            each
            for each, line in self.all_transforms()
            if len(self._updates) == 1 or not self._is_of_other(each, line, backward, end)
        ]
        suffix = self._suffix(backward)
        step = f"{self.facts.step}{suffix}"
        loop = backward.written(_recipe(transforms), suffix, step, self._in_loss)
        if any(each.loop is backward.loop for each in later):
            loop = replace(loop, in_loop=loop.in_loop.removesuffix(")") + ", advance=False)")
        return replace(loop, program=self._owned(loop.program), in_loop=self._owned(loop.in_loop))

    def _is_of_other(self, transform: str, line: int, backward: Backward, end: int) -> bool:
        """Return whether a transform, such as a clip or a schedule, belongs to another loop."""
        if _name(transform) in ("clip", "clip_value"):
            return not backward.number < line < end
        if _name(transform) == "schedule":
            scheduler = re.split(r"[(,)]", transform)[1]
            names = self.facts.names_in_making(scheduler)
            return bool(names) and not names & {*backward.optimizers}
        return False

    def _owned(self, text: str) -> str:
        """Replace the names of the state and the step by the names that this script uses."""
        text = re.sub(r"(?<![\w.'\"{])step\b(?! *[=}].)(?=[,( ])", self.facts.step, text)
        if not self.facts.prefix:
            return text
        return re.sub(r"(?<![\w.'\"{])(state|step|train_step)\b(?!=)", r"self.\1", text)

    def read(self) -> None:
        for node in walk(self.facts.module):
            if node in self._done:
                continue
            if isinstance(node, cst.Import | cst.ImportFrom):
                if self.facts.is_of_accelerate(node):
                    self._add_use(node, "import", goes=bool(self.lines))
            elif isinstance(node, cst.Assign | cst.AugAssign | cst.Arg) and self._read_whole(node):
                self._done |= {*walk(node)}
            elif isinstance(node, cst.For):
                self._read_loop(node)
            elif isinstance(node, cst.If) and node in self.facts.counting_ifs:
                self._add_use(node, "count", goes=True)
            elif isinstance(node, cst.Call) and self.facts.makes_loader(node):
                self._read_loader(node)
            elif isinstance(node, cst.Attribute | cst.Name):
                self._read_name(node)

    def _read_whole(self, node: cst.Assign | cst.AugAssign | cst.Arg) -> bool:
        """If a statement or argument is replaced as a whole, add its use; return whether it is."""
        is_read = (
            self._read_argument(node) if isinstance(node, cst.Arg) else self._read_assignment(node)
        )
        return is_read or self._has_factor(node)

    def _read_argument(self, node: cst.Arg) -> bool:
        """If only accelerate's loggers have this argument, add its use; return whether they do."""
        key = f"logger({self.facts.code(node).rstrip(', ')})"
        if key in TABLE:
            self._add_use(node, key)
        return key in TABLE

    def _has_factor(self, node: cst.Assign | cst.AugAssign | cst.Arg) -> bool:
        """If a length or rate has a factor that a step does not need, add its use without the factor.

        Returns whether there is such a factor.
        """
        if not isinstance(node, cst.Arg) and any(
            isinstance(each, cst.Call) and each.args for each in walk(node)
        ):
            inner = [each for each in walk(node) if isinstance(each, cst.Arg) and each.keyword]
            if inner:
                return False
        new = self.facts.factored(node)
        if new is None or len(list(self._up_to_statement(node))) == 0:
            return False
        self._add_use(node, "factor", {"new": self._owned(new)})
        return True

    def _read_name(self, node: cst.Attribute | cst.Name) -> None:
        function = self.facts.name_in_accelerate(node)
        if function is not None:
            self._read_function(node, function)
        elif node in self.facts.epoch_numbers:
            if not self._has_epoch(node):
                self._add_use(node, "epoch")
        elif (read := self._loss_read(node)) is not None:
            self._add_use(node, "loss.read", {"report": f"report{self._suffix(read)}"})
            self._done |= {*walk(node)}
        elif isinstance(node, cst.Attribute) and self._is_average_step(node):
            self._add_use(node, "average.step")
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
        member = self.facts.code(self.facts.parents[node])
        call = self.facts.parents[node]
        if name == "set_seed" and isinstance(call, cst.Call) and call.args:
            key = "set_seed(of transformers)" if self.facts.is_of_transformers(node) else name
            self._add_use(node, key, {"seed": self.facts.seed_of_rank(call)})
            self._done |= {*walk(call)}
            return
        if name == "get_logger" and self.facts.function_around(node) is None:
            name = "get_logger(module)"
        if name == "DistributedType" and member.endswith((".FSDP", ".DEEPSPEED")):
            name = "DistributedType(sharded)"
        self._add_use(node, name)
        if name != "Accelerator" or not isinstance(call, cst.Call):
            return
        for argument in call.args:
            given = self.facts.keywords(argument)
            if not given:
                self._add_use(node, f"Accelerator({self.facts.code(argument).rstrip(', ')})")
            for key, value in given.items():
                self._add_use(
                    argument,
                    f"Accelerator({key})",
                    {key: _short(self.facts.code(value))},
                    condition=self.facts.condition(call, key, value),
                )

    def _read_member(self, node: cst.Attribute, name: str) -> None:
        """Add the use of an attribute or method of the accelerator."""
        call = self.facts.parents[node]
        if name == "prepare" and isinstance(call, cst.Call):
            self._read_prepare(node, call)
        elif name == "gather" and isinstance(call, cst.Call) and self._known_figure(call):
            self._add_use(node, f"accelerator.gather({self._known_figure(call)})")
            self._done |= {*walk(call)}
        elif name == "reduce" and re.search("[\"']mean[\"']", self.facts.code(call)):
            self._add_use(node, "accelerator.reduce(mean)")
        elif name in ("gather", "gather_for_metrics") and self.facts.evaluates(node):
            self._read_gathered(node, call)
        elif name == "autocast" and self.facts.trains(node):
            self._add_use(node, "accelerator.autocast(in a loop)")
        elif name == "backward" and (len(self._updates) > 1 or self._draws(call)):
            self._add_use(node, "accelerator.backward(below)")
        elif name == "backward":
            [batch] = [each.batch for each in self._backwards if each.call is call] or ["batch"]
            self._add_use(node, "accelerator.backward", {"batch": batch})
        elif name == "device" and self.facts.only_moves(node):
            self._read_move(node)
        elif name == "state" and self._read_plugin(node):
            return
        else:
            # A new loop over epochs begins at the saved position itself, so delete the call.
            goes = name == "skip_first_batches" and bool(self.facts.epoch_loops)
            self._add_use(node, f"accelerator.{name}", goes=goes)

    def _loss_read(self, node: cst.Attribute | cst.Name) -> Backward | None:
        """Return the backward whose loss a name reads outside of the loss itself, as for a log; else None."""
        code = self.facts.code(node)
        if not re.fullmatch(r"[\w.]+", code) or not self.facts.stands_for_itself(node):
            return None
        around = [node, *self._up_to_statement(node), *self.facts.ancestors(node)]
        if any(each in self._in_loss or isinstance(each, cst.AssignTarget) for each in around):
            return None
        for each in self._backwards:
            loop = each.loop and (self.facts.loop_around(each.loop) or each.loop)
            is_here = (
                loop in around and each.loss is not None and code == self.facts.code(each.loss)
            )
            if is_here and each.call not in around:
                return each
        return None

    def _is_average_step(self, node: cst.Attribute) -> bool:
        is_step = node.attr.value in ("step", "update", "update_parameters")
        return is_step and self.facts.code(node.value) in self.facts.averages

    def _draws(self, call: cst.CSTNode) -> bool:
        """Return whether the loop of a backward draws rows for its loss."""
        return any(each.call is call and each.draws for each in self._backwards)

    def _read_plugin(self, node: cst.Attribute) -> bool:
        """Add the use of a plugin of `accelerator.state`, also by getattr; return whether there is one."""
        around = self.facts.parents[node]
        found = around if isinstance(around, cst.Attribute) else self.facts.parents[around]
        text = self.facts.code(found)
        is_read = isinstance(found, cst.Attribute) or text.startswith(("getattr(", "hasattr("))
        for each in ("fsdp_plugin", "deepspeed_plugin"):
            if is_read and each in text:
                self._add_use(found, f"accelerator.state.{each}")
                return True
        return False

    def _read_move(self, node: cst.Attribute) -> None:
        """Add the use of `x.to(accelerator.device)`, according to the kind of x."""
        call = self.facts.parents[self.facts.parents[node]]
        assert isinstance(call, cst.Call)
        assert isinstance(call.func, cst.Attribute)
        name = self.facts.code(call.func.value)
        rest = [each for each in call.args if each.value is not node]
        is_batch = self.facts.loop_around(node) is not None
        if name in self._frozen:
            cast = ", ".join(self.facts.code(each).rstrip(", ") for each in rest)
            key = "move(cast)" if rest else "move(frozen)"
            self._add_use(call, key, {"name": name, "key": last(name), "cast": cast})
        elif name in (*self.facts.trained, *self.facts.renamed.values()) or is_batch:
            self._add_use(node, "move", goes=True)
        else:
            self._add_use(node, "accelerator.device")

    def _read_gathered(self, node: cst.Attribute, call: cst.CSTNode) -> None:
        """Add the use of rows that an evaluation gathers. If the call is part of a line, they get a name."""
        loop = self.facts.loop_around(node)
        is_part = not isinstance(self.facts.parents[call], cst.Assign | cst.Expr)
        if is_part and isinstance(loop, cst.For) and self._predictions(loop):
            found = Prediction(self.facts, loop)
            name = dict(zip(found.calls, found.names, strict=True)).get(call, "")
            self._add_use(node, "accelerator.gather_for_metrics(named)", {"name": name})
        else:
            self._add_use(node, "accelerator.gather_for_metrics(in a loop)")

    def _known_figure(self, call: cst.Call) -> str:
        """Return the report's field with the value that a call gathers; "" if it has none."""
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
            key = "below" if self._backwards else "model"
            self._add_use(node, f"accelerator.prepare({key})", values)
        if len(kinds["model"]) > 1 and not self._backwards:
            self._add_use(node, "accelerator.prepare(models)")
        results = {name: to for to, name in self.facts.renamed.items()}
        for to, name in self.facts.renamed.items():
            if name in names and self.facts.kind(name) != "loader":
                self._add_use(node, "accelerator.prepare(renamed)", {"to": to, "name": name})
        for name in kinds["loader"]:
            to = results.get(name, name)
            key = "grouped loader" if self.facts.is_grouped else "loader"
            trains = to in self.facts.training_loaders
            k = self.facts.num_microbatches if trains else "1"
            # `order="torch"` shuffles as the script does. If it has a sampler, that decides the order.
            order = ', order="torch"' if trains and not self.facts.has_sampler else ""
            values = {"to": to, "loader": name, "k": k, "order": order}
            self._add_use(node, f"accelerator.prepare({key})", values)
        for name in kinds["scheduler"]:
            self._add_scheduler(node, "accelerator.prepare(scheduler)", name)

    def _add_scheduler(self, node: cst.CSTNode, key: str, name: str) -> None:
        """Add the use of a scheduler; `every` is the argument of `af.schedule` for one that counts epochs."""
        every = f", every={self.facts.values['loader']}"
        of_epochs = name in self.facts.schedulers_of_epochs
        self._add_use(node, key, {"scheduler": name, "every": every if of_epochs else ""})

    def _read_prepared(self, node: cst.Attribute) -> None:
        """Add the use of an attribute or method of a prepared model, optimizer, loader or scheduler."""
        name = self.facts.code(node.value)
        key = f"{self.facts.kinds.get(name)}.{node.attr.value}"
        if key == "scheduler.step" and name in self.facts.schedulers_of_epochs:
            key = "scheduler.step(epoch)"
        if key in TABLE:
            self._add_use(node, key, {"name": name})

    def _read_loop(self, node: cst.For) -> None:
        """Add the use of a loop that trains, iterates over epochs, or evaluates."""
        loader = self.facts.training_loops.get(node)
        if node in self.facts.counting_loops:
            self._add_use(node, "count loop")
        elif loader is not None:
            is_in_epochs = self.facts.loop_around(node) in self.facts.epoch_loops
            loaders = [
                each
                for each in walk(node.iter)
                if isinstance(each, cst.Name | cst.Attribute)
                and self.facts.loader_in(each) == loader
            ]
            over = self.facts.edited(
                node.iter,
                [(*self.facts.span(each), "epoch") for each in loaders if is_in_epochs],
            )
            counts = over.startswith("enumerate(")
            count = self.facts.code(node.target).split(",")[0] if counts else ""
            batch = next(each.batch for each in self._backwards if each.loop is node)
            self._add_use(
                node,
                "loader.loop",
                {"target": f"{count}, {batch}" if counts else batch, "iter": over},
            )
        elif node in self.facts.epoch_loops and isinstance(node.iter, cst.Call):
            of_range = [
                each
                for each in walk(node.iter)
                if isinstance(each, cst.Call)
                and last(self.facts.code(each.func)) in ("range", "trange")
            ]
            # In `range(a, b)`, the last epoch is b - 1, so b is the number of epochs.
            places = [each.value for each in of_range[0].args if each.keyword is None]
            count = self.facts.code(places[min(1, len(places) - 1)])
            since = ", since=state" if self.facts.resumes else ""
            inner = [
                loop for loop in self.facts.training_loops if self.facts.loop_around(loop) is node
            ]
            loader = self.facts.training_loops[inner[0]]
            self._add_use(node, "loader.epochs", {"num_epochs": count + since, "loader": loader})
        elif node in self.facts.evaluation_loops:
            loader, program = self.facts.evaluation_loops[node], self._predictions(node)
            key = "loader.predictions" if program else "loader.evaluation"
            self._add_use(node, key, {"loader": loader, "program": program})

    def _predictions(self, loop: cst.For) -> str:
        """Write the call of `af.predict` that replaces a loop; "" if it gathers a loss, or does more."""
        if any(self._known_figure(each) for each in self.facts.gathers_in(loop)):
            return ""
        return self._owned(Prediction(self.facts, loop).program(self.facts.evaluation_loops[loop]))

    def _read_assignment(self, node: cst.Assign | cst.AugAssign) -> bool:
        """If an assignment moves into the loss or is deleted, add its use; return whether it does or is."""
        if node in self._in_loss:
            self._add_use(node, "loss")
            return True
        if isinstance(node, cst.Assign) and self.facts.is_accelerator(node.value):
            self._add_use(node, "alias")
            return True
        divides = any(self.facts.only_divides(node, each) for each in self.facts.losses)
        if divides and self.facts.loop_around(node) in self.facts.training_loops:
            self._add_use(node, "divide")
            return True
        target = self.facts.code(node.targets[0].target) if isinstance(node, cst.Assign) else ""
        if target in self.facts.own_schedulers:
            self._add_scheduler(node, "scheduler", target)
        return False

    def _read_loader(self, node: cst.Call) -> None:
        """Add the use of a loader that the script trains on, at the line that makes it."""
        accumulated = self.facts.num_microbatches and not self.facts.is_grouped
        positional = [each for each in node.args if each.keyword is None]
        named = [each for each in node.args if each.keyword and each.keyword.value == "batch_size"]
        given = [*named, *positional[1:2]]
        size = self.facts.code(given[0].value) if given else "1"
        size = size if re.fullmatch(r"[\w.]+", size) else f"({size})"
        key = "loader(accumulated)" if accumulated else "loader"
        self._add_use(node.func, key, {"batch_size": size})

    def _add_use(
        self,
        node: cst.CSTNode,
        key: str,
        values: Mapping[str, str] | None = None,
        *,
        goes: bool = False,
        condition: str = "",
    ) -> None:
        """Add the use of a name, and its transform, if any, to the recipe.

        With `condition`, the recipe has the transform only if the condition is true.
        """
        line = self._line(node)
        found = "is_*_available" if re.fullmatch(r"is_\w+_available", key) else key
        row = TABLE.get(found)
        if row is None:
            line.uses.append(Use(key, None, self._shown(node), is_known=False))
            return
        given = {name: _short(each) for name, each in self._arguments(node, row.arguments).items()}
        filled = _Arguments({**self.facts.values, **given})
        filled.update(values or {})
        replacement = row.replacement
        if replacement is not None:
            replacement = None if goes else self._filled(key, replacement, filled)
        if row.why and any(
            (use.replacement, use.why) == (replacement, row.why) for use in line.uses
        ):
            return
        part = "" if goes or self._is_whole(node, replacement) else self._shown(node)
        differences = tuple(
            number
            for number in row.differences
            if DIFFERENCES[number].only_if in {"", *self.facts.traits}
        )
        line.uses.append(Use(key, replacement, part, row.why.format_map(filled), differences))
        if row.transform:
            unless = f" if {condition} else af.compose()" if condition else ""
            self.transforms.append(
                (row.transform.format_map(filled) + unless, self.facts.line(node))
            )

    def _filled(self, key: str, replacement: str, values: Mapping[str, str]) -> str:
        """Fill in the placeholders of a replacement; use the script's names for the state and the step."""
        if key != "annotation":
            replacement = self._owned(replacement)
        return replacement.format_map(values)

    def _arguments(self, node: cst.CSTNode, names: str) -> dict[str, str]:
        """Return the arguments of a call by name; for a node that is an argument, return only that one."""
        if isinstance(node, cst.Arg) and node.keyword is not None:
            return {node.keyword.value: self._moved(node.value)}
        call = self.facts.parents[node]
        if not isinstance(call, cst.Call):
            return {}
        positional = [each for each in call.args if each.keyword is None and not each.star]
        found = {
            name: self._moved(each.value)
            for name, each in zip(names.split(), positional, strict=False)
        }
        for each in call.args:
            if each.keyword is not None:
                found[each.keyword.value] = self._moved(each.value)
        found["all"] = ", ".join(self._moved(each).rstrip(", ") for each in call.args)
        return found

    def _moved(self, node: cst.CSTNode) -> str:
        """Return the source of a node, with the names of the new loop for the epoch and the loss."""
        edits = []
        for each in walk(node):
            if each in self.facts.epoch_numbers:
                edits.append((*self.facts.span(each), "epoch.index"))
            elif isinstance(each, cst.Attribute | cst.Name) and (read := self._loss_read(each)):
                edits.append((*self.facts.span(each), f"report{self._suffix(read)}.loss"))
        if not edits:
            return self.facts.code(node)
        return joined(self.facts.edited(node, edits).splitlines())

    def _has_epoch(self, node: cst.CSTNode) -> bool:
        """Return whether the statement around a node goes, is replaced, or has the epoch's new name."""
        line = self.lines.get(self.facts.line([node, *self._up_to_statement(node)][-1]))
        if line is None:
            return False
        texts = [(use.replacement or "...", use.part) for use in line.uses]
        return line.goes or any(
            "epoch.index" in text or not (part or "..." in text) for text, part in texts
        )

    def _up_to_statement(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes around a node, up to its statement or decorator."""
        while not isinstance(node, cst.BaseStatement | cst.Decorator | cst.Module):
            node = self.facts.parents[node]
            yield node

    def _line(self, node: cst.CSTNode) -> Line:
        statement = [node, *self._up_to_statement(node)][-1]
        where = self.facts.positions[statement]
        number, end = where.start.line, where.end.line
        if isinstance(statement, cst.BaseCompoundStatement):
            end = number
        text = joined(self.source[number - 1 : end])
        return self.lines.setdefault(number, Line(number, text, end - number + 1))

    def _is_whole(self, node: cst.CSTNode, replacement: str | None) -> bool:
        """Return whether the replacement of this name replaces its whole statement."""
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
        call = self.facts.parents[node]
        if isinstance(call, cst.Call) and node is call.func:
            text += "(...)" if call.args else "()"
        return text

    def _stands_alone(self, node: cst.Name) -> bool:
        """Return whether this name is an argument or a parameter of the script's own functions."""
        parent = self.facts.parents[node]
        if isinstance(parent, cst.Arg):
            call = self.facts.parents[parent]
            known = isinstance(call, cst.Call) and self.facts.name_in_accelerate(call.func)
            return node is not parent.keyword and not known
        return isinstance(parent, cst.Param) and parent.annotation is None
