"""The state of a run that a checkpoint holds: tensors by name, and the rest as plain data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, fields
from math import inf
from operator import methodcaller
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from accel_fn.core.dtensor import is_sharded, local, whole
from accel_fn.core.plan import Plan, describe, unwrapped
from accel_fn.core.state import DistState, LossScale
from accel_fn.core.step import Step
from accel_fn.core.torch_internals import has_loading_hooks
from accel_fn.errors import CheckpointError

Steps = Mapping[str, Step]
IMPLEMENTATION_OPTIONS = ("foreach", "fused", "capturable", "differentiable")
"""Options of an optimizer's group that choose an implementation. A load keeps the program's own."""
_KEPT = ("params", *IMPLEMENTATION_OPTIONS)
RESULT_SLOTS = (
    "init_state",
    "forward_contexts",
    "wrap_grad_fn",
    "accept",
    "gradients",
    "after_update",
)
"""The slots whose functions decide the result of a step. The other slots decide, for example, on
the device and the number of micro-batches."""
_STATE_SLOTS = (*RESULT_SLOTS, "split")
"""The slots whose functions may have state."""
_Value = TypeVar("_Value")
Spec = tuple[torch.dtype, tuple[int, ...]]


def named_steps(step: Step | Steps) -> Steps:
    """Return steps by name; a single step has the name ""."""
    return {"": step} if isinstance(step, Step) else step


def notes_of(steps: Steps) -> dict[str, Any]:
    """Return the notes of the step whose name sorts first: `save` and `load` keep facts of the run there."""
    return steps[min(steps)].notes


@contextmanager
def in_whole(steps: Steps, *, writes: bool) -> Iterator[None]:
    """Enter a context in which strategies hold models and optimizers whole, or as DTensors."""
    with ExitStack() as stack:
        for step in steps.values():
            stack.enter_context(step.strategy.whole(writes=writes))
        yield


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run's steps. It is equal on all ranks, except for the tensors listed in `buffers`."""

    tensors: dict[str, Tensor]
    """Tensors by name: `model/NAME`, `OPTIMIZER/NAME/KEY` and `transforms/WHERE/KEY`; for a step
    with a name, `model@STEP/NAME` and so on."""
    rest: dict[str, dict[str, Any]]
    """A map from a step's name to the non-tensor state of its model, optimizers and transforms."""
    tied: dict[str, str]
    plans: dict[str, dict[str, Any]]
    stateful: dict[str, str]
    """A map from the prefix of a plan function's entries to the function's name in messages."""
    frozen: dict[str, Tensor]
    """Tensors of the frozen models of plans, which are not saved: `frozen/NAME/KEY`."""
    buffers: list[str]
    """Names of buffers, whose values may differ between ranks: DDP lets running statistics
    differ."""
    moved: list[str] = field(default_factory=list)
    """Schedules whose functions give other rates now than the rates in use."""


def run_state_of(steps: Steps) -> RunState:
    """Collect the state to save, or to compare with a saved one, without copying tensors."""
    found = RunState({}, {}, {}, {}, {}, {}, [])
    for name, step in steps.items():
        plan = step.plan
        extra_state = _add_model(found, prefix_of("model", name), unwrapped(plan.model))
        for each, model in plan.frozen.items():
            prefix = f"{prefix_of('frozen', name)}{each}/"
            # Use `state_dict`, which lists a tied tensor under each of its names.
            # `named_parameters` lists it only once.
            values = model.state_dict().items()
            found.frozen.update({f"{prefix}{k}": v for k, v in values if isinstance(v, Tensor)})
        transforms = {}
        for place, where, function in stateful_functions(plan, name):
            # Collect transforms before optimizers: a schedule's `state_dict` first reads whether
            # the last update was applied, which may change the learning rates.
            saved = function.state_dict()
            tensors = {key: value for key, value in saved.items() if isinstance(value, Tensor)}
            found.tensors.update({f"{place}{key}": value for key, value in tensors.items()})
            found.stateful[place] = of_step(where, name)
            transforms[where] = {key: saved[key] for key in saved if key not in tensors}
        rest: dict[str, Any] = {"model": extra_state, "transforms": transforms, "optimizers": {}}
        rest["weight"] = float(sum(step.strategy.layout.last_total))
        for each, optimizer in plan.optimizers.items():
            prefix = prefix_of(each, name)
            rest["optimizers"][each] = _add_optimizer(found, prefix, plan, optimizer)
        found.rest[name] = rest
        found.plans[name] = signature(step)
    return found


