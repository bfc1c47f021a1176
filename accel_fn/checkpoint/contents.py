"""What a checkpoint holds of a step: tensors by name, and the rest as plain data."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accel_fn.base.state import DistState, LossScale
from accel_fn.base.unwrap import unwrapped
from accel_fn.checkpoint.format.manifest import Entry
from accel_fn.comm.dtensor import is_sharded, local
from accel_fn.errors import CheckpointError
from accel_fn.step.plan import Plan, describe
from accel_fn.step.step import Step
from accel_fn.transforms.reproducible.reproducible import num_slots_of
from accel_fn.transforms.schedule.advance import Schedule

Steps = Mapping[str, Step]
HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options of a group that say how it is computed: those of the running program stay."""
_TELLING = ("contexts", "grad_fns", "verdicts", "gradients", "starts", "after")
"""The slots that decide what is computed; the others decide where, and in how many parts."""
_KEEPING = (*_TELLING, "split")
"""The slots whose functions may keep something: in how many parts is no difference, but goes on."""


def named_steps(step: Step | Steps) -> Steps:
    """One step is a dict of one, without a name."""
    return {"": step} if isinstance(step, Step) else step


def notes_of(steps: Steps) -> dict[str, Any]:
    """What saving and loading have to remember of a run of these steps, however they are listed."""
    return steps[min(steps)].notes


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything of the steps of a run that is the same on all ranks."""

    tensors: dict[str, Tensor]
    """`model/NAME`, `optimizer/NAME/KEY` and `transforms/WHERE/KEY`; of a step with a name,
    `model@STEP/NAME` and so on."""
    rest: dict[str, dict[str, Any]]
    """By step: what of model, optimizer and transforms is no tensor of a parameter."""
    tied: dict[str, str]
    plans: dict[str, dict[str, Any]]
    kept: dict[str, str]
    """How the entries of a function in the plan begin, and what to call it."""
    buffers: list[str]
    """Entries that are no replicas: DDP lets running statistics differ between ranks."""


def contents_of(steps: Steps) -> Contents:
    """What is to be saved, or compared with what was. Tensors are not copied."""
    found = Contents({}, {}, {}, {}, {}, [])
    for name, step in steps.items():
        plan = step.plan
        extra = _add_model(found, place_of("model", name), unwrapped(plan.model))
        # First, as a schedule may hear now of what moves the optimizer's learning rate.
        kept = {where: _add_part(found, place, part) for place, where, part in _parts(plan, name)}
        states, rest = _optimizer_state(plan)
        for parameter, key, value in states:
            found.tensors[f"{place_of('optimizer', name)}{parameter}/{key}"] = value
        for place, where, _ in _parts(plan, name):
            found.kept[place] = f"{where} of step {name!r}" if name else where
        found.rest[name] = {"model": extra, "optimizer": rest, "transforms": kept}
        found.plans[name] = signature(plan)
    return found


def place_of(kind: str, step: str) -> str:
    """How the names of a step's entries begin."""
    return f"{kind}@{step}/" if step else f"{kind}/"


def signature(plan: Plan) -> dict[str, Any]:
    """What must be the same where a run goes on: not how many ranks, micro-batches or which device."""
    slots = {slot: [_name(each) for each in getattr(plan, slot)] for slot in _TELLING}
    names = {id(parameter): name for name, parameter in unwrapped(plan.model).named_parameters()}
    num_slots = next(filter(None, map(num_slots_of, plan.own_parameters)), None)
    return {
        "weight_fn": describe(plan.weight_fn),
        **{slot: told for slot, told in slots.items() if told},
        **({"num_slots": num_slots} if num_slots else {}),
        "optimizer": type(plan.optimizer).__name__,
        "groups": [
            [names[id(each)] for each in group["params"]] for group in plan.optimizer.param_groups
        ],
    }


def _parts(plan: Plan, step: str) -> Iterator[tuple[str, str, Any]]:
    """The functions of the plan that keep something: how their entries begin, where they stand, they."""
    for slot in _KEEPING:
        for index, each in enumerate(getattr(plan, slot)):
            if hasattr(each, "state_dict") and hasattr(each, "load_state_dict"):
                where = f"{slot}/{index} {_name(each)}"
                yield f"{place_of('transforms', step)}{where}/", where, each


def _add_part(found: Contents, place: str, part: Any) -> dict[str, Any]:
    """Tensors of what it keeps under their names; gives back the rest."""
    kept = part.state_dict()
    tensors = {key: value for key, value in kept.items() if isinstance(value, Tensor)}
    found.tensors.update({f"{place}{key}": value for key, value in tensors.items()})
    return {key: value for key, value in kept.items() if key not in tensors}


def scale_to_dict(scaler: LossScale | None) -> dict[str, Any] | None:
    """The loss scale in plain data."""
    if scaler is None:
        return None
    return {
        "scale": scaler.scale.cpu(),
        "good_steps": scaler.good_steps.cpu(),
        "skipped": scaler.skipped.cpu(),
        "growth_factor": scaler.growth_factor,
        "backoff_factor": scaler.backoff_factor,
        "growth_interval": scaler.growth_interval,
    }


def scale_from_dict(saved: Mapping[str, Any] | None, state: DistState) -> LossScale | None:
    """The loss scale, on the device of the run."""
    if saved is None:
        return None
    moved: dict[str, Any] = {
        name: value.to(state.device) if isinstance(value, Tensor) else value
        for name, value in saved.items()
    }
    return LossScale(**moved)


