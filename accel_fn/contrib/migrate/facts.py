"""Facts of a script that uses accelerate: its accelerators, prepared objects and accumulation."""

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

from accel_fn.contrib.migrate.table import TABLE

_KINDS = {
    "scheduler": r"sched|LR$",
    "optimizer": r"optim|^opt|Adam|SGD|Adafactor|RMSprop|Lion",
    "loader": r"loader|^dl|_dl$",
}
"""Patterns that find the kind of an argument of `prepare`, by its name or by the call that makes
it. An argument that matches no pattern is a model."""
_SET_SEED_OF_TRANSFORMERS = "transformers.set_seed"
"""Scripts import this function instead of accelerate's `set_seed`, which does the same."""
_RANK = r"[\w.]+\.(local_)?process_index"
_AVERAGE = r"EMA|ExponentialMovingAverage|AveragedModel|ModelEma"
_DRAWING = r"torch\.(rand|normal|bernoulli|multinomial)|\brandom\.\w+\(|\.(normal_|uniform_)\("
_LENGTHS = r"(?i)step|warmup|batch|lr\b|rate|loss|len|iter|epoch|T_max|sched"
"""Patterns for the names of schedule lengths, batch sizes and rates."""
Loop: TypeAlias = cst.For | cst.While
Span = tuple[int, int]
Edit = tuple[int, int, str]
"""The beginning and the end of a part of the source, and the new text."""
_TOKENS = r"CausalLM|Seq2Seq|ignore_index|-100|num_items_in_batch"