def prefix_of(kind: str, step: str) -> str:
    """Return the prefix of the names of a step's entries."""
    return f"{kind}@{step}/" if step else f"{kind}/"


def of_step(name: str, step: str) -> str:
    """Return the name of a part of a step for messages."""
    return f"{name} of step {step!r}" if step else name


def with_prefix(prefix: str, values: Mapping[str, _Value]) -> dict[str, _Value]:
    """Select the values whose names begin with `prefix`, and remove it from the names."""
    return {name[len(prefix) :]: each for name, each in values.items() if name.startswith(prefix)}


def signature(step: Step) -> dict[str, Any]:
    """Describe the facts in which a resumed run must equal the saved one, so not world size or device."""
    plan = step.plan
    named = {slot: [_name(each) for each in getattr(plan, slot)] for slot in RESULT_SLOTS}
    slots = {slot: [name for name in names if name] for slot, names in named.items()}
    found: dict[str, Any] = {"weight_fn": describe(plan.weight_fn)}
    found |= {"reduction": "sum"} if plan.reduction == "sum" else {}
    found |= {slot: each for slot, each in slots.items() if each} | dict(step.strategy.signature())
    names = {id(each): name for name, each in unwrapped(plan.model).named_parameters()}
    for name, optimizer in plan.optimizers.items():
        groups = [group["params"] for group in optimizer.param_groups]
        found[key_of(name)] = type(optimizer).__name__
        found[f"{key_of(name)} groups"] = [[names[id(p)] for p in group] for group in groups]
    return found


def key_of(optimizer: str) -> str:
    """Return an optimizer's key in a signature, which differs from every slot's name."""
    return optimizer if optimizer == "optimizer" else f"optimizer {optimizer!r}"


def is_optimizer(key: str) -> bool:
    """Return whether a signature's key describes an optimizer."""
    return key.startswith("optimizer")


def _name(function: Any) -> str:
    signature_of = getattr(function, "signature", None)
    return signature_of() if signature_of else describe(function).partition("(")[0]


def stateful_functions(plan: Plan, step: str) -> Iterator[tuple[str, str, Any]]:
    """Yield each function of the plan that has state: its entries' prefix, its slot and name, itself."""
    for slot in _STATE_SLOTS:
        for index, each in enumerate(getattr(plan, slot)):
            if hasattr(each, "state_dict") and hasattr(each, "load_state_dict"):
                where = f"{slot}/{index} {_name(each)}"
                yield f"{prefix_of('transforms', step)}{where}/", where, each


def scale_to_dict(scaler: LossScale | None) -> dict[str, Any] | None:
    """Convert the loss scale to plain data."""
    values = {each.name: getattr(scaler, each.name) for each in fields(scaler)} if scaler else None
    return None if values is None else _moved(values, torch.device("cpu"))


def scale_from_dict(saved: Mapping[str, Any] | None, state: DistState) -> LossScale | None:
    """Make a loss scale from saved values, on the run's device. Every field must have been saved."""
    if saved is None:
        return None
    names = {*saved, *(each.name for each in fields(LossScale))}
    return LossScale(**_moved({name: saved[name] for name in names}, state.device))


