"""Facts of a script that uses accelerate: its accelerators, prepared objects and accumulation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property

import libcst as cst
from libcst.metadata import (
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    QualifiedNameProvider,
)

from accel_fn.contrib.migrate.table import TABLE

_KINDS = {
    "scheduler": r"sched|LR$",
    "optimizer": r"optim|^opt|Adam|SGD|Adafactor|RMSprop|Lion",
    "loader": r"loader|^dl|_dl$",
}
"""Patterns for the kind of an argument of `prepare`, by its name or by the call that makes it.

An argument that matches no pattern is a model.
"""
_SET_SEED_OF_TRANSFORMERS = "transformers.set_seed"
"""Scripts import this function in place of accelerate's `set_seed`, which does the same."""
_RANK = r"[\w.]+\.(local_)?process_index"
_TOKENS = r"CausalLM|Seq2Seq|ignore_index|-100|num_items_in_batch"


class Facts:
    """Facts about the whole script. The replacement of a line depends on them."""

    def __init__(self, wrapper: MetadataWrapper) -> None:
        self.module = wrapper.module
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._positions = wrapper.resolve(PositionProvider)
        self._qualified = wrapper.resolve(QualifiedNameProvider)
        self._nodes = list(walk(self.module))
        self._calls = [node for node in self._nodes if isinstance(node, cst.Call)]

    def code(self, node: cst.CSTNode) -> str:
        """Return the source of a node, on one line."""
        return joined(self.module.code_for_node(node).splitlines())

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
        """Return the class or function of accelerate that a node names; None for part of a name."""
        parent = self._parents[node]
        if isinstance(parent, cst.Attribute) and self._imported(parent):
            return None
        name = self._imported(node)
        if name is None:
            return None
        parts = name.split(".")[1:]
        return next((part for part in parts if part in TABLE), parts[-1] if parts else None)

    def _imported(self, node: cst.CSTNode) -> str | None:
        names = self._qualified.get(node, ())
        # libcst has a function in place of the names that it has not computed yet.
        for each in names() if callable(names) else names:
            if each.name.startswith("accelerate.") or each.name == _SET_SEED_OF_TRANSFORMERS:
                return str(each.name)
        return None

    @cached_property
    def _assigned(self) -> dict[str, cst.BaseExpression]:
        """The value of each assignment, by the source of its target, such as `a, b`."""
        return {
            self.code(target.target): node.value
            for node in self._nodes
            if isinstance(node, cst.Assign)
            for target in node.targets
        }

    @cached_property
    def _accelerators(self) -> set[str]:
        """The names of the variables and attributes that hold an accelerator or a state."""
        return {
            "accelerator",
            *self._names_of_made_by("Accelerator"),
            *self._names_of_made_by("PartialState"),
        }

    def _names_of_made_by(self, maker: str) -> set[str]:
        """Return the names to which an object of a class of accelerate is assigned."""
        return {
            last(name)
            for name, value in self._assigned.items()
            if isinstance(value, cst.Call) and self.name_in_accelerate(value.func) == maker
        }

    def is_accelerator(self, node: cst.CSTNode) -> bool:
        """Return whether a node is a variable or an attribute that holds an Accelerator."""
        is_name = isinstance(node, cst.Name | cst.Attribute)
        return is_name and last(self.code(node)) in self._accelerators

    def _method_calls(self, *names: str) -> list[cst.Call]:
        """Return the calls of methods of an accelerator."""
        return [
            call
            for call in self._calls
            if isinstance(call.func, cst.Attribute)
            and call.func.attr.value in names
            and self.is_accelerator(call.func.value)
        ]

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
        """The kind of each name that is an argument of prepare or takes its result."""
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
            around = self._parents[call]
            if isinstance(around, cst.Assign):
                targets = self.code(around.targets[0].target).strip("()").split(", ")
                found |= {to: found[name] for to, name in zip(targets, names, strict=False)}
        return found

    @cached_property
    def values(self) -> dict[str, str]:
        """Names in the script that fill the placeholders in the table's texts."""
        found = {kind: kind for kind in ("model", "optimizer", "loader", "scheduler")}
        found |= {kind: name for name, kind in reversed(self.kinds.items())}
        if self.training_loaders:
            found["loader"] = self.training_loaders[0]
        return {**found, "k": self.num_microbatches, "init": ", ".join(self._init_arguments())}

    def _init_arguments(self) -> Iterator[str]:
        """Yield the arguments of af.init."""
        cpu = self._constructor.get("cpu")
        if cpu not in (None, "False"):
            yield 'device="cpu"' if cpu == "True" else f'device="cpu" if {cpu} else None'
        for call in self._calls:
            if self.name_in_accelerate(call.func) == "set_seed" and call.args:
                # `af.init` takes the seed of the run, so leave out the rank's number.
                seed = re.sub(rf" *\+ *{_RANK}", "", self.code(call.args[0].value))
                yield f"seed={seed}"
                break

    @cached_property
    def _backward_of(self) -> dict[cst.For, cst.Call]:
        """The innermost loops around calls of backward, each with its call."""
        found = {}
        for call in self._method_calls("backward"):
            loop = self._loop_around(call)
            if loop is not None:
                found[loop] = call
        return found

    @cached_property
    def losses(self) -> set[cst.Assign]:
        """The lines that compute the argument of backward."""
        return {
            node
            for loop, call in self._backward_of.items()
            for node in walk(loop.body)
            if isinstance(node, cst.Assign)
            and call.args
            and self.code(node.targets[0].target) == self.code(call.args[0].value)
            and not self._divisor(node.value, call)
        }

    @cached_property
    def training_loops(self) -> dict[cst.For, str]:
        """The loops in which the script trains, and the loader that each goes over."""
        loaders = {loop: self._loader_of(loop) for loop in self._backward_of}
        return {loop: loader for loop, loader in loaders.items() if loader}

    def _loader_of(self, loop: cst.For) -> str:
        """Return the first loader in the head of a loop; empty if there is none."""
        names = (self.code(each) for each in walk(loop.iter) if isinstance(each, cst.Name))
        return next((name for name in names if self.kind(name) == "loader"), "")

    @cached_property
    def training_loaders(self) -> list[str]:
        return list(dict.fromkeys(self.training_loops.values()))

    @cached_property
    def epoch_loops(self) -> set[cst.For]:
        """The loops around the training loops, which go over epochs."""
        return {outer for loop in self.training_loops if (outer := self._loop_around(loop))}

    def _loop_around(self, node: cst.CSTNode) -> cst.For | None:
        return next((each for each in self._ancestors(node) if isinstance(each, cst.For)), None)

    @cached_property
    def resumes(self) -> bool:
        return bool(self._method_calls("load_state"))

    def makes_loader(self, call: cst.Call) -> bool:
        """Return whether a call makes a loader that the script trains on."""
        around = self._parents[call]
        return (
            isinstance(around, cst.Assign)
            and last(self.code(call.func)).endswith("DataLoader")
            and self.code(around.targets[0].target) in self.training_loaders
        )

    @cached_property
    def schedulers_of_epochs(self) -> set[str]:
        """The schedulers that the script steps once an epoch, after its batches."""
        return {
            name
            for call in self._calls
            if isinstance(call.func, cst.Attribute)
            and call.func.attr.value == "step"
            and self.kinds.get(name := self.code(call.func.value)) == "scheduler"
            and self._loop_around(call) in self.epoch_loops
        }

    @cached_property
    def evaluation_loops(self) -> dict[cst.For, str]:
        """The loops in which the script gathers and does not train, and the loader of each loop."""
        found = {}
        for call in self._method_calls("gather", "gather_for_metrics"):
            loop = self._loop_around(call)
            loader = self._loader_of(loop) if loop is not None else ""
            if loop is not None and loop not in self._backward_of and loader:
                found[loop] = loader
        return found

    def evaluates(self, node: cst.CSTNode) -> bool:
        """Return whether a node is in a loop of an evaluation."""
        return any(each in self.evaluation_loops for each in self._ancestors(node))

    @cached_property
    def counting_ifs(self) -> dict[cst.If, str]:
        """The `if`s that run `optimizer.step` once in so many batches, each with this number."""
        found = {}
        for node in self._nodes:
            name = self.code(node.value) if isinstance(node, cst.Attribute) else ""
            if self.kinds.get(name) == "optimizer" and node.attr.value == "step":
                for each in self._ancestors(node):
                    number = self._modulus(each.test) if isinstance(each, cst.If) else ""
                    if number:
                        found[each] = number
        return found

    def _modulus(self, test: cst.CSTNode) -> str:
        for node in walk(test):
            if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Modulo):
                return self.code(node.right)
        return ""

    @cached_property
    def divisions(self) -> dict[cst.Assign, str]:
        """The lines that divide the argument of backward, `loss = loss / 4`, and the divisors."""
        return {
            node: divisor
            for loop, call in self._backward_of.items()
            for node in walk(loop.body)
            if isinstance(node, cst.Assign) and (divisor := self._divisor(node.value, call))
        }

    def _divisor(self, value: cst.BaseExpression, call: cst.Call) -> str:
        """Return the divisor in `value`, which divides the argument of `call`; "" without a division."""
        if isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.Divide):
            loss = [self.code(each.value) for each in call.args[:1]]
            if loss == [self.code(value.left)]:
                return self.code(value.right)
        return ""

    def trains(self, node: cst.CSTNode) -> bool:
        """Return whether a node is in a loop that trains."""
        return any(each in self._backward_of for each in self._ancestors(node))

    @cached_property
    def _constructor(self) -> dict[str, str]:
        """The arguments by name with which the script makes accelerators."""
        return {
            each.keyword.value: self.code(each.value)
            for call in self._calls
            if self.name_in_accelerate(call.func) == "Accelerator"
            for each in call.args
            if each.keyword is not None
        }

    @cached_property
    def num_microbatches(self) -> str:
        """The number of batches of an update, as the script writes it; empty if it is one."""
        for call in self._calls:
            for each in call.args:
                name = each.keyword.value if each.keyword is not None else ""
                maker = self.name_in_accelerate(call.func)
                if (maker, name) in (
                    ("Accelerator", "gradient_accumulation_steps"),
                    ("GradientAccumulationPlugin", "num_steps"),
                ):
                    return "" if self.code(each.value) == "1" else self.code(each.value)
        return next(iter(self.counting_ifs.values()), "")

    @cached_property
    def traits(self) -> set[str]:
        """The traits of the script, as the table names them, that select its differences from accel_fn."""
        text = self.module.code
        kinds = list(self.kinds.values())
        scales = self._constructor.get("mixed_precision", '"no"').strip("\"'") not in ("no", "bf16")
        accumulates = bool(self.num_microbatches)
        holds = {
            "accumulates": accumulates,
            "counts tokens": bool(re.search(_TOKENS, text)),
            "zero_grad before backward": accumulates and self._clears_first,
            "several optimizers": scales and kinds.count("optimizer") > 1,
            "fused": scales and "fused=True" in text,
            "samples in its own order": bool(re.search(r"seedable|sampler=", text)),
            "equal seeds": not re.search(rf"device_specific|set_seed\(.*{_RANK}", text),
            "schedules": "scheduler" in kinds,
            "on the CPU": "cpu" in self._constructor,
            "automatic names": "automatic_checkpoint_naming" in text,
            "several models": accumulates and kinds.count("model") > 1,
            "several accelerators": len(self._names_of_made_by("Accelerator")) > 1,
        }
        return {name for name, value in holds.items() if value}

    @cached_property
    def _clears_first(self) -> bool:
        """Whether a loop calls zero_grad before its backward."""
        return any(
            self._positions[node].start.line < self._positions[call].start.line
            for loop, call in self._backward_of.items()
            for node in walk(loop.body)
            if isinstance(node, cst.Attribute) and node.attr.value == "zero_grad"
        )

    def _ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes that enclose a node, the innermost first."""
        while not isinstance(node, cst.Module):
            node = self._parents[node]
            yield node


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
    """Join lines of source to one."""
    return " ".join(each.strip() for each in lines).replace("( ", "(").strip()
