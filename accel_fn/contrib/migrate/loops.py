"""Find the loss that a loop passes to `backward`; write the loss function that replaces it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile

import libcst as cst

from accel_fn.contrib.migrate.facts import Facts
from accel_fn.contrib.migrate.names import names_in, reads, writes
from accel_fn.contrib.migrate.source import Edit, last, walk

_DRAWS = re.compile(
    r"torch\.(randn|rand|randint|randn_like|rand_like|randint_like|normal|bernoulli|multinomial|randperm)"
    r"|(np|numpy)\.random\.\w+|random\.\w+|.*\.(sample|normal_|uniform_|bernoulli_|random_|exponential_)"
)
"""A pattern for functions that draw random numbers."""
_OF_ROWS = ("torch.randn", "torch.rand", "torch.randint", "torch.randn_like", "torch.rand_like")
"""Functions that may draw a row of random numbers for each row of the batch."""
_LABELS = r"\w*(CausalLM|Seq2SeqLM|ConditionalGeneration|MaskedLM|TokenClassification)"
_TRANSPARENT = ("accumulate", "autocast", "no_sync")
"""accelerate's contexts that the new loop does not need, since a step enters its own."""


@dataclass(frozen=True)
class Loop:
    """The code that replaces one `backward`, the loss before it and the update after it."""

    number: int
    """The line of the backward."""
    after: int
    """The line after which the program is inserted."""
    program: str
    """The loss function, the recipe, the plan and the step."""
    in_loop: str
    """The lines in the loop that replace the forward, the backward and the update."""
    batch: str
    """The name of the batch in the loop."""
    by_hand: list[str]
    """The work that is left to do by hand, each item with its reason."""


@dataclass
class _Draw:
    """A call in the loss that draws random numbers, and the entry of the batch that replaces it."""

    name: str
    code: str
    needs: list[cst.CSTNode] = field(default_factory=list)


