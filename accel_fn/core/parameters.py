"""Check that the parameters of a step are those of `build`, and that losses reach them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import is_

import torch
from torch import Tensor, nn

from accel_fn.core.dtensor import is_sharded
from accel_fn.core.mesh_axes import AXES
from accel_fn.core.plan import Plan
from accel_fn.core.state import DistState
from accel_fn.core.warn import warn_user
from accel_fn.errors import AccelError, LossError, PlanError

_REPAIR = (
    "build again with after=step, or train all from the start and freeze(names, until=...) those"
)
_OF_PARTS = (
    "wrap_tp: a colwise layer returns a part of its features on each rank, and a rowwise one takes a part; "
    "take sizes from the tensors, as in q.view(b, t, -1, head_dim), or leave out styles"
)


class TrainedParameters:
    """The parameters of model and optimizers as `build` found them, to detect later changes."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.known: set[int] | None = None
        """The ids of the parameters that may require a gradient, if the strategy refuses parameters
        that replace these; otherwise None."""
        self._optimizers = [*plan.optimizers.values()]
        self._lists = self._parameter_lists()
        self._lengths = [*map(len, self._lists)]
        self._given = [p for each in self._lists for p in each]
        self._frozen = [p for p in self._given if not p.requires_grad]
        self.required = {id(p) for p in plan.model.parameters() if p.requires_grad}
        """The ids of the model's parameters that required a gradient."""
        self._found = {*map(id, plan.model.parameters())}

    def check(self) -> None:
        """Refuse parameters that were added, replaced or unfrozen since `build`: no step would train them.

        Cost: a check of each group, and of each parameter that was frozen.
        """
        if self.known is not None:
            self._check_known(self.known)
        lists = self._parameter_lists()
        if [*map(len, lists)] != self._lengths or not all(map(is_, lists, self._lists)):
            self._compare(lists)
        for parameter in self._frozen:
            if parameter.requires_grad:
                named = self._plan.model.named_parameters()
                name = next((name for name, each in named if each is parameter), "one")
                raise PlanError(
                    "step: parameters that required no gradient in build must not require one, got "
                    f"{name}; {_REPAIR}"
                )

    def _parameter_lists(self) -> list[list[nn.Parameter]]:
        return [group["params"] for each in self._optimizers for group in each.param_groups]

    def _compare(self, lists: Sequence[Sequence[nn.Parameter]]) -> None:
        now = [p for each in lists for p in each]
        if [*map(id, now)] != [*map(id, self._given)]:
            got = "others" if len(now) == len(self._given) else len(now)
            raise PlanError(
                f"step: optimizer must hold the {len(self._given)} parameters that build found in it, "
                f"got {got}; {_REPAIR}"
            )

    def _check_known(self, known: Collection[int]) -> None:
        for name, parameter in self._plan.model.named_parameters():
            if not parameter.requires_grad and id(parameter) in self.required:
                raise _frozen(name)
            if parameter.requires_grad and id(parameter) not in known:
                raise PlanError(
                    f"step: model must hold the parameters that build sharded, got another {name}; "
                    "write to the old one, or build again with after=step"
                )

    def explain(self, error: BaseException) -> None:
        """Raise a clearer error, or add a note, if a forward or backward failed for a known reason."""
        is_of_sizes = any(
            word in str(error) for word in ("size", "shape", "reduction dim", "unpack")
        )
        is_known = isinstance(error, AccelError | torch.OutOfMemoryError)
        if is_of_sizes and not is_known and self._is_split_by_features():
            error.add_note(_OF_PARTS)
        if not isinstance(error, RuntimeError):
            return
        if "does not require grad and does not have a grad_fn" in str(error):
            raise no_graph() from error
        if "does not currently support double backward" in str(error):
            raise LossError(
                "step: compiled must have a loss_fn without gradients of gradients, got one that calls "
                "torch.autograd.grad with create_graph=True; call torch.func.grad, or leave out compiled"
            ) from error
        if "mixed torch.Tensor and DTensor" in str(error) or "different meshes" in str(error):
            raise mixed() from error
        for name, parameter in self._plan.model.named_parameters():
            if not parameter.requires_grad and id(parameter) in self.required:
                raise _frozen(name) from error
            if id(parameter) not in self._found:
                raise replaced(name) from error

    def _is_split_by_features(self) -> bool:
        """Return whether each rank holds a part of a layer's features."""
        features = {*AXES} - {"dp"}
        meshes = [each.device_mesh for each in self._plan.model.parameters() if is_sharded(each)]
        return any(features & {*(mesh.mesh_dim_names or ())} for mesh in meshes)


def _frozen(name: str) -> PlanError:
    return PlanError(
        "step: parameters that required a gradient in build must still do so, got "
        f"{name}; build again with after=step, or freeze those"
    )


