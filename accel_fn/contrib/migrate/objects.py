"""The objects of accelerate in a script: accelerators, their settings, and prepared objects."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property

import libcst as cst

from accel_fn.contrib.migrate.source import Edit, Source, joined, last, walk
from accel_fn.contrib.migrate.table import TABLE

_KINDS = {
    "scheduler": r"sched|LR$",
    "optimizer": r"optim|^opt|Adam|SGD|Adafactor|RMSprop|Lion",
    "loader": r"loader|^dl|_dl$",
}
"""Patterns that find the kind of an argument of `prepare`, by its name or by the call that makes
it. An argument that matches no pattern is a model."""
_SET_SEED_OF_TRANSFORMERS = "transformers.set_seed"
"""Some scripts import this function instead of accelerate's `set_seed`, which does the same."""
RANK = r"[\w.]+\.(local_)?process_index"
"""A pattern for accelerate's attributes that hold this process's rank."""
_AVERAGE = r"EMA|ExponentialMovingAverage|AveragedModel|ModelEma"


class Objects(Source):
    """The objects that a script gets from accelerate or prepares with it, by their names."""

    @cached_property
    def imports_accelerate(self) -> bool:
        return any(
            self.is_of_accelerate(node)
            for node in self._nodes
            if isinstance(node, cst.Import | cst.ImportFrom)
        )

    def is_of_accelerate(self, node: cst.Import | cst.ImportFrom) -> bool:
        """Return whether an import is of accelerate or one of its modules."""
        if isinstance(node, cst.ImportFrom):
            modules = [node.module] if node.module is not None and not node.relative else []
        else:
            modules = [each.name for each in node.names]
        return any(self.code(each).split(".")[0] == "accelerate" for each in modules)

    def name_in_accelerate(self, node: cst.CSTNode) -> str | None:
        """Return the class or function of accelerate that a node names; None for only a part of a name."""
        parent = self.parents[node]
        if isinstance(parent, cst.Attribute) and self._imported(parent):
            return None
        name = self._imported(node)
        if name is None:
            return None
        parts = name.split(".")[1:]
        return next((part for part in parts if part in TABLE), parts[-1] if parts else None)

    def _imported(self, node: cst.CSTNode) -> str | None:
        names = self._qualified.get(node, ())
        # libcst computes the names when they are first read. Until then, it stores a function that
        # returns them.
        for each in names() if callable(names) else names:
            if each.name.startswith("accelerate.") or each.name == _SET_SEED_OF_TRANSFORMERS:
                return str(each.name)
        return None

    def is_of_transformers(self, node: cst.CSTNode) -> bool:
        """Return whether a node names the `set_seed` of transformers, which the new program can keep."""
        return self._imported(node) == _SET_SEED_OF_TRANSFORMERS

    @cached_property
    def _accelerators(self) -> set[str]:
        """Return the names of the variables and attributes that hold an accelerator or a state."""
        return {
            "accelerator",
            *self._names_of_made_by("Accelerator"),
            *self._names_of_made_by("PartialState"),
        }

    def _names_of_made_by(self, maker: str) -> set[str]:
        """Return the names to which the script assigns an object of this class of accelerate."""
        return {
            last(name)
            for name, value in self._assigned.items()
            if isinstance(value, cst.Call) and self.name_in_accelerate(value.func) == maker
        }

    def is_accelerator(self, node: cst.CSTNode) -> bool:
        """Return whether a node is a variable or an attribute that holds an accelerator or a state."""
        is_name = isinstance(node, cst.Name | cst.Attribute)
        return is_name and last(self.code(node)) in self._accelerators

    def _method_calls(self, *names: str) -> list[cst.Call]:
        """Return the calls of these methods of an accelerator."""
        return [
            call
            for call in self._calls
            if isinstance(call.func, cst.Attribute)
            and call.func.attr.value in names
            and self.is_accelerator(call.func.value)
        ]

    def is_num_processes(self, node: cst.CSTNode) -> bool:
        """Return whether an expression is the number of processes."""
        is_own = isinstance(node, cst.Attribute) and node.attr.value == "num_processes"
        return is_own and self.code(node).split(".")[-2] in (*self._accelerators, "state")

    def is_device(self, node: cst.CSTNode) -> bool:
        """Return whether an expression is the device of the accelerator."""
        is_own = isinstance(node, cst.Attribute) and self.is_accelerator(node.value)
        return (is_own and self.code(node).endswith(".device")) or self.code(node) in self.devices

    @cached_property
    def devices(self) -> set[str]:
        """Return the variables that hold the device of the accelerator."""
        return {
            name
            for name, value in self._assigned.items()
            if isinstance(value, cst.Attribute)
            and value.attr.value == "device"
            and self.is_accelerator(value.value)
        }

    def only_moves(self, node: cst.Attribute) -> bool:
        """Return whether the statement around `accelerator.device` only moves a variable to this device."""
        call = self.parents[self.parents[node]]
        if not isinstance(call, cst.Call) or not isinstance(call.func, cst.Attribute):
            return False
        if call.func.attr.value not in ("to", "cuda") or not self.is_device(node):
            return False
        around = self.parents[call]
        moved = self.code(call.func.value)
        if isinstance(around, cst.Assign):
            return self.code(around.targets[0].target) == moved
        return isinstance(around, cst.Expr)

    @cached_property
    def resumes(self) -> bool:
        return bool(self._method_calls("load_state"))

    def unwraps(self, call: cst.Call) -> bool:
        """Return whether a call takes a model out of its wrapper."""
        return last(self.code(call.func)) in (
            "unwrap_model",
            "extract_model_from_parallel",
        ) and bool(call.args)

    def _calls_of(self, name: str) -> list[cst.Call]:
        """Return the calls of a class or function of accelerate."""
        return [call for call in self._calls if self.name_in_accelerate(call.func) == name]

    @cached_property
    def _constructor(self) -> dict[str, str]:
        """Return the keyword arguments with which the script makes accelerators."""
        return self._settings("Accelerator")

    def _settings(self, maker: str) -> dict[str, str]:
        """Return the keyword arguments with which the script calls a class of accelerate."""
        return {
            name: self.code(value)
            for call in self._calls_of(maker)
            for each in call.args
            for name, value in self.keywords(each).items()
        }

    def keywords(self, argument: cst.Arg) -> dict[str, cst.BaseExpression]:
        """Return the keyword arguments in an argument of a call: one, or the entries of a `**` dictionary."""
        if argument.keyword is not None:
            return {argument.keyword.value: argument.value}
        return self._entries(self.code(argument.value)) if argument.star == "**" else {}

    def _entries(self, name: str) -> dict[str, cst.BaseExpression]:
        """Return the entries that the script gives to a dictionary, by their keys."""
        made = self._assigned.get(name)
        elements = made.elements if isinstance(made, cst.Dict) else ()
        literal = {
            self.code(each.key).strip("\"'"): each.value
            for each in elements
            if isinstance(each, cst.DictElement)
        }
        later = {
            target.removeprefix(f"{name}[").strip("\"']"): value
            for target, value in self._assigned.items()
            if target.startswith((f'{name}["', f"{name}['"))
        }
        return literal | later

    def condition(self, call: cst.Call, name: str, value: cst.BaseExpression) -> str:
        """Return the condition on which an accelerator is made with an argument; "" if it always is."""
        settings = [
            {key for each in other.args for key in self.keywords(each)}
            for other in self._calls_of("Accelerator")
        ]
        condition = self._branch(value)
        is_always = all(name in each for each in settings) and condition == self._branch(call)
        return "" if is_always else condition

    def _init_arguments(self) -> Iterator[str]:
        """Yield the arguments of af.init."""
        cpu = self._constructor.get("cpu")
        if cpu not in (None, "False"):
            yield 'device="cpu"' if cpu == "True" else f'device="cpu" if {cpu} else None'
        for call in self._calls:
            if self.name_in_accelerate(call.func) == "set_seed" and call.args:
                yield f"seed={self._seed(call)}"
                break

    def _seed(self, call: cst.Call) -> str:
        """Return the argument of `set_seed`, in a form for the line that makes the accelerator."""
        value = call.args[0].value
        made = [*self._calls_of("Accelerator"), *self._calls_of("PartialState")]
        written = self._written_at(value, made[0]) if made else self.code(value)
        # `af.init` takes the seed of the run, so leave out the rank's number.
        seed = re.sub(rf" *\+ *{RANK}", "", written)
        around = [each for each in self.ancestors(call) if isinstance(each, cst.If)]
        is_optional = any(self.code(value) in self.code(each.test) for each in around)
        return f"{seed} or 0" if is_optional else seed

    def seed_of_rank(self, call: cst.Call) -> str:
        """Return the seed that `set_seed` gives to a rank."""
        seed = re.sub(RANK, r"state.\1rank", self.code(call.args[0].value))
        is_own = re.search(r"device_specific *= *True", self.code(call))
        return f"{seed} + state.rank" if is_own else seed

    def _written_at(self, node: cst.BaseExpression, place: cst.CSTNode) -> str:
        """Write an expression for use at `place`: replace variables that the script assigns below it."""
        function, edits = self.function_around(place), list[Edit]()
        for each in walk(node):
            value = self._assigned.get(each.value) if isinstance(each, cst.Name) else None
            if (
                value is not None
                and self.line(place) < self.line(value) < self.line(each)
                and self.function_around(value) is function
            ):
                text = self._written_at(value, place)
                edits.append((*self.span(each), text if each is node else f"({text})"))
        return joined(self.edited(node, edits).splitlines())

    def kind(self, name: str) -> str:
        """Return the kind of an object that the script passes to prepare, such as "loader"."""
        value = self._assigned.get(name)
        maker = self.code(value.func) if isinstance(value, cst.Call) else ""
        for text in (last(name), last(maker)):
            for kind, pattern in _KINDS.items():
                if re.search(pattern, text):
                    return kind
        return "model"

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Return the kind of each object that the script prepares, and of its other schedulers."""
        return {**self.prepared_kinds, **dict.fromkeys(self.own_schedulers, "scheduler")}

    @cached_property
    def own_schedulers(self) -> list[str]:
        """Return the schedulers that the script makes with a prepared optimizer and does not prepare."""
        prepared = self.prepared_kinds
        optimizers = {name for name, kind in prepared.items() if kind == "optimizer"}
        return [
            name
            for name in self._assigned
            if name not in prepared
            and "," not in name
            and self.kind(name) == "scheduler"
            and optimizers & self.names_in_making(name)
        ]

    @cached_property
    def prepared_kinds(self) -> dict[str, str]:
        """Return the kind of each name that is an argument or a result of prepare."""
        found: dict[str, str] = {}
        for call in self._method_calls(
            "prepare",
            "prepare_model",
            "prepare_data_loader",
            "prepare_optimizer",
            "prepare_scheduler",
        ):
            names = [self.code(each.value) for each in call.args if not each.star]
            found |= {name: self.kind(name) for name in names}
            around = self.parents[call]
            if isinstance(around, cst.Assign):
                targets = self.code(around.targets[0].target).strip("()").split(", ")
                found |= {to: found[name] for to, name in zip(targets, names, strict=False)}
        return found

    @cached_property
    def renamed(self) -> dict[str, str]:
        """Return the names of prepare's results, with their arguments' names if these differ."""
        found: dict[str, str] = {}
        for call in self._method_calls("prepare"):
            names = [self.code(each.value) for each in call.args if not each.star]
            around = self.parents[call]
            if isinstance(around, cst.Assign):
                targets = self.code(around.targets[0].target).strip("()").split(", ")
                pairs = zip(targets, names, strict=False)
                found |= {to: name for to, name in pairs if to != name}
        return found

    @cached_property
    def prepare_lines(self) -> list[int]:
        return [self.positions[each].end.line for each in self._method_calls("prepare")]

    @cached_property
    def made_lines(self) -> list[int]:
        """Return the last lines of the statements that make the arguments of the recipe and the plan."""
        made = [self._assigned[name] for name in self.own_schedulers]
        return [*self.prepare_lines, *(self.positions[each].end.line for each in made)]

    def is_local_elsewhere(self, name: str, node: cst.CSTNode) -> bool:
        """Return whether a name is local to the function around a node, and only other functions prepare."""
        function = self.function_around(node)
        prepared = {self.function_around(each) for each in self._method_calls("prepare")}
        if function is None or not prepared or function in prepared or name.startswith("self."):
            return False
        local = {
            self.code(each.target)
            for each in walk(function.body)
            if isinstance(each, cst.AssignTarget | cst.AnnAssign)
        }
        return name in local | {each.name.value for each in function.params.params} - {"self"}

    @cached_property
    def averages(self) -> set[str]:
        """Return the variables that hold an average of parameters, such as an EMA."""
        return {
            name
            for name, value in self._assigned.items()
            if isinstance(value, cst.Call) and re.search(_AVERAGE, self.code(value.func))
        }

    @cached_property
    def trained(self) -> list[str]:
        """Return the models that the script prepares, without those that it freezes."""
        alone = [self.code(each.args[0].value) for each in self._method_calls("prepare_model")]
        models = [
            name
            for name, kind in self.kinds.items()
            if kind == "model" and name not in {*alone, *self.averages, *self.renamed.values()}
        ]
        frozen = {
            name
            for name in self._frozen_by_call - self._with_optimizer
            if "train" not in self._methods_of(name)
        }
        return [name for name in models if name not in frozen] or models

    @cached_property
    def _frozen_by_call(self) -> set[str]:
        """Return the models that the script freezes, or prepares by `prepare_model`."""
        alone = {self.code(each.args[0].value) for each in self._method_calls("prepare_model")}
        return alone | {
            name
            for name, calls in self._calls_on.items()
            for call in calls
            if self.code(call).endswith((".requires_grad_(False)", ".eval()"))
        }

    @cached_property
    def _with_optimizer(self) -> set[str]:
        """Return the names in the calls that make optimizers."""
        return {
            self.code(node)
            for name, kind in self.kinds.items()
            if kind == "optimizer"
            for node in walk(self._assigned.get(name) or cst.Pass())
            if isinstance(node, cst.Name | cst.Attribute)
        }

    @cached_property
    def frozen(self) -> list[str]:
        """Return the models that the script moves to a device or freezes, and does not train."""
        placed = {
            name
            for name, calls in self._calls_on.items()
            for call in calls
            if isinstance(self.parents[call], cst.Expr)
            and self.code(call.func).endswith((".to", ".cuda"))
            # Skip a move in a loop: it moves the loop's batch, not a model.
            and self.loop_around(call) is None
        }
        found = (placed | self._frozen_by_call) - self.averages - {*self.trained}
        return sorted(name for name in found if self.kinds.get(name, "model") == "model")

    def moved_at(self, name: str) -> int:
        """Return the last line that moves, casts or freezes a model."""
        lines = [
            self.line(call)
            for call in self._calls_on.get(name, [])
            if self.code(call.func).endswith((".to", ".requires_grad_", ".eval"))
            and self.loop_around(call) is None
        ]
        return max(lines, default=0)