class Backward:
    """One call of backward: the statements that compute its argument, and the objects in them."""

    def __init__(self, facts: Facts, call: cst.Call) -> None:
        self.facts, self.call = facts, call
        self.by_hand: dict[str, None] = {}
        self.number = facts.line(call)
        self.loop = facts.loop_around(call)
        self.before = list(self._statements(self._body.body))
        self.loss = self._undivided(call.args[0].value) if call.args else None
        self._values = [] if self.loss is None else [self.loss]
        """The values that the new function returns."""
        self.kept = self._slice({name for each in self._values for name in names_in(each)})

    @cached_property
    def _body(self) -> cst.BaseSuite:
        around = self.loop or self.facts.function_around(self.call)
        return cst.IndentedBlock(self.facts.module.body) if around is None else around.body

    # ---- the statements before the backward

    def _statements(self, block: Iterable[cst.CSTNode]) -> Iterator[cst.CSTNode]:
        """Yield the statements of the loop's body before the backward, without contexts of accelerate."""
        for each in block:
            inside = self.call in set(walk(each))
            if isinstance(each, cst.With) and (inside or self._is_transparent(each)):
                if not self._is_transparent(each):
                    self._note(each, f"`{self.facts.head(each)}` stands around the backward")
                yield from self._statements(each.body.body)
            elif inside and isinstance(each, cst.If | cst.Try):
                self._note(each, f"the backward stands under `{self.facts.head(each)}`")
                yield from self._statements(each.body.body)
            elif isinstance(each, cst.SimpleStatementLine):
                yield from (small for small in each.body if self.call not in set(walk(small)))
            elif not inside:
                yield each
            if inside:
                return

    def _is_transparent(self, node: cst.With) -> bool:
        calls = [each.item for each in node.items]
        return all(
            isinstance(each, cst.Call)
            and isinstance(each.func, cst.Attribute)
            and each.func.attr.value in _TRANSPARENT
            and self.facts.is_accelerator(each.func.value)
            for each in calls
        )

    def _note(self, node: cst.CSTNode, why: str) -> None:
        self.by_hand[f"line {self.facts.line(node)}: {why}"] = None

    def _undivided(self, value: cst.BaseExpression) -> cst.BaseExpression:
        """Return the argument of backward without its division by the number of batches."""
        if isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.Divide):
            if self.facts.is_number_of_batches(value.right):
                return value.left
            self._other_divisor(value, value.right)
        return value

    def _other_divisor(self, node: cst.CSTNode, divisor: cst.BaseExpression) -> None:
        if isinstance(divisor, cst.BaseNumber):
            return
        text = self.facts.code(divisor)
        self._note(
            node,
            f"`{self.facts.code(node)}` divides by another number than the batches of an update: if "
            f"`{text}` counts items of the batch, return (sum, {text}) from loss_fn; if it counts the "
            "batches of an update, leave it out",
        )

    def _divides(self, node: cst.CSTNode) -> bool:
        """Return whether a statement only divides the loss by the number of batches of an update."""
        name = self.facts.code(self.loss) if self.loss is not None else ""
        divisor = self.facts.divisor(node, name)
        if divisor is None:
            return False
        if not self.facts.is_number_of_batches(divisor):
            self._other_divisor(node, divisor)
            return False
        return self.facts.only_divides(node, name)

    def _slice(self, needed: set[str], *, note: bool = True) -> list[cst.CSTNode]:
        """Return the statements before the backward that these names depend on."""
        kept: list[cst.CSTNode] = []
        for each in reversed(self.before):
            written = {*writes(each)}
            if not written & needed or (note and self._divides(each)) or self._takes_batch(each):
                continue
            kept.insert(0, each)
            if isinstance(each, cst.Assign | cst.AnnAssign) and not _in_place(each):
                needed -= written
            if not (note and self._draws_rows(each)):
                needed |= {*reads(each)}
        return kept

    def _draws_rows(self, node: cst.CSTNode) -> bool:
        """Return whether a statement assigns rows of random numbers, such as `x = torch.randn(...)`."""
        call = node.value if isinstance(node, cst.Assign) else None
        return isinstance(call, cst.Call) and self.facts.code(call.func) in _OF_ROWS

    def _takes_batch(self, node: cst.CSTNode) -> bool:
        """Return whether a statement is `batch = next(loader)`, or moves a batch to the device."""
        if not isinstance(node, cst.Assign):
            return False
        value = self._unmoved(node.value)
        is_batch = isinstance(value, cst.Call) and self.facts.code(value.func) == "next"
        return is_batch or self.facts.code(value) == self.facts.code(node.targets[0].target)

    def _unmoved(self, node: cst.BaseExpression) -> cst.BaseExpression:
        """Return the object that an expression moves, such as `x` of `x.to(device)`; else the expression."""
        is_move = (
            isinstance(node, cst.Call)
            and isinstance(node.func, cst.Attribute)
            and node.func.attr.value == "to"
            and len(node.args) == 1
            and self.facts.is_device(node.args[0].value)
        )
        return node.func.value if is_move else node

    def _next_in(self, node: cst.CSTNode) -> cst.Call | None:
        return next(
            (
                each
                for each in walk(node)
                if isinstance(each, cst.Call) and self.facts.code(each.func) == "next"
            ),
            None,
        )

    # ---- the batch

    @cached_property
    def _source(self) -> tuple[str, str]:
        """Return the batch's name in the loop, and the call of `next` that returns it, or ""."""
        for each in self.before:
            if isinstance(each, cst.Assign) and (call := self._next_in(each)) is not None:
                is_whole = self._takes_batch(each)
                target = self.facts.code(each.targets[0].target) if is_whole else "batch"
                return target, self.facts.code(call)
        if isinstance(self.loop, cst.For):
            target = self.loop.target
            is_counted = self.facts.code(self.loop.iter).startswith("enumerate(")
            if is_counted and isinstance(target, cst.Tuple) and len(target.elements) == 2:
                return self.facts.code(target.elements[1].value).strip("()"), ""
            return self.facts.code(target).strip("()"), ""
        return "", ""

    @cached_property
    def batch(self) -> str:
        """Return the name of the batch in the loop."""
        target = self._source[0]
        return target if target.isidentifier() else "batch"

    @cached_property
    def _batch_names(self) -> set[str]:
        return {*re.findall(r"\w+", self._source[0])}

    # ---- the objects in the loss

    @cached_property
    def _nodes(self) -> list[cst.CSTNode]:
        parts = [*self.kept, *self._values]
        return [node for part in parts for node in walk(part)]

    @cached_property
    def _read(self) -> dict[str, None]:
        """Return the names and attributes in the statements of the loss, in order."""
        parts = [*self.kept, *self._values]
        left = [each for each in parts if not self._draws_rows(each)]
        return dict.fromkeys(name for part in left for name in names_in(part))

    @cached_property
    def models(self) -> list[str]:
        """Return the models in the loss that its optimizers train."""
        found = [name for name in self._read if name in self.facts.trained]
        if not found and len(self.facts.trained) == 1:
            return self.facts.trained
        makers = [self.facts.names_in_making(each) for each in self.optimizers]
        own = [
            name
            for name in found
            if any({name, self.facts.renamed.get(name, name)} & each for each in makers)
        ]
        return own or found

    @cached_property
    def frozen(self) -> list[str]:
        return [name for name in self._read if name in self.facts.frozen]

    @cached_property
    def optimizers(self) -> list[str]:
        """Return the optimizers that step between this backward and the next; without any, the first one."""
        return self.own_optimizers or self.facts.steps_between(0, None)[:1]

    @cached_property
    def own_optimizers(self) -> list[str]:
        later = [each for each in self.facts.backward_lines if each > self.number]
        return self.facts.steps_between(self.number, later[0] if later else None)

    # ---- random numbers

    @cached_property
    def draws(self) -> dict[cst.Call, _Draw]:
        """Return the calls in the loss that draw random numbers, each with its replacement in the loop."""
        found: dict[cst.Call, _Draw] = {}
        for statement in self.kept:
            for node in walk(statement):
                if isinstance(node, cst.Call) and _DRAWS.fullmatch(self.facts.code(node.func)):
                    draw = self._draw(statement, node, len(found))
                    if draw is not None:
                        found[node] = draw
        for name in self.facts.functions_that_draw(self._nodes):
            self.by_hand[
                f"`{name}` draws random numbers in the loss, so each rank has its own: draw them in the "
                f"loop by af.draw(..., state, rows={self.batch}), and give it the rows"
            ] = None
        return found

    def _draw(self, statement: cst.CSTNode, call: cst.Call, number: int) -> _Draw | None:
        name = f"drawn_{number}" if number else "drawn"
        if isinstance(statement, cst.Assign) and isinstance(statement.targets[0].target, cst.Name):
            name = statement.targets[0].target.value
            name = name if statement.value is call else f"{name}_drawn"
        function = self.facts.code(call.func)
        if function not in _OF_ROWS:
            self._note(
                call,
                f"`{self.facts.code(call)}` draws in the loss, so each rank has its own numbers: draw them "
                f"in the loop by af.draw(..., state, rows={self.batch}), and put the rows into the batch",
            )
            return None
        if isinstance(statement, cst.BaseCompoundStatement):
            where = f"`{self.facts.head(statement)}`"
            self._note(call, f"a draw under {where}: draw it in the loop under the same condition")
        arguments, needs = self._size(call)
        if not self._is_known(needs):
            self._note(
                call,
                f"`{self.facts.code(call)}` draws numbers of a shape that only the loss knows: write the "
                "shape of one row in place of *SHAPE",
            )
            arguments, needs = self._unknown(call), set()
        code = (
            f"{name} = af.draw(\n    lambda generator, n: {function.removesuffix('_like')}({arguments}, "
            f'generator=generator),\n    state,\n    "{name}",\n    rows={self.batch},\n)'
        )
        return _Draw(name, code, self._slice(set(needs), note=False))

    def _size(self, call: cst.Call) -> tuple[str, set[str]]:
        """Return the arguments of a draw for `n` rows, and the names that they need."""
        code, function = self.facts.code, last(self.facts.code(call.func))
        positional = [each.value for each in call.args if each.keyword is None]
        named = {each.keyword.value: each.value for each in call.args if each.keyword is not None}
        if function.endswith("_like") and positional:
            like = code(positional[0])
            dtype = code(named["dtype"]) if "dtype" in named else f"{like}.dtype"
            return f"n, *{like}.shape[1:], dtype={dtype}", {*names_in(positional[0])}
        first, rest = [], positional
        if function == "randint":
            size = named.get("size", positional[-1])
            first, rest = [each for each in positional if each is not size], [size]
            first += [named[each] for each in ("low", "high") if each in named]
        elif "size" in named:
            rest = [named["size"]]
        if len(rest) == 1 and isinstance(rest[0], cst.Tuple | cst.List):
            rest = [each.value for each in rest[0].elements]
        elif len(rest) == 1 and code(rest[0]).endswith(".shape"):
            sizes, needs = f"n, *{code(rest[0])}[1:]", {*names_in(rest[0])}
            return self._with_options(first, sizes, named, function), needs
        used = [*first, *rest[1:]]
        sizes = ", ".join(["n", *map(code, rest[1:])])
        needs = {name for each in used for name in names_in(each)}
        return self._with_options(first, sizes, named, function), needs

    def _with_options(
        self,
        first: list[cst.BaseExpression],
        sizes: str,
        named: Mapping[str, cst.BaseExpression],
        function: str,
    ) -> str:
        sizes = f"({sizes},)" if function == "randint" else sizes
        dtype = [f"dtype={self.facts.code(named['dtype'])}"] if "dtype" in named else []
        return ", ".join([*map(self.facts.code, first), sizes, *dtype])

    def _unknown(self, call: cst.Call) -> str:
        if last(self.facts.code(call.func)) == "randint":
            *first, _ = (each.value for each in call.args if each.keyword is None)
            return f"{', '.join(map(self.facts.code, first))}, (n, *SHAPE)"
        return "n, *SHAPE"

    def _is_known(self, names: set[str]) -> bool:
        """Return whether the loop can compute these names without a model and without other draws."""
        statements = self._slice(set(names), note=False)
        read = {name for each in statements for name in names_in(each)} | names
        calls = [node for each in statements for node in walk(each) if isinstance(node, cst.Call)]
        models = {*self.facts.trained, *self.facts.frozen}
        draws = any(_DRAWS.fullmatch(self.facts.code(each.func)) for each in calls)
        return not read & models and not draws

    # ---- the program

    def written(
        self, transforms: list[str], suffix: str, step: str, in_losses: set[cst.CSTNode]
    ) -> Loop:
        """Write the code that replaces the loop, with the transforms of its recipe.

        `in_losses` are the statements in the losses of all loops.
        """
        draws = [*self.draws.values()]
        self._check({node for each in in_losses for node in walk(each)})
        batch = (
            f"({', '.join([self.batch, *(each.name for each in draws)])})" if draws else self.batch
        )
        needed = dict.fromkeys(
            code for each in draws for node in each.needs for code in [self._source_of(node, {})]
        )
        shapes = " ".join([*needed, *(each.code for each in draws)])
        first = [f"{self.batch} = {self._source[1]}"] if self._source[1] else []
        if any(re.search(rf"\b{each}\b", shapes) for each in self._batch_names - {self.batch}):
            first.append(f"{self._source[0]} = {self.batch}")
        model = self.models[0] if self.models else "model"
        in_loop = [*first, *needed, *(each.code for each in draws)]
        in_loop.append(f"state, report{suffix} = {step}(state, {batch})")
        program = [
            *self._loss_fn(suffix, model, draws),
            "",
            *_recipe(transforms, suffix),
            *self._plan(suffix, model, bool(draws)),
            f"state, {step} = af.build(plan{suffix}, state)",
        ]
        return Loop(
            self.number,
            max([*self.facts.made_lines, *map(self.facts.moved_at, self.frozen)], default=0),
            "\n".join(program),
            "\n".join(in_loop),
            self.batch,
            list(self.by_hand),
        )

    def _loss_fn(self, suffix: str, model: str, draws: list[_Draw]) -> list[str]:
        frozen = ", *, frozen" if self.frozen else ""
        batch = "batch" if draws else self.batch
        lines = [f"def loss_fn{suffix}(model, {batch}{frozen}):"]
        if draws:
            names = ", ".join([self.batch, *(each.name for each in draws)])
            lines.append(f"    {names} = batch")
        if self._source[0] != self.batch:
            lines.append(f"    {self._source[0]} = {self.batch}")
        by_code = self._by_code(model)
        for each in self.kept:
            is_draw = isinstance(each, cst.Assign) and each.value in self.draws
            if not is_draw:
                lines += textwrap.indent(self._source_of(each, by_code), "    ").splitlines()
        if self.loss is not None:
            lines = _returned(lines, self._source_of(self.loss, by_code))
        return lines

    def _by_code(self, model: str) -> dict[str, str]:
        """Return the names of the models in a loss function, by those in the script."""
        return {model: "model", **{name: f'frozen["{last(name)}"]' for name in self.frozen}}

    def _source_of(self, node: cst.CSTNode, by_code: Mapping[str, str]) -> str:
        """Return the source of a statement of the loss, with the edits that a loss function needs."""
        return self.facts.edited(
            node, [e for each in walk(node) for e in self._edits(each, by_code)]
        )

    def _edits(self, node: cst.CSTNode, by_code: Mapping[str, str]) -> Iterator[Edit]:
        """Yield the edits of one node in the loss."""
        facts, (start, end) = self.facts, self.facts.span(node)
        if isinstance(node, cst.Name | cst.Attribute) and facts.stands_for_itself(node):
            code = facts.code(node)
            if code in by_code or facts.is_device(node):
                yield start, end, by_code.get(code, "state.device")
        elif isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide):
            if facts.is_number_of_batches(node.right):
                yield facts.span(node.left)[1], end, ""
        elif isinstance(node, cst.AugAssign):
            # The loss function must not change the batch: checks run it several times.
            name = facts.code(node.target)
            if name in {*self._batch_names, *(each.name for each in self.draws.values())}:
                operator = facts.code(node.operator).removesuffix("=")
                yield (
                    facts.span(node.target)[1],
                    facts.span(node.value)[0],
                    f" = {name} {operator} (",
                )
                yield end, end, ")"
        elif isinstance(node, cst.Call):
            yield from self._edits_of_call(node)

    def _edits_of_call(self, call: cst.Call) -> Iterator[Edit]:
        """Yield the edits of a call in the loss: of draws, `unwrap_model`, `next` and `to(device)`."""
        facts, (start, end) = self.facts, self.facts.span(call)
        inside = self._unmoved(call)
        if call in self.draws:
            yield start, end, self.draws[call].name
        elif facts.unwraps(call):
            first, last = facts.span(call.args[0].value)
            yield from [(start, first, ""), (last, end, "")]
        elif facts.code(call.func) == "next":
            yield start, end, "batch"
        elif inside is not call and (
            {*names_in(inside)} <= self._batch_names or self._next_in(inside) is not None
        ):
            yield facts.span(inside)[1], end, ""

    def _plan(self, suffix: str, model: str, has_draws: bool) -> list[str]:
        optimizers = ", ".join(f'"{last(each)}": {each}' for each in self.optimizers)
        one = self.optimizers[0] if self.optimizers else "optimizer"
        arguments = [f"loss_fn{suffix}", model]
        arguments.append(f"{{{optimizers}}}" if len(self.optimizers) > 1 else one)
        labels = self._labels(has_draws)
        if labels:
            arguments.append(labels)
        if self.frozen:
            frozen = ", ".join(f'"{last(each)}": {each}' for each in self.frozen)
            arguments.append(f"frozen={{{frozen}}}")
        return _call(f"plan{suffix}", f"recipe{suffix}(af.Plan", arguments, "))")

    def _labels(self, has_draws: bool) -> str:
        """Return the weight function of a loss over tokens; "" for other losses."""
        text = " ".join(self._source_of(each, {}) for each in [*self.kept, self.loss] if each)
        found = re.search(_LABELS, self.facts.text)
        ignored = re.search(r"ignore_index *= *([-\w.]+)", text)
        if found and ".loss" in text:
            path = '(0, "labels")' if has_draws else '"labels"'
            shift = ", shift=1" if found[1] == "CausalLM" else ""
            return f"af.count_labels({path}{shift})"
        if ignored:
            self.by_hand[
                "the loss is a mean over the labels that it does not ignore: give the plan "
                f"weight_fn=af.count_labels(KEY, ignore_index={ignored[1]}), with the place of the labels in "
                "the batch"
            ] = None
        return ""

    def _check(self, in_losses: set[cst.CSTNode]) -> None:
        """Add notes on work by hand, such as for names in the loss that a loss function cannot read."""
        facts = self.facts
        if self.loss is None:
            self._note(self.call, "backward has no argument")
        if not self._source[0]:
            self._note(self.call, "no loader gives the batch of this backward")
        if self.loop is not None and self.own_optimizers and facts.steps_below(self.loop):
            self._note(
                self.loop,
                "the optimizer steps below the loop, so its batches are one update: give the step "
                "all of them, in a list for af.accumulate(k, split=None)",
            )
        self._check_counts()
        if not self.models:
            why = "no line prepares the model of this loss: give af.Plan the one that trains"
            self.by_hand[why] = None
        if len(self.models) > 1:
            names = " and ".join(self.models)
            one = ", ".join(f'"{last(each)}": {each}' for each in self.models)
            why = f"the loss trains {names}: make one model of them, nn.ModuleDict({{{one}}})"
            self.by_hand[why] = None
        local = {name for each in self.kept for name in writes(each)} | self._batch_names
        self._check_names(local)
        for node in self._nodes:
            is_own = isinstance(node, cst.Attribute) and facts.is_accelerator(node.value)
            if is_own and node.attr.value not in ("device", "unwrap_model"):
                self._note(node, f"the loss uses `{facts.code(node)}`")
        own = local - self._batch_names - {*names_in(self.loss)}
        for name, line in facts.reads_after(self.call, own, in_losses):
            self.by_hand[
                f"line {line}: `{name}` is a value that only loss_fn has: let it return (loss, "
                "{NAME: ...}), a mean over the batch, and read report.metrics[NAME]"
            ] = None

    def _check_counts(self) -> None:
        """Add a note if the script's first update has one batch, and for schedules that would end earlier."""
        facts, k = self.facts, self.facts.num_microbatches
        for each in facts.counting_ifs:
            if self.loop in facts.ancestors(each) and facts.holds_for_first(each):
                self._note(
                    each,
                    f"`{facts.code(each.test)}` holds for the first batch, so the script's first update "
                    f"has this batch alone; each update of a step has {k}",
                )
        for call in facts.lengths_of_schedules(self.optimizers):
            self._note(
                call,
                f"`{facts.code(call)}` counts updates now, not batches, so the schedule ends {k} times "
                f"earlier: for the script's rates, multiply by {k}",
            )

    def _check_names(self, local: set[str]) -> None:
        """Add a note for each name in the loss that the loop changes, or that only another function has."""
        facts = self.facts
        own = {*facts.trained, *facts.frozen, *self.models, *facts.devices, *local}
        loops = [
            each for each in facts.ancestors(self.call) if isinstance(each, cst.For | cst.While)
        ]
        changed = {name for loop in loops for name in writes(loop)}
        for name in self._read:
            why = ""
            if name in facts.averages:
                why = f"the loss reads `{name}`, an average of parameters that the loop updates"
            elif name in own:
                continue
            elif name in changed:
                why = (
                    f"the loss reads `{name}`, which the loop changes: put its value into the batch"
                )
            elif facts.is_local_elsewhere(name, self.call):
                why = (
                    f"the loss reads `{name}`, a local variable of `{facts.function_name(self.call)}`, "
                    "and the plan is made in another function: make it an attribute"
                )
            if why:
                self.by_hand[why] = None