def no_graph() -> LossError:
    """Return the error for a loss without a graph."""
    return LossError(
        "step: loss_fn must return a loss with a graph, got one that requires no gradient; "
        "leave out detach() and no_grad()"
    )


def mixed() -> LossError:
    """Return the error for a loss that mixes DTensor parameters with plain tensors."""
    return LossError(
        "step: loss_fn must use parameters that are DTensors by calling their modules, or whole, got one "
        "that mixes them with plain tensors; call full_tensor() on each"
    )


def replaced(name: str) -> PlanError:
    """Return the error for a parameter that was replaced since `build`."""
    return PlanError(
        f"step: model must hold the parameters that build found, got another {name}; write to the "
        "old one, or build again with after=step"
    )


def shares_gradients(state: DistState, plan: Plan) -> bool:
    """Return whether the gradient of one backward may differ from that of the global batch."""
    averages = state.world_size > 1 and not plan.having("local_gradients")
    return averages or bool(plan.split or plan.having("virtual_ranks"))


def check_hooks(function: str, plan: Plan) -> None:
    """Refuse hooks of parameters: they would see gradients of a rank or micro-batch, not of the batch."""
    for name, parameter in plan.model.named_parameters():
        has_hook = parameter._post_accumulate_grad_hooks or hasattr(
            parameter, "_in_backward_optimizers"
        )
        if has_hook or parameter._backward_hooks:
            raise PlanError(
                f"{function}: model must have no hooks on parameters with several ranks or micro-batches, "
                f"whose gradients they see one by one, got one on {name}; clip by clip() or clip_value(), "
                "change gradients by a function in Plan.gradients, and let the optimizer step after the "
                "backward"
            )


class Reached:
    """Checks in every step which parameters the loss has given no gradient."""

    def __init__(
        self, plan: Plan, reachable: Sequence[nn.Parameter], *, finds_unused: bool, is_main: bool
    ) -> None:
        self._plan = plan
        self._trained = plan.trained()
        self._known = {*map(id, reachable), *map(id, plan.model.parameters())}
        self._left_out = {*map(id, plan.left_out())}
        self._finds_unused = finds_unused
        """Whether a loss may leave parameters without a gradient."""
        self._is_main = is_main
        self.unused: list[str] = []
        """Names of parameters for which the loss computes no gradient. On several ranks, `wrap_ddp`
        would wait for these gradients."""
        self._looks_for_unused = finds_unused and bool(plan.having("needs_every_parameter"))
        self._seen: set[tuple[bool, ...]] = set()
        """The patterns of missing gradients that a check has accepted: a flag for each trained
        parameter, True if its gradient was missing."""

    def check_gradients(self, grads: Sequence[Tensor | None], weighs: bool) -> None:
        """Check which gradients of a step are missing, once for each pattern of missing gradients."""
        if not weighs:
            return
        missing = tuple([grad is None for grad in grads])
        if True in missing and missing not in self._seen:
            self.check_reached()
            self._seen.add(missing)
            if self._looks_for_unused and not self.unused:
                self._note_unused()

    def _note_unused(self) -> None:
        """Warn once about parameters without a gradient, for which DDP would wait on several ranks."""
        self.unused = [*self._missed()]
        if self.unused and self._is_main:
            warn_user(
                "step: loss_fn should reach all parameters that require a gradient, got none for "
                f"{_some(self.unused)}, which wrap_ddp refuses on several ranks; freeze what is not used, or "
                "wrap_ddp(find_unused_parameters=True)"
            )

    def _missed(self) -> dict[str, nn.Parameter]:
        """Return, by name, the parameters that should have a gradient and have none."""
        named = self._plan.model.named_parameters()
        return {
            name: each
            for name, each in named
            if each.requires_grad and each.grad is None and id(each) not in self._left_out
        }

    def check_reached(self) -> None:
        """Refuse a loss that misses the model, or misses parameters that DDP waits for."""
        missed = self._missed()
        for name, parameter in missed.items():
            if id(parameter) not in self._known:
                raise replaced(name)
        nothing = all(parameter.grad is None for parameter in self._trained)
        if nothing or (missed and not self._finds_unused):
            for name, parameter in missed.items():
                if parameter._post_accumulate_grad_hooks:
                    raise PlanError(
                        "step: model must have no post-accumulate-grad hooks that clear all gradients, "
                        f"got one on {name}; let the optimizer step after the backward"
                    )
            raise not_reached([*missed])


def not_reached(names: Sequence[str]) -> LossError:
    """Return the error for a loss whose backward misses these parameters."""
    some = _some(names)
    return LossError(
        f"step: loss_fn must reach the model's parameters by the model given to it, got no gradient "
        f"for {some or 'some in the last micro-batch'}; no functional_call on copies, freeze what is not "
        "used, or wrap_ddp(find_unused_parameters=True)"
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
