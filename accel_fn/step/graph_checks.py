"""Checks of a step: the graph of its loss, and that its parameters are still those of `build`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from accel_fn.base.state import DistState
from accel_fn.errors import LossError, PlanError
from accel_fn.step.loss_graph import check_left_out, check_linear, check_own_backwards, leaves
from accel_fn.step.plan import Plan

Hook = Callable[[Tensor], Tensor | None]
Hooked = list[tuple[nn.Parameter, dict[int, Hook]]]
_REPAIR = "build again, or train all from the start and freeze(names, until=...) those"


class TrainedParameters:
    """The optimizers' parameters as `build` found them: a step gives gradients for no others."""

    def __init__(self, plan: Plan, *, shares: bool = False) -> None:
        self._plan = plan
        self._shares = shares
        """Does a backward give a share of a gradient, in place of all of it?"""
        self.known: set[int] | None = None
        """The ids of the trained parameters, if the strategy refuses replaced ones; else None."""
        self.hooked: Hooked = []
        """Parameters whose hooks are set aside until the gradient is whole."""
        self._optimizers = [*plan.optimizers.values()]
        lists = [group["params"] for each in self._optimizers for group in each.param_groups]
        self._lists = [(each, len(each)) for each in lists]
        self._given = [p for each in lists for p in each]
        self._frozen = [p for p in self._given if not p.requires_grad]
        self._required = {id(p) for p in plan.model.parameters() if p.requires_grad}
        self._found = {*map(id, plan.model.parameters())}

    def check(self) -> None:
        """Refuse parameters that were added since `build`, which would not be trained.

        Where backwards give shares of gradients, hooks of parameters are set aside.

        Cost: a look at each group, at each parameter that was frozen, and at hooks.
        """
        if self._shares:
            hooks = [p._backward_hooks or p._post_accumulate_grad_hooks for p in self._given]
            if any(hooks):
                self._set_aside_hooks()
        if self.known is not None:
            self._check_known(self.known)
        lists = [group["params"] for each in self._optimizers for group in each.param_groups]
        if len(lists) != len(self._lists):
            self._compare(lists)
        for now, (then, length) in zip(lists, self._lists, strict=False):
            if now is not then or len(now) != length:
                self._compare(lists)
        for parameter in self._frozen:
            if parameter.requires_grad:
                named = self._plan.model.named_parameters()
                name = next((name for name, each in named if each is parameter), "one")
                raise PlanError(
                    "step: parameters that required no gradient in build must not require one, got "
                    f"{name}; {_REPAIR}"
                )

    def _compare(self, lists: Sequence[Sequence[nn.Parameter]]) -> None:
        now = [p for each in lists for p in each]
        if [*map(id, now)] != [*map(id, self._given)]:
            got = "others" if len(now) == len(self._given) else len(now)
            raise PlanError(
                f"step: optimizer must hold the {len(self._given)} parameters that build found in it, "
                f"got {got}; {_REPAIR}"
            )

    def _set_aside_hooks(self) -> None:
        check_hooks("step", self._plan)
        self.hooked += take_hooks(self._given)

    def _check_known(self, known: Collection[int]) -> None:
        for name, parameter in self._plan.model.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise PlanError(
                    f"step: model must hold the parameters that build sharded, got another {name}; "
                    "write to the old one, or build again"
                )

    def run_hooks(self) -> None:
        """Put hooks back, and call each on the gradient of the global batch, as on one rank."""
        hooked = self.hooked
        self._put_back()
        with torch.no_grad():
            for parameter, hooks in hooked:
                for hook in hooks.values():
                    if parameter.grad is not None:
                        given = hook(parameter.grad)
                        parameter.grad = parameter.grad if given is None else given

    def _put_back(self) -> None:
        put_hooks_back(self.hooked)
        self.hooked = []

    def explain(self, error: BaseException) -> None:
        """Raise a clearer error if a backward failed for a reason that is known here.

        Hooks that were set aside are put back.
        """
        self._put_back()
        if not isinstance(error, RuntimeError):
            return
        if "does not currently support double backward" in str(error):
            raise LossError(
                "step: compiled must have a loss_fn without gradients of gradients, got one that calls "
                "torch.autograd.grad with create_graph=True; call torch.func.grad, or leave out compiled"
            ) from error
        for name, parameter in self._plan.model.named_parameters():
            if not parameter.requires_grad and id(parameter) in self._required:
                raise PlanError(
                    "step: parameters that required a gradient in build must still do so, got "
                    f"{name}; build again, or freeze those"
                ) from error
            if id(parameter) not in self._found:
                raise PlanError(_replaced(name)) from error