class Prediction(Backward):
    """A loop that evaluates and gathers rows, and the call of `af.predict` that replaces it."""

    def __init__(self, facts: Facts, loop: cst.For) -> None:
        self.calls = facts.gathers_in(loop)
        super().__init__(facts, self.calls[-1])
        self.loss = None
        self._values = [each.args[0].value for each in self.calls]
        gathers = {*self.calls}
        self.before = [each for each in self.before if gathers.isdisjoint(walk(each))]
        self.kept = self._slice({name for each in self._values for name in names_in(each)})

    def _is_transparent(self, node: cst.With) -> bool:
        return super()._is_transparent(node) or all(
            self.facts.code(each.item) in ("torch.no_grad()", "torch.inference_mode()")
            for each in node.items
        )

    @cached_property
    def names(self) -> list[str]:
        """Return the names of the gathered rows, those of each call as one text."""
        return [self._name(*each) for each in enumerate(self.calls, 1)]

    def _name(self, number: int, call: cst.Call) -> str:
        around, value = self.facts.parents[call], self.facts.code(call.args[0].value)
        if isinstance(around, cst.Assign):
            return self.facts.code(around.targets[0].target).strip("()")
        if isinstance(around, cst.Arg) and around.keyword is not None:
            return str(around.keyword.value)
        return value if value.isidentifier() else f"rows_{number}"

    def program(self, loader: str) -> str:
        """Write `predict_fn` and the call of `af.predict`; return "" if the loop does more than gather."""
        nodes = [node for part in [*self.kept, *self._values] for node in walk(part)]
        local = {name for each in self.kept for name in writes(each)} | self._batch_names
        changed = {*writes(self.loop or self.call)} - local
        of_accelerate = {
            each.attr.value
            for each in nodes
            if isinstance(each, cst.Attribute) and self.facts.is_accelerator(each.value)
        }
        is_more = of_accelerate - {"device", "unwrap_model"} or changed & {
            name for each in nodes for name in names_in(each)
        }
        is_always = all(
            not isinstance(each, cst.If | cst.Try)
            for call in self.calls
            for each in takewhile(
                lambda around: around is not self.loop, self.facts.ancestors(call)
            )
        )
        if is_more or self.by_hand or not is_always or len({*self.names}) < len(self.names):
            return ""
        model = next((each for each in self._read if each in self.facts.trained), "model")
        lines = [each.replace("loss_fn", "predict_fn", 1) for each in self._loss_fn("", model, [])]
        values = [self._source_of(each, self._by_code(model)) for each in self._values]
        groups = self.names
        if len(values) > 1:
            groups = [f"({each})" if "," in each else each for each in groups]
        lines.append(f"    return {', '.join(values)}")
        lines.append(f"{', '.join(groups)} = af.predict(step, state, {loader}, predict_fn)")
        return "\n".join(lines)


