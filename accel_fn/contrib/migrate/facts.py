"""Facts about a script's loops: batches of an update, schedules, and traits of the script."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property

import libcst as cst

from accel_fn.contrib.migrate.objects import RANK, Objects
from accel_fn.contrib.migrate.source import Edit, Loop, joined, last, walk

_DRAWING = r"torch\.(rand|normal|bernoulli|multinomial)|\brandom\.\w+\(|\.(normal_|uniform_)\("
_LENGTHS = r"(?i)step|warmup|batch|lr\b|rate|loss|len|iter|epoch|T_max|sched"
"""Patterns for the names of schedule lengths, batch sizes and rates."""
_TOKENS = r"CausalLM|Seq2Seq|ignore_index|-100|num_items_in_batch"


class Facts(Objects):
    """Facts about the whole script. The replacement of a line depends on them."""

    @cached_property
    def values(self) -> dict[str, str]:
        """Return the script's own names for the placeholders in the table's texts."""
        found = {kind: kind for kind in ("model", "optimizer", "loader", "scheduler")}
        found |= {kind: name for name, kind in reversed(self.kinds.items())}
        if self.training_loaders:
            found["loader"] = self.training_loaders[0]
        return {**found, "k": self.num_microbatches, "init": ", ".join(self._init_arguments())}

    @cached_property
    def backwards(self) -> list[cst.Call]:
        """Return the calls of `Accelerator.backward`, in order."""
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
        """Return the loader that a loop iterates over or passes to `next`; "" if there is none."""
        given = [loop.iter] if isinstance(loop, cst.For) else []
        given += [
            each.args[0].value
            for each in walk(loop.body)
            if isinstance(each, cst.Call) and self.code(each.func) == "next" and each.args
        ]
        return next((name for each in given if (name := self.loader_in(each))), "")

    def loader_in(self, node: cst.BaseExpression) -> str:
        """Return the first loader in an expression, or in the value of one of its variables; else ""."""
        names = [
            self.code(each) for each in walk(node) if isinstance(each, cst.Name | cst.Attribute)
        ]
        for name in names:
            made = self._assigned.get(name)
            around = made is not None and not last(self.maker(name)).endswith("DataLoader")
            if around and made is not None and name not in map(self.code, walk(made)):
                is_prepared = isinstance(made, cst.Call) and self.maker(name).endswith("prepare")
                inner = "" if is_prepared else self.loader_in(made)
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
        """Return the loops over an update's batches, `for _ in range(k): next(...)`, each with its k."""
        found = {}
        for loop in self._backward_of:
            outer = self.loop_around(loop)
            over = self.code(loop.iter) if isinstance(loop, cst.For) else ""
            if outer is not None and over.startswith("range(") and not self._steps_in(loop):
                found[loop] = over.removeprefix("range(").removesuffix(")")
        return found

    def _steps_in(self, loop: Loop) -> bool:
        return any(name in self.code(loop.body) for name in self._optimizer_steps)

    def steps_below(self, loop: Loop) -> bool:
        """Return whether the optimizers step below a loop that does not count the batches of an update."""
        return not self._steps_in(loop) and loop not in self.counting_loops

    @cached_property
    def epoch_loops(self) -> set[cst.For]:
        """Return the loops over epochs: loops over a range around training loops."""
        outer = [
            self.loop_around(loop) for loop in self.training_loops if isinstance(loop, cst.For)
        ]
        return {
            each
            for each in outer
            if isinstance(each, cst.For)
            and self.code(each.iter).startswith(("range(", "tqdm(range(", "trange("))
        } - self.counting_loops.keys()

    @cached_property
    def epoch_numbers(self) -> set[cst.CSTNode]:
        """Return the nodes that read the number of the epoch in a loop over epochs."""
        return {
            node
            for loop in self.epoch_loops
            for node in walk(loop.body)
            if isinstance(node, cst.Name)
            and node.value == self.code(loop.target) != "_"
            and self.stands_for_itself(node)
        }

    @cached_property
    def _optimizer_steps(self) -> dict[str, list[int]]:
        """Return the lines that step an optimizer, by the source of the call: `optimizer.step`."""
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

    def reads_after(
        self, call: cst.Call, names: Iterable[str], leave_out: set[cst.CSTNode]
    ) -> Iterator[tuple[str, int]]:
        """Yield those of these names that the loop reads after a call, each with the first such line."""
        loop = self.loop_around(call)
        left = {*names}
        for node in walk(loop.body) if loop is not None else ():
            is_name = isinstance(node, cst.Name) and node.value in left and node not in leave_out
            if is_name and self.stands_for_itself(node) and self.line(node) > self.line(call):
                left.discard(self.code(node))
                if not isinstance(self.parents[node], cst.AssignTarget):
                    yield self.code(node), self.line(node)

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

    def makes_loader(self, call: cst.Call) -> bool:
        """Return whether a call makes a loader that the script trains on."""
        around = self.parents[call]
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
            is_for = isinstance(loop, cst.For) and call.args and loop not in self._backward_of
            loader = self.loader_in(loop.iter) if isinstance(loop, cst.For) and is_for else ""
            if isinstance(loop, cst.For) and loader:
                found[loop] = loader
        return found

    def gathers_in(self, loop: cst.For) -> list[cst.Call]:
        """Return the calls in a loop that gather rows."""
        calls = self._method_calls("gather", "gather_for_metrics")
        return [each for each in calls if each.args and self.loop_around(each) is loop]

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

    def holds_for_first(self, node: cst.If) -> bool:
        """Return whether a test is `i % k == 0` in `for i, batch in enumerate(loader)`."""
        loop = self.loop_around(node)
        if not isinstance(loop, cst.For) or not isinstance(loop.iter, cst.Call):
            return False
        from_zero = self.code(loop.iter.func) == "enumerate" and len(loop.iter.args) == 1
        count = re.escape(self.code(loop.target).strip("()").split(",")[0])
        tested = re.search(rf"(?<![\w.+] ){count} *% *[\w.]+ *== *0\b", self.code(node.test))
        return from_zero and tested is not None

    def _modulus(self, test: cst.CSTNode) -> str:
        for node in walk(test):
            if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Modulo):
                return self.code(node.right)
        return ""

    def trains(self, node: cst.CSTNode) -> bool:
        """Return whether a node is in a loop that trains."""
        return any(each in self._backward_of for each in self.ancestors(node))

    @cached_property
    def num_microbatches(self) -> str:
        """Return the number of batches of an update, as the script writes it; "" for one batch."""
        for maker, name in (
            ("Accelerator", "gradient_accumulation_steps"),
            ("GradientAccumulationPlugin", "num_steps"),
        ):
            number = self._settings(maker).get(name)
            if number is not None:
                return "" if number == "1" else number
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

    def lengths_of_schedules(self, optimizers: Iterable[str]) -> Iterator[cst.Call]:
        """Yield the calls of `len` that make a schedule shorter when a batch has all samples of an update.

        Each call takes the length of a training loader, to make a schedule of one of these
        optimizers, and the script does not divide by the number of batches of an update.
        """
        loaders = {*self.training_loaders, *map(self.renamed.get, self.training_loaders)}
        for name in self._schedulers_of_updates if self.num_microbatches else ():
            nodes = [node for value in self._behind(name, set()) for node in walk(value)]
            is_divided = any(
                isinstance(each, cst.BinaryOperation)
                and isinstance(each.operator, cst.Divide | cst.FloorDivide)
                and self.is_number_of_batches(each.right)
                for each in nodes
            )
            for node in nodes if self.names_in_making(name) & {*optimizers} else ():
                is_length = isinstance(node, cst.Call) and self.code(node.func) == "len"
                if not is_length or is_divided or self.loader_in(node.args[0].value) not in loaders:
                    continue
                if not self.is_grouped or self.line(node) > max(self.prepare_lines, default=0):
                    yield node

    @cached_property
    def _schedulers_of_updates(self) -> list[str]:
        """Return the schedulers that the script steps once per update."""
        always = {
            self.code(call.func.value)
            for call in self._calls
            if isinstance(call.func, cst.Attribute)
            and call.func.attr.value == "step"
            and not self._branch(call)
        }
        return [
            name
            for name, kind in self.kinds.items()
            if kind == "scheduler"
            and name not in self.schedulers_of_epochs
            and not (name in self.own_schedulers and name in always)
        ]

    def _behind(self, name: str, seen: set[str]) -> Iterator[cst.BaseExpression]:
        """Yield the value of a variable and, recursively, of the variables in it that are not prepared."""
        value = self._assigned.get(name)
        if value is None or name in seen:
            return
        seen.add(name)
        yield value
        for each in walk(value):
            if isinstance(each, cst.Name | cst.Attribute) and self.code(each) not in self.kinds:
                yield from self._behind(self.code(each), seen)

    def factored(self, node: cst.CSTNode) -> str | None:
        """Return the source of a length, size or rate without factors that a step does not need.

        These factors are the number of processes and, in a division, the number of batches of an
        update. Return None if there is no such factor.
        """
        products = [each for each in walk(node) if isinstance(each, cst.BinaryOperation)]
        if not products:
            return None
        around = self.parents[node]
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
        """Yield the edit that removes the number of ranks or batches from a product or quotient."""
        is_product = isinstance(node.operator, cst.Multiply)
        is_quotient = isinstance(node.operator, cst.Divide | cst.FloorDivide)
        (_, left_end), (right_start, _) = self.span(node.left), self.span(node.right)
        of_ranks = (is_product or is_quotient) and self.is_num_processes(node.right)
        if of_ranks or (is_quotient and divides and self.is_number_of_batches(node.right)):
            yield left_end, self.span(node.right)[1], ""
        elif is_product and self.is_num_processes(node.left):
            yield self.span(node.left)[0], right_start, ""

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
        """Return the script's traits, by which `_add_use` selects the differences in the table."""
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
            "equal seeds": not re.search(rf"device_specific|set_seed\(.*{RANK}", text),
            "schedules": "scheduler" in self.prepared_kinds.values(),
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
            self.line(node) < self.line(call)
            for loop, calls in self._backward_of.items()
            for call in calls
            for node in walk(loop.body)
            if isinstance(node, cst.Attribute) and node.attr.value == "zero_grad"
        )