def room_for(
    kind: str, plan: Plan, step: str, there: Mapping[str, Tensor], entries: Mapping[str, Entry]
) -> dict[str, Tensor]:
    """A tensor for each of these entries of a kind: the one that is there, or a new one."""
    prefix = place_of(kind, step)
    parameters = dict(unwrapped(plan.model).named_parameters())
    found = {}
    for entry_name, entry in entries.items():
        if not entry_name.startswith(prefix):
            continue
        parameter = parameters.get(entry_name.removeprefix(prefix).rpartition("/")[0])
        dtype, shape = getattr(torch, entry.dtype), entry.shape
        old = there.get(entry_name)
        if old is None or old.dtype != dtype or tuple(old.shape) != shape:
            if parameter is not None and is_sharded(parameter) and tuple(parameter.shape) == shape:
                old = torch.empty_like(parameter.detach(), dtype=dtype)
            else:
                device = parameter.device if parameter is not None and shape else "cpu"
                old = torch.empty(shape, dtype=dtype, device=device)
        found[entry_name] = old
    return found


def put_back(
    plan: Plan,
    step: str,
    tensors: Mapping[str, Tensor],
    rest: dict[str, Any],
    *,
    optimizer: bool,
    fresh: Collection[str],
) -> None:
    """Give the model, the transforms and the optimizer what was saved; tensors are read.

    Not the transforms whose entries begin with one of `fresh`.
    """
    _put_back_model(unwrapped(plan.model), _under(place_of("model", step), tensors), rest["model"])
    if optimizer:
        _put_back_optimizer(plan, place_of("optimizer", step), tensors, rest["optimizer"])
    for place, where, part in _parts(plan, step):
        if where in rest["transforms"] and place not in fresh:
            part.load_state_dict({**rest["transforms"][where], **_under(place, tensors)})


def _put_back_model(
    model: nn.Module, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]
) -> None:
    """Extra state, and tensors that a `state_dict` of its own gave as copies; others were read in place."""
    mine = {_memory(each) for each in (*model.parameters(), *model.buffers())}
    copies = {key: each for key, each in tensors.items() if _memory(each) not in mine}
    own = model.state_dict()
    found = {key: value for key, value in {**extra, **copies}.items() if key in own}
    if not found:
        return
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        model.load_state_dict({**own, **found})
        return
    lost = model.load_state_dict({**own, **found}, strict=False).unexpected_keys
    if found.keys() & set(lost):  # it may leave something out, but takes back what it gives
        raise CheckpointError(f"load: model must take back what its state_dict gives, got {lost}")


def _memory(tensor: Tensor) -> tuple[torch.device, int]:
    """Where a tensor begins."""
    held = local(tensor)
    return held.device, held.data_ptr()


def _put_back_optimizer(
    plan: Plan, prefix: str, tensors: Mapping[str, Tensor], rest: dict[str, Any]
) -> None:
    kept = {name: dict(values) for name, values in rest["state"].items()}
    for where, value in _under(prefix, tensors).items():
        name, _, key = where.rpartition("/")
        kept.setdefault(name, {})[key] = value
    order = _order(plan)
    state = {number: kept[name] for number, name in enumerate(order) if name in kept}
    load_optimizer(plan, {**rest["others"], "state": state})


def load_optimizer(plan: Plan, saved: Mapping[str, Any]) -> None:
    """Give the optimizer a `state_dict` back, but how it computes; tensors in the dtypes that were saved.

    Torch turns what is kept of a float64 parameter into float64, float32 counters too.
    """
    theirs, ours = saved["param_groups"], plan.optimizer.param_groups
    groups = [
        {**their, **{key: our[key] for key in HOW if key in our}}
        for their, our in zip(theirs, ours, strict=True)
    ]
    plan.optimizer.load_state_dict({**saved, "param_groups": groups})
    groups = plan.optimizer.param_groups
    order = list(dict.fromkeys(each for group in groups for each in group["params"]))
    for number, values in saved["state"].items():
        loaded = plan.optimizer.state[order[number]]
        for key, value in values.items():
            if isinstance(value, Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)


def _under(place: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those whose names begin so, without that."""
    return {
        name.removeprefix(place): value for name, value in tensors.items() if name.startswith(place)
    }


def _add_model(found: Contents, prefix: str, model: nn.Module) -> dict[str, Any]:
    """Tensors under their first name; gives back what is no tensor."""
    first: dict[tuple[Any, ...], str] = {}
    trained = dict(model.named_parameters(remove_duplicate=False))
    extra = {}
    for key, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            extra[key] = value
            continue
        name = f"{prefix}{key}"
        place = _place(value, trained.get(key))
        if value.numel() and place in first:
            found.tied[name] = first[place]
        else:
            first[place] = name
            found.tensors[name] = value
            if key not in trained:
                found.buffers.append(name)
    return extra


def _place(value: Tensor, parameter: nn.Parameter | None) -> tuple[Any, ...]:
    """Equal for what is one tensor; a rank may hold nothing of one in shards."""
    if is_sharded(value):
        return (id(parameter),)
    return value.device, value.data_ptr(), value.shape, value.stride()


def _optimizer_state(plan: Plan) -> tuple[list[tuple[str, str, Tensor]], dict[str, Any]]:
    """Tensors by parameter and key; the rest of the optimizer's `state_dict`."""
    saved = plan.optimizer.state_dict()
    order = _order(plan)
    tensors, rest = [], dict[str, dict[str, Any]]()
    for number, values in saved["state"].items():
        name = order[number]
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors.append((name, key, value))
            else:
                rest.setdefault(name, {})[key] = value
    others = {key: value for key, value in saved.items() if key != "state"}
    return tensors, {"state": rest, "others": others}


def _order(plan: Plan) -> list[str]:
    """Names of the optimizer's parameters, by the numbers that its `state_dict` gives them."""
    return list(dict.fromkeys(name for group in signature(plan)["groups"] for name in group))


def _name(function: Any) -> str:
    told = describe(function)
    return told if isinstance(function, Schedule) else told.partition("(")[0]