def _returned(lines: list[str], loss: str) -> list[str]:
    """End a function with the return of its loss. If it ends with `loss = ...`, replace that statement."""
    head = f"    {loss} = "
    if lines[-1].startswith(head):
        return [*lines[:-1], f"    return {lines[-1].removeprefix(head)}"]
    for index in range(len(lines) - 1, 0, -1):
        if lines[index].startswith(head) and all(
            each.startswith("     ") or each.strip() in ")]}" for each in lines[index + 1 :]
        ):
            return [
                *lines[:index],
                f"    return {lines[index].removeprefix(head)}",
                *lines[index + 1 :],
            ]
    return [*lines, f"    return {loss}"]


def _recipe(transforms: list[str], suffix: str) -> list[str]:
    return _call(f"recipe{suffix}", "af.compose", transforms, ")")


def _call(name: str, function: str, arguments: list[str], end: str) -> list[str]:
    """Write an assignment of a call, on one line if it fits."""
    one = f"{name} = {function}({', '.join(arguments)}{end}"
    if len(one) <= 74:
        return [one]
    return [f"{name} = {function}(", *[f"    {each}," for each in arguments], end]


def _in_place(node: cst.Assign | cst.AnnAssign) -> bool:
    targets = (
        [node.target] if isinstance(node, cst.AnnAssign) else [each.target for each in node.targets]
    )
    return any(isinstance(each, cst.Subscript | cst.Attribute) for each in targets)