class Facts:
    """Facts about the whole script. The replacement of a line depends on them."""

    def __init__(self, wrapper: MetadataWrapper) -> None:
        self.module = wrapper.module
        self.text = wrapper.module.code
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._positions = wrapper.resolve(PositionProvider)
        self._qualified = wrapper.resolve(QualifiedNameProvider)
        self._nodes = list(walk(self.module))
        self._calls = [node for node in self._nodes if isinstance(node, cst.Call)]

    def code(self, node: cst.CSTNode) -> str:
        """Return the source of a node, on one line."""
        if isinstance(node, cst.Name) and not node.lpar:
            return str(node.value)
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
        # libcst stores a function instead of names that it has not computed yet.
        for each in names() if callable(names) else names:
            if each.name.startswith("accelerate.") or each.name == _SET_SEED_OF_TRANSFORMERS:
                return str(each.name)
        return None

    @cached_property
    def _assigned(self) -> dict[str, cst.BaseExpression]:
        """Return the value of each assignment, by the source of its target, such as `a, b`."""
        return {
            self.code(target.target): node.value
            for node in self._nodes
            if isinstance(node, cst.Assign)
            for target in node.targets
        }

    @cached_property
    def _accelerators(self) -> set[str]:
        """Return the names of the variables and attributes that hold an accelerator or a state."""
        return {
            "accelerator",
            *self._names_of_made_by("Accelerator"),
            *self._names_of_made_by("PartialState"),
        }

    def _names_of_made_by(self, maker: str) -> set[str]:
        """Return the names that hold an object of a class of accelerate."""
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
            around = self._parents[call]
            if isinstance(around, cst.Assign):
                targets = self.code(around.targets[0].target).strip("()").split(", ")
                found |= {to: found[name] for to, name in zip(targets, names, strict=False)}
        return found

    @cached_property
    def values(self) -> dict[str, str]:
        """Return the script's own names for the placeholders in the table's texts."""
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
    def backwards(self) -> list[cst.Call]:
        """The calls of backward, in order."""
        return self._method_calls("backward")

    @cached_property
    def backward_lines(self) -> list[int]:
        return [self.line(each) for each in self.backwards]

    @cached_property
    def _backward_of(self) -> dict[Loop, list[cst.Call]]:
        """Return the innermost loops around calls of backward, each with its calls."""
        found: dict[Loop, list[cst.Call]] = {}
        for call in self.backwards:
            loop = self.loop_around(call)
            if loop is not None:
                found.setdefault(loop, []).append(call)
        return found

    @cached_property
    def losses(self) -> set[str]:
        """Return the names of variables that are the argument of backward."""
        return {self.code(each.args[0].value) for each in self.backwards if each.args}

    @cached_property
    def training_loops(self) -> dict[Loop, str]:
        """Return the loops in which the script trains, each with its loader."""
        loaders = {loop: self._loader_of(loop) for loop in self._backward_of}
        return {loop: loader for loop, loader in loaders.items() if loader}

    def _loader_of(self, loop: Loop) -> str:
        """Return the loader that a loop reads, by its head or by `next`; "" if there is none."""
        given = [loop.iter] if isinstance(loop, cst.For) else []
        given += [
            each.args[0].value
            for each in walk(loop.body)
            if isinstance(each, cst.Call) and self.code(each.func) == "next" and each.args
        ]
        return next((name for each in given if (name := self._loader_in(each))), "")

    def _loader_in(self, node: cst.BaseExpression) -> str:
        """Return the first loader in an expression, or in what makes one of its variables."""
        names = [
            self.code(each) for each in walk(node) if isinstance(each, cst.Name | cst.Attribute)
        ]
        for name in names:
            made = self._assigned.get(name)
            around = made is not None and not last(self.maker(name)).endswith("DataLoader")
            if around and made is not None and name not in map(self.code, walk(made)):
                is_prepared = isinstance(made, cst.Call) and self.maker(name).endswith("prepare")
                inner = "" if is_prepared else self._loader_in(made)
                if inner:
                    return inner
            if self.kind(name) == "loader":
                return name
        return ""

    @cached_property
    def training_loaders(self) -> list[str]:
        return list(dict.fromkeys(self.training_loops.values()))

    @cached_property
    def counting_loops(self) -> dict[Loop, str]:
        """Return the loops over an update's batches, `for _ in range(k): next(...)`, by k."""
        found = {}
        for loop in self._backward_of:
            outer = self.loop_around(loop)
            over = self.code(loop.iter) if isinstance(loop, cst.For) else ""
            steps = any(name in self.code(loop.body) for name in self._optimizer_steps)
            if outer is not None and over.startswith("range(") and not steps:
                found[loop] = over.removeprefix("range(").removesuffix(")")
        return found

    @cached_property
    def epoch_loops(self) -> set[cst.For]:
        """Return the loops around the training loops, which iterate over epochs."""
        outer = [
            self.loop_around(loop) for loop in self.training_loops if isinstance(loop, cst.For)
        ]
        return {
            each
            for each in outer
            if isinstance(each, cst.For)
            and self.code(each.iter).startswith(("range(", "tqdm(range(", "trange("))
        } - self.counting_loops.keys()

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

    def line(self, node: cst.CSTNode) -> int:
        """Return the number of a node's first line."""
        return int(self._positions[node].start.line)

    def head(self, node: cst.CSTNode) -> str:
        """Return the first line of a compound statement."""
        return str(self.module.code_for_node(node)).strip().splitlines()[0].rstrip(":")

    def stands_for_itself(self, node: cst.CSTNode) -> bool:
        """Return whether a node is a variable, or an attribute of one that is read whole."""
        parent = self._parents[node]
        is_part = isinstance(parent, cst.Attribute) and node is parent.attr
        return not is_part and not (isinstance(parent, cst.Arg) and node is parent.keyword)

    # ---- models, optimizers and averages

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

    @cached_property
    def averages(self) -> set[str]:
        """Return the variables that hold an average of parameters, such as an EMA."""
        return {
            name
            for name, value in self._assigned.items()
            if isinstance(value, cst.Call) and re.search(_AVERAGE, self.code(value.func))
        }

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
        """Return the models that are placed or frozen and not trained."""
        placed = {
            name
            for name, calls in self._calls_on.items()
            for call in calls
            if isinstance(self._parents[call], cst.Expr)
            and self.code(call.func).endswith((".to", ".cuda"))
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

    @cached_property
    def renamed(self) -> dict[str, str]:
        """Return the names of prepare's results, with their arguments' names if these differ."""
        found: dict[str, str] = {}
        for call in self._method_calls("prepare"):
            names = [self.code(each.value) for each in call.args if not each.star]
            around = self._parents[call]
            if isinstance(around, cst.Assign):
                targets = self.code(around.targets[0].target).strip("()").split(", ")
                pairs = zip(targets, names, strict=False)
                found |= {to: name for to, name in pairs if to != name}
        return found

    @cached_property
    def prepare_lines(self) -> list[int]:
        return [self._positions[each].end.line for each in self._method_calls("prepare")]

    @cached_property
    def _optimizer_steps(self) -> dict[str, list[int]]:
        """Return the calls `optimizer.step`, and the lines of each."""
        found: dict[str, list[int]] = {}
        for call in self._calls:
            name = self.code(call.func.value) if isinstance(call.func, cst.Attribute) else ""
            if self.kinds.get(name) == "optimizer" and last(self.code(call.func)) == "step":
                found.setdefault(self.code(call.func), []).append(self.line(call))
        return found

    def steps_between(self, first: int, end: int | None) -> list[str]:
        """Return the optimizers that step between two lines, in order."""
        steps = [
            (line, name.removesuffix(".step"))
            for name, lines in self._optimizer_steps.items()
            for line in lines
            if first < line and (end is None or line < end)
        ]
        return list(dict.fromkeys(name for _, name in sorted(steps)))

    def functions_that_draw(self, nodes: Iterable[cst.CSTNode]) -> list[str]:
        """Return the functions of the script that these nodes call and that draw random numbers."""
        called = [last(self.code(each.func)) for each in nodes if isinstance(each, cst.Call)]
        return [
            each.name.value
            for each in self._nodes
            if isinstance(each, cst.FunctionDef)
            and each.name.value in called
            and re.search(_DRAWING, self.code(each.body))
        ]

    def unwraps(self, call: cst.Call) -> bool:
        """Return whether a call takes a model out of its wrapper."""
        return last(self.code(call.func)) in (
            "unwrap_model",
            "extract_model_from_parallel",
        ) and bool(call.args)

    def is_local_elsewhere(self, name: str, node: cst.CSTNode) -> bool:
        """Return whether a name is local to a function around the node that never prepares."""
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

    def reads_after(
        self, call: cst.Call, names: Iterable[str], leave_out: set[cst.CSTNode]
    ) -> Iterator[tuple[str, int]]:
        """Yield these names, each with the first line that reads it in the loop after a call."""
        loop = self.loop_around(call)
        left = {*names}
        for node in walk(loop.body) if loop is not None else ():
            is_name = isinstance(node, cst.Name) and node.value in left and node not in leave_out
            if is_name and self.stands_for_itself(node) and self.line(node) > self.line(call):
                left.discard(self.code(node))
                if not isinstance(self._parents[node], cst.AssignTarget):
                    yield self.code(node), self.line(node)

    # ---- lengths and numbers

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

    @cached_property
    def prefix(self) -> str:
        """Return `self.` if the script keeps its accelerator as an attribute, else ""."""
        owners = [self.code(each.func) for each in self.backwards]
        return "self." if owners and owners[0].startswith("self.") else ""

    @cached_property
    def step(self) -> str:
        """Return a name for the step that the script has not used."""
        return "train_step" if self.assigns("step") or self.assigns("self.step") else "step"

    def is_number_of_batches(self, node: cst.BaseExpression) -> bool:
        """Return whether an expression is the number of batches of an update."""
        is_own = isinstance(node, cst.Attribute) and self.is_accelerator(node.value)
        if is_own and self.code(node).endswith(".gradient_accumulation_steps"):
            return True
        return bool(self.num_microbatches) and self.code(node) == self.num_microbatches

    def divisor(self, node: cst.CSTNode, loss: str) -> cst.BaseExpression | None:
        """Return the divisor of `loss = ... / k` or `loss /= k`; None for another statement."""
        if isinstance(node, cst.AugAssign) and isinstance(node.operator, cst.DivideAssign):
            return node.value if self.code(node.target) == loss else None
        value = node.value if isinstance(node, cst.Assign) else None
        if not isinstance(value, cst.BinaryOperation) or not isinstance(value.operator, cst.Divide):
            return None
        assert isinstance(node, cst.Assign)
        return value.right if self.code(node.targets[0].target) == loss else None

    def only_divides(self, node: cst.CSTNode, loss: str) -> bool:
        """Return whether a statement is `loss = loss / k` or `loss /= k`."""
        if isinstance(node, cst.Assign) and isinstance(node.value, cst.BinaryOperation):
            return self.code(node.value.left) == loss and self.divisor(node, loss) is not None
        return self.divisor(node, loss) is not None

    def only_moves(self, node: cst.Attribute) -> bool:
        """Return whether the statement around `accelerator.device` only moves a variable there."""
        call = self._parents[self._parents[node]]
        if not isinstance(call, cst.Call) or not isinstance(call.func, cst.Attribute):
            return False
        if call.func.attr.value not in ("to", "cuda") or not self.is_device(node):
            return False
        around = self._parents[call]
        moved = self.code(call.func.value)
        if isinstance(around, cst.Assign):
            return self.code(around.targets[0].target) == moved
        return isinstance(around, cst.Expr)

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

    @cached_property
    def resumes(self) -> bool:
        return bool(self._method_calls("load_state"))

    def makes_loader(self, call: cst.Call) -> bool:
        """Return whether a call makes a loader that the script trains on."""
        around = self._parents[call]
        return (
            isinstance(around, cst.Assign)
            and last(self.code(call.func)).endswith("DataLoader")
            and self.code(around.targets[0].target)
            in [self.renamed.get(each, each) for each in self.training_loaders]
        )

    @cached_property
    def has_sampler(self) -> bool:
        """Return whether a loader that the script trains on has its own sampler."""
        names = {
            each.keyword.value
            for call in self._calls
            if self.makes_loader(call)
            for each in call.args
            if each.keyword is not None
        }
        return bool(names & {"sampler", "batch_sampler"})

    @cached_property
    def schedulers_of_epochs(self) -> set[str]:
        """Return the schedulers that the script steps once per epoch, after its batches."""
        return {
            name
            for call in self._calls
            if isinstance(call.func, cst.Attribute)
            and call.func.attr.value == "step"
            and self.kinds.get(name := self.code(call.func.value)) == "scheduler"
            and self.loop_around(call) in self.epoch_loops
        }

    @cached_property
    def evaluation_loops(self) -> dict[cst.For, str]:
        """Return the loops in which the script gathers and does not train, each with its loader."""
        found = {}
        for call in self._method_calls("gather", "gather_for_metrics"):
            loop = self.loop_around(call)
            is_for = isinstance(loop, cst.For) and loop not in self._backward_of
            loader = self._loader_in(loop.iter) if isinstance(loop, cst.For) and is_for else ""
            if isinstance(loop, cst.For) and loader:
                found[loop] = loader
        return found

    def evaluates(self, node: cst.CSTNode) -> bool:
        """Return whether a node is in a loop of an evaluation."""
        return any(each in self.evaluation_loops for each in self.ancestors(node))

    @cached_property
    def counting_ifs(self) -> dict[cst.If, str]:
        """Return the `if`s that run `optimizer.step` once per k batches, each with its k."""
        found = {}
        for node in self._nodes:
            name = self.code(node.value) if isinstance(node, cst.Attribute) else ""
            if self.kinds.get(name) == "optimizer" and node.attr.value == "step":
                for each in self.ancestors(node):
                    number = self._modulus(each.test) if isinstance(each, cst.If) else ""
                    if number:
                        found[each] = number
        return found

    def _modulus(self, test: cst.CSTNode) -> str:
        for node in walk(test):
            if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Modulo):
                return self.code(node.right)
        return ""

    def trains(self, node: cst.CSTNode) -> bool:
        """Return whether a node is in a loop that trains."""
        return any(each in self._backward_of for each in self.ancestors(node))

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
        counted = [*self.counting_ifs.values(), *self.counting_loops.values()]
        return next(iter(counted), "") or self._divisor_of_late_steps

    @cached_property
    def is_grouped(self) -> bool:
        """Return whether updates take several batches of a loader of unknown batch size."""
        made = [each for each in self._calls if self.makes_loader(each)]
        functions = {self.function_around(each) for each in self._method_calls("prepare")}
        is_shown = any(
            all(each.keyword is None or each.keyword.value != "batch_sampler" for each in call.args)
            and (self.function_around(call) in functions or self.num_microbatches.isdigit())
            for call in made
        )
        return bool(self.num_microbatches) and not is_shown

    def factored(self, node: cst.CSTNode) -> str | None:
        """Return the source of a length, size or rate without factors that a step does not need.

        These factors are the number of processes and, in a division, the number of batches of an
        update. Return None if there is no such factor.
        """
        products = [each for each in walk(node) if isinstance(each, cst.BinaryOperation)]
        if not products:
            return None
        around = self._parents[node]
        if isinstance(node, cst.Assign):
            name = self.code(node.targets[0].target)
        elif isinstance(node, cst.AugAssign):
            name = self.code(node.target)
        elif isinstance(node, cst.Arg) and isinstance(around, cst.Call):
            name = self.code(node.keyword or around.func)
        else:
            return None
        text = self.code(node)
        if not re.search(_LENGTHS, name) and "len(" not in text:
            return None
        keeps = self.is_grouped and self.line(node) < min(self.prepare_lines, default=0)
        edits = [
            edit for each in products for edit in self._without_factor(each, divides=not keeps)
        ]
        return joined(self.edited(node, edits).splitlines()).replace(" )", ")") if edits else None

    def _without_factor(self, node: cst.BinaryOperation, *, divides: bool) -> Iterator[Edit]:
        """Yield the edit that removes a factor from a product or a quotient, if it has one."""
        is_product = isinstance(node.operator, cst.Multiply)
        is_quotient = isinstance(node.operator, cst.Divide | cst.FloorDivide)
        (_, left_end), (right_start, _) = self.span(node.left), self.span(node.right)
        of_ranks = (is_product or is_quotient) and self.is_num_processes(node.right)
        if of_ranks or (is_quotient and divides and self.is_number_of_batches(node.right)):
            yield left_end, self.span(node.right)[1], ""
        elif is_product and self.is_num_processes(node.left):
            yield self.span(node.left)[0], right_start, ""

    def span(self, node: cst.CSTNode) -> Span:
        """Return where the source of a node begins and ends."""
        where = self._positions[node]
        first, end = (self._offsets[at.line] + at.column for at in (where.start, where.end))
        return first, end

    @cached_property
    def _offsets(self) -> list[int]:
        """Return the offsets at which lines begin, by line number."""
        lines = self.text.splitlines(keepends=True)
        return [0, *accumulate(map(len, lines), initial=0)]

    def edited(self, node: cst.CSTNode, edits: Iterable[Edit]) -> str:
        """Return the source of a node with these edits, without edits inside of other edits."""
        start, end = self.span(node)
        at = self._positions[node].start.column
        text, done = " " * at, start
        for first, last, new in sorted(edits, key=lambda edit: (edit[0], -edit[1])):
            if first >= done:
                text += self.text[done:first] + new
                done = last
        return textwrap.dedent(text + self.text[done:end]).strip()

    def is_num_processes(self, node: cst.CSTNode) -> bool:
        """Return whether an expression is the number of processes."""
        is_own = isinstance(node, cst.Attribute) and node.attr.value == "num_processes"
        return is_own and self.code(node).split(".")[-2] in (*self._accelerators, "state")

    @property
    def _divisor_of_late_steps(self) -> str:
        """Return the divisor of a loss whose optimizer steps under an `if`; "" for other losses."""
        for loop, calls in self._backward_of.items():
            late = any(
                isinstance(each, cst.If)
                and any(name in self.code(each) for name in self._optimizer_steps)
                for each in walk(loop.body)
            )
            for node in walk(loop.body) if late else ():
                for call in calls:
                    divisor = self.divisor(node, self.code(call.args[0].value) if call.args else "")
                    if divisor is not None:
                        return self.code(divisor)
        return ""

    @cached_property
    def traits(self) -> set[str]:
        """Return the script's traits, by which the table selects its differences from accel_fn."""
        text = self.text
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
        """Return whether a loop calls zero_grad before its backward."""
        return any(
            self._positions[node].start.line < self._positions[call].start.line
            for loop, calls in self._backward_of.items()
            for call in calls
            for node in walk(loop.body)
            if isinstance(node, cst.Attribute) and node.attr.value == "zero_grad"
        )

    def names_in_making(self, name: str) -> set[str]:
        """Return the names in the expression that makes an object."""
        made = self._assigned.get(name)
        return {self.code(each) for each in walk(made)} if made is not None else set()

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
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