class GraphChecks:
    """Refuses losses whose backward would miss parameters without an error."""

    def __init__(
        self,
        plan: Plan,
        trainable: Sequence[nn.Parameter],
        *,
        finds_unused: bool,
        probes: bool = False,
        shares: bool = False,
    ) -> None:
        self._plan = plan
        self._trainable = trainable
        self._trained = plan.trained()
        self._known = {id(each) for each in plan.model.parameters()}
        self._finds_unused = finds_unused
        """May the loss miss parameters?"""
        self._probes = probes
        """May a graph be run backward more than once?"""
        self._shares = shares
        """Are custom Functions in graphs to be linear?"""
        self._is_new = True
        """Is the next loss that weighs to be searched for Functions that do not scale?"""
        self.sizes: set[int] = set()
        """The numbers of nodes of graphs that hide no parameters. One that does has another number."""
        self._seen: set[tuple[bool, ...]] = set()
        """Which parameters were missed by backwards whose graphs hid none."""

    def before_backward(self, loss: Tensor, *, is_first: bool, weighs: bool) -> None:
        """Check the first loss of a step, and the first that weighs: before it no gradient is there."""
        if not loss.requires_grad:
            raise LossError(
                "step: loss_fn must return a loss with a graph, got one that requires no gradient; "
                "leave out detach() and no_grad()"
            )
        for parameter in self._trainable if is_first else ():
            if parameter.grad is not None:
                raise LossError(
                    "step: loss_fn must leave .grad of the model's parameters alone, got one that writes "
                    "it (backward, or autograd.grad by hand), which no other rank would see; return the loss"
                )
        if weighs and self._is_new:
            self._is_new = False
            if check_left_out(loss) and self._probes:
                check_own_backwards(loss, self._trainable)
                self._is_new = self._shares and not check_linear(loss, self._trainable)

    def search(self, loss: Tensor, num_nodes: int) -> None:
        """Refuse a graph of a new size that hides parameters. Cost: a walk over the graph."""
        check_left_out(loss)
        self.sizes.add(num_nodes)

    def check_left_out(self, loss: Tensor, missed: Sequence[bool]) -> None:
        """Refuse a graph that hides parameters, if its backward missed some not seen to be missed."""
        pattern = tuple(missed)
        if pattern not in self._seen:
            check_left_out(loss, self._trainable)
            self._seen.add(pattern)

    def after_backward(self, grads: Sequence[Tensor | None], weight: float) -> None:
        """Check the gradients of a step: the loss may miss some parameters, not all."""
        if weight and any(grad is None for grad in grads):
            self.check_reached()

    def check_reached(self) -> None:
        """Refuse a loss that misses the model, or misses parameters that DDP waits for."""
        model = self._plan.model
        names = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
        nothing = all(parameter.grad is None for parameter in self._trained)
        if nothing or (names and not self._finds_unused):
            for name in names:
                self._check_missed(name, model.get_parameter(name))
            some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise LossError(
                f"step: loss_fn must reach the model's parameters by the model given to it, got no gradient "
                f"for {some}; no functional_call on copies, freeze what is not used, or "
                "wrap_ddp(find_unused_parameters=True)"
            )

    def check_reaches_all(self, loss: Tensor) -> None:
        """Refuse a micro-batch that misses parameters, also those that an earlier one has reached.

        Cost: a walk over the graph.
        """
        self.check_reached()
        reached = {*map(id, leaves(loss))}
        named = self._plan.model.named_parameters()
        names = [name for name, p in named if p.requires_grad and id(p) not in reached]
        if names:
            raise LossError(
                "step: loss_fn must reach the model's parameters in the last micro-batch of each rank, "
                f"where DDP averages, got no gradient there for {', '.join(names[:3])}; use "
                "wrap_ddp(find_unused_parameters=True)"
            )

    def _check_missed(self, name: str, parameter: nn.Parameter) -> None:
        if id(parameter) not in self._known:
            raise PlanError(_replaced(name))
        if parameter._post_accumulate_grad_hooks:
            raise PlanError(
                "step: model must have no post-accumulate-grad hooks that clear all gradients, got one on "
                f"{name}; let the optimizer step after the backward"
            )


def _replaced(name: str) -> str:
    return (
        f"step: model must hold the parameters that build found, got another {name}; write to the "
        "old one, or build again"
    )


def shares_gradients(state: DistState, plan: Plan) -> bool:
    """Return whether a backward of a step may give another gradient than that of the global batch."""
    averages = state.world_size > 1 and not plan.having("local_gradients")
    return averages or bool(plan.split or plan.having("virtual_ranks"))


def take_hooks(parameters: Iterable[nn.Parameter]) -> Hooked:
    """Take the hooks of these parameters off, and return them."""
    found = []
    for each in parameters:
        hooks = each._backward_hooks
        if hooks:
            found.append((each, dict(hooks)))
            hooks.clear()
    return found


def put_hooks_back(hooked: Hooked) -> None:
    """Put back what `take_hooks` took off."""
    for parameter, hooks in hooked:
        if parameter._backward_hooks is not None:
            parameter._backward_hooks.update(hooks)


def check_hooks(function: str, plan: Plan) -> None:
    """Refuse hooks that run in the backward, after a rank's or a micro-batch's own gradient is there."""
    for name, parameter in plan.model.named_parameters():
        if parameter._post_accumulate_grad_hooks or hasattr(parameter, "_in_backward_optimizers"):
            raise PlanError(
                f"{function}: model must have no post-accumulate-grad hooks with several ranks or "
                f"micro-batches, whose gradients they see one by one, got one on {name}; let the optimizer "
                "step after the backward, and look at gradients by Tensor.register_hook"
            )