def _moved(values: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    moved: dict[str, Any] = tree_map_only(Tensor, methodcaller("to", device), dict(values))
    return moved


def targets_for(
    kind: str, plan: Plan, step: str, there: Mapping[str, Tensor], specs: Mapping[str, Spec]
) -> dict[str, Tensor]:
    """Map the name of each entry of a kind to the tensor to read it into: an existing one, or a new one.

    The kind is "transforms" or the name of an optimizer.
    """
    prefix = prefix_of(kind, step)
    parameters = dict(unwrapped(plan.model).named_parameters())
    found = {}
    for name, (dtype, shape) in with_prefix(prefix, specs).items():
        parameter = parameters.get(name.rpartition("/")[0])
        target = there.get(f"{prefix}{name}")
        if target is None or target.dtype != dtype or tuple(target.shape) != shape:
            if parameter is not None and is_sharded(parameter) and tuple(parameter.shape) == shape:
                target = torch.zeros_like(parameter.detach(), dtype=dtype)
            else:
                device = parameter.device if parameter is not None and shape else "cpu"
                target = torch.zeros(shape, dtype=dtype, device=device)
        found[f"{prefix}{name}"] = target
    return found


def put_back(
    step: Step,
    name: str,
    tensors: Mapping[str, Tensor],
    rest: dict[str, Any],
    *,
    optimizers: Collection[str],
    fresh: Collection[str],
    again: bool = False,
) -> None:
    """Load saved state into model, transforms and these optimizers; tensors are read already.

    Transforms whose entries begin with one of `fresh` do not change. With `again`, the same
    tensors were loaded before, and their values have changed since.
    """
    plan, weight = step.plan, rest.get("weight")
    is_known = isinstance(weight, float) and 0 < weight < inf
    step.strategy.layout.last_total = (cast("float", weight),) if is_known else ()
    _put_back_model(
        unwrapped(plan.model), with_prefix(prefix_of("model", name), tensors), rest["model"]
    )
    for each in optimizers:
        own, optimizer = with_prefix(prefix_of(each, name), tensors), plan.optimizers[each]
        if again and _holds(plan, optimizer, own):
            groups = rest["optimizers"][each]["others"]["param_groups"]
            for ours, theirs in zip(optimizer.param_groups, groups, strict=True):
                ours.update({k: deepcopy(v) for k, v in theirs.items() if k not in _KEPT})
        else:
            _put_back_optimizer(plan, optimizer, own, rest["optimizers"][each])
    for place, where, function in stateful_functions(plan, name):
        if where in rest["transforms"] and place not in fresh:
            function.load_state_dict({**rest["transforms"][where], **with_prefix(place, tensors)})


# -- the model


def _add_model(found: RunState, prefix: str, model: nn.Module) -> dict[str, Any]:
    """Add the model's tensors and ties to `found`; return the other values of its `state_dict`."""
    saved = model.state_dict()
    extra_state = {key: each for key, each in saved.items() if not isinstance(each, Tensor)}
    tensors, tied = split_tied(
        {key: each for key, each in saved.items() if key not in extra_state}, model
    )
    found.tensors.update({f"{prefix}{key}": each for key, each in tensors.items()})
    found.tied.update({f"{prefix}{key}": f"{prefix}{first}" for key, first in tied.items()})
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # List the buffers, which may differ between ranks: DDP copies rank 0's running statistics to
    # the other ranks only when a forward starts. A save holds rank 0's buffers, and those of
    # another rank that differ from them.
    found.buffers.extend(f"{prefix}{key}" for key in tensors if key not in parameters)
    return extra_state


def _put_back_model(
    model: nn.Module, tensors: Mapping[str, Tensor], extra_state: Mapping[str, Any]
) -> None:
    """Load a model's extra state, and the tensors of which its `state_dict` returned copies.

    All other tensors are filled in place.
    """
    own = {_address(each) for each in (*model.parameters(), *model.buffers())}
    copies = {key: each for key, each in tensors.items() if _address(each) not in own}
    here = model.state_dict()
    found = {key: value for key, value in {**extra_state, **copies}.items() if key in here}
    if not found:
        return
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        model.load_state_dict({**here, **found})
        return
    lost = model.load_state_dict({**here, **found}, strict=False).unexpected_keys
    # A model may ignore keys, but not the keys that its own state_dict returned.
    if found.keys() & set(lost):
        raise CheckpointError(f"load: model must take back what its state_dict gives, got {lost}")


def _address(tensor: Tensor) -> tuple[torch.device, int]:
    held = local(tensor)
    return held.device, held.data_ptr()


# -- optimizers


def load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load an optimizer's `state_dict`, except `IMPLEMENTATION_OPTIONS`.

    Tensors keep their saved dtypes: for a float64 parameter, torch would turn even float32 counters
    into float64.
    """
    groups = [
        {**theirs, **{key: ours[key] for key in IMPLEMENTATION_OPTIONS if key in ours}}
        for theirs, ours in zip(saved["param_groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({**saved, "param_groups": groups})
    order = _parameters(optimizer)
    for number, values in saved["state"].items():
        loaded = optimizer.state[order[number]]
        for key, value in values.items():
            if isinstance(value, Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)


def _add_optimizer(
    found: RunState, prefix: str, plan: Plan, optimizer: Optimizer
) -> dict[str, Any]:
    """Add an optimizer's tensors to `found`; return the other values of its `state_dict`."""
    saved = optimizer.state_dict()
    order = _order(plan, optimizer)
    rest: dict[str, dict[str, Any]] = {}
    for number, values in saved["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                found.tensors[f"{prefix}{order[number]}/{key}"] = value
            else:
                rest.setdefault(order[number], {})[key] = value
    others = {key: value for key, value in saved.items() if key != "state"}
    return {"state": rest, "others": others}


def _put_back_optimizer(
    plan: Plan, optimizer: Optimizer, tensors: Mapping[str, Tensor], rest: dict[str, Any]
) -> None:
    saved = {name: dict(values) for name, values in rest["state"].items()}
    for place, value in tensors.items():
        name, _, key = place.rpartition("/")
        saved.setdefault(name, {})[key] = value
    order = _order(plan, optimizer)
    state = {number: saved[name] for number, name in enumerate(order) if name in saved}
    load_optimizer(optimizer, {**rest["others"], "state": state})


def _holds(plan: Plan, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a torch optimizer's state already consists of these very tensors.

    If so, filling the tensors also updates the optimizer. `load_state_dict` would only copy them
    again, which takes as long as reading them.
    """
    is_of_torch = type(optimizer).__module__.startswith("torch.optim.")
    if not is_of_torch or has_loading_hooks(optimizer):
        return False
    order = dict(zip(_order(plan, optimizer), _parameters(optimizer), strict=True))
    places = [(*place.rpartition("/")[::2], value) for place, value in tensors.items()]
    return all(
        optimizer.state.get(order[name], {}).get(key) is value for name, key, value in places
    )


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return list(dict.fromkeys(each for group in optimizer.param_groups for each in group["params"]))


def _order(plan: Plan, optimizer: Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters, in the order of its `state_dict`."""
    names = {id(parameter): name for name, parameter in unwrapped(plan.model).named_parameters()}
    return [names[id(each)] for each in _parameters(optimizer)]


def read_whole(
    tensors: Mapping[str, Tensor],
    own: Collection[str],
    read: Callable[[str, Tensor], _Value],
    gather: Callable[[Tensor], Tensor | None] = whole,
) -> Callable[[], dict[str, _Value]]:
    """Gather tensors, one after another, and call `read` for those in this rank's `own`.

    Return a function that returns the results or raises the first error of `read`. The error is not
    raised earlier, since other ranks wait for this rank in the next gather.
    """
    found: dict[str, _Value] = {}
    failures: list[Exception] = []
    for name, tensor in tensors.items():
        gathered = gather(tensor)
        if name in own and gathered is not None and not failures:
            try:
                found[name] = read(name, gathered)
            except Exception as error:
                failures.append(error)

    def result() -> dict[str, _Value]:
        for failure in failures:
            raise failure
        return found

    return result


def split_tied(
    saved: Mapping[str, Tensor], model: nn.Module
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Split a `state_dict`: tensors by their first name, and a map from each other name to the first."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    firsts: dict[object, str] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in saved.items():
        # Empty shards of two parameters may have the same address, so compare the parameters.
        key = parameters.get(name) if is_sharded(value) else view_key(value)
        first = firsts.setdefault(key, name) if value.numel() else name
        if first == name:
            tensors[name] = value
        else:
            tied[name] = first
    return tensors, tied


def view_key(tensor: Tensor) -> object:
    """Return a key that is equal for two tensors that read the same elements in the same way."""
    tensor = local(tensor)
    strides = [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    marks = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return tensor.device, tensor.data_ptr(), tensor.shape, tuple(strides), *marks


def is_expanded(tensor: Tensor) -> bool:
    """Return whether several elements share one place in memory by a stride of 0."""
    return any(
        not stride and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
