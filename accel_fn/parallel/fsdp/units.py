"""The FSDP units of a model, by name, and a check for parameters that FSDP cannot shard."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import nn
from torch.distributed.fsdp import FSDPModule

from accel_fn.core.dtensor import is_sharded
from accel_fn.errors import PlanError, message
from accel_fn.parallel.blocks import Blocks, find_blocks, is_container, modules_in

WHOLE_MODEL = ""
"""The name of the model in its `named_modules`; as `blocks`, it makes the model one unit."""
_BEFORE = (
    "leave out fully_shard, or DistributedConfig(fsdp_size=) of transformers: make the model by "
    "af.empty(AutoModelForCausalLM.from_config, config), and call load_model(model, folder) after build"
)
_AGAIN = (
    "build once, with one loss_fn that chooses by the batch, or make the model again and build it with "
    "after=step, which matches parameters by name"
)


def units_of(model: nn.Module, blocks: Blocks, ignore: Blocks = None) -> dict[str, nn.Module]:
    """Return the FSDP units of a model, by name, without ignored modules."""
    ignored = modules_in(model, ignore, "wrap_fsdp(ignore)")
    inner = {} if blocks == WHOLE_MODEL else find_blocks(model, blocks, "wrap_fsdp")
    found = {**dict(tops_of(model, "")), **inner}
    return {name: unit for name, unit in found.items() if unit not in ignored}


def has_inner(name: str, units: Collection[str]) -> bool:
    """Return whether a unit holds other units."""
    return any(each != name and _is_in(each, name) for each in units)


def ignored_in(model: nn.Module, ignore: Blocks) -> set[nn.Parameter]:
    """Return the parameters of ignored modules, which stay whole on every rank."""
    modules = modules_in(model, ignore, "wrap_fsdp(ignore)")
    return {each for module in modules for each in module.parameters(recurse=False)}


def tops_of(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the model with its name, or the modules in it if it is only a container."""
    if not is_container(module):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from tops_of(child, f"{name}.{child_name}" if name else child_name)


def check_shardable(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    ignored: Collection[nn.Parameter],
    *,
    is_split: bool,
    is_frozen: bool = False,
) -> None:
    """Refuse, by name, parameters that FSDP cannot shard or would refuse only in the first step."""
    holders: dict[nn.Parameter, tuple[str, str]] = {}
    # Parameters of a frozen model may still require gradients. No rank adds up these gradients, so
    # their dtypes do not matter.
    added = [p for p in model.parameters() if p.requires_grad and not is_frozen]
    dtype = added[0].dtype if added else None
    # An FSDP class means that the user has called `fully_shard`: our own step restores the classes.
    again = _BEFORE if any(isinstance(each, FSDPModule) for each in model.modules()) else _AGAIN
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in ignored:
            if parameter.requires_grad:
                rule = "match modules whose parameters are frozen, since no rank adds up their gradients"
                repair = "call requires_grad_(False) on the module, or leave it out of ignore"
                raise PlanError(message("build", "wrap_fsdp(ignore)", rule, name, repair))
            continue
        if parameter._backward_hooks:
            raise PlanError(
                f"build: wrap_fsdp's model must have no hooks on parameters, which shards replace, got "
                f"one on {name}; register it after build, on the shard"
            )
        # A parameter is in the innermost unit around it. The names of the outer units are prefixes
        # of this unit's name, so take the longest name.
        holder = max((each for each in units if _is_in(name, each)), key=len)
        other, elsewhere = holders.setdefault(parameter, (name, holder))
        # FSDP adds up all gradients of a unit in one buffer, so these gradients must have one
        # dtype.
        is_of_one_dtype = not parameter.requires_grad or dtype in (None, parameter.dtype)
        is_complex = parameter.is_complex() or (dtype is not None and dtype.is_complex)
        convert = (
            "hold complex ones as pairs of real numbers, by torch.view_as_complex in the forward, or use "
            "wrap_ddp"
            if is_complex
            else "convert it"
        )
        whole = is_split or not is_sharded(parameter)
        rules = {
            f"hold parameters whole; {again}": whole,
            "tie parameters within a block, or outside of all; name other blocks": elsewhere
            == holder,
            "hold parameters that can be cut; give it the shape [1]": parameter.ndim > 0,
            "hold contiguous parameters; make it so": parameter.is_contiguous(),
            f"train parameters of one dtype, {dtype}; {convert}": is_of_one_dtype,
        }
        for text, holds in rules.items():
            if not holds:
                rule, _, repair = text.partition("; ")
                got = name if other == name else f"{other} and {name}"
                raise PlanError(f"build: wrap_fsdp's model must {rule}, got {got}; {repair}")


def _is_in(name: str, unit: str) -> bool:
    return not unit or name.startswith(f"{unit}.")
