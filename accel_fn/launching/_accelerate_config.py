"""Reading the configuration that `accelerate config` writes: what maps, what has no counterpart."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from accel_fn._errors import SettingsError, message
from accel_fn.launching._given import Given, Layer, check_names, nearest

_MARKS = ("compute_environment", "distributed_type")
_SAME = (
    "num_machines",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "rdzv_backend",
    "gpu_ids",
)
"""Keys that mean here what they mean there."""

_NOTHING_TO_DO = ("compute_environment", "same_network", "debug", "enable_cpu_affinity")
"""Keys whose every value is met already: collectives are always checked, processes always bound."""

_DEVICES = ("GPU", "XPU", "NPU", "MLU", "SDAA", "MUSA", "HPU", "NEURON")
_PLAIN = ("NO", "MULTI_CPU", *(f"MULTI_{device}" for device in _DEVICES))
_SHARDS = "FSDP"
_OTHER_TYPES = ("DEEPSPEED", "MEGATRON_LM", "TP", "XLA")
"""Types that ask for more than processes with replicas."""

_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "main_training_function": "main",
        "downcast_bf16": "no",
        "dynamo_backend": "NO",
        "fsdp_config": None,
        "deepspeed_config": None,
        "megatron_lm_config": None,
        "parallelism_config": None,
        "tp_config": None,
        "fp8_config": None,
        "ipex_config": None,
        "dynamo_config": None,
        "mpirun_config": None,
        "tpu_name": None,
        "tpu_zone": None,
        "tpu_use_cluster": None,
        "tpu_use_sudo": None,
        "tpu_vm": None,
        "tpu_env": None,
        "command_file": None,
        "commands": None,
    }
)
"""Keys without a counterpart, with the value that asks for nothing."""

_KNOWN = (
    *_SAME,
    *_NOTHING_TO_DO,
    *_DEFAULTS,
    "distributed_type",
    "num_processes",
    "use_cpu",
    "mixed_precision",
    "fp16",
)
_MICROBATCHES = (
    ("deepspeed_config", "gradient_accumulation_steps"),
    ("megatron_lm_config", "megatron_lm_num_micro_batches"),
)


class UnusedSettingsWarning(UserWarning):
    """A file asks for something that accel_fn does not do."""


def wrote(given: Mapping[str, Given]) -> bool:
    """Is this one of accelerate's files?"""
    return any(mark in given for mark in _MARKS)


def translate(given: Mapping[str, Given]) -> Layer:
    """Our settings out of accelerate's; one warning names what is left, unknown keys are refused."""
    _check_environment(given)
    check_names({name: each.where for name, each in given.items()}, _KNOWN)
    kind = _distributed_type(given)
    values = {name: given[name] for name in _SAME if name in given}
    values |= dict(_processes(given, kind))
    cpu = _use_cpu(given, kind)
    if cpu is not None:
        values["cpu"] = cpu
    values |= dict(_precision(given))
    values |= dict(_microbatches(given))
    if kind.value == _SHARDS:
        values["wrap"] = Given("fsdp", kind.source, kind.line)
    unused = list(_unused(given, kind, values))
    if unused:
        source = next(iter(given.values())).source
        text = f"{source}: accel_fn has no counterpart yet for {', '.join(unused)}; left out"
        warnings.warn(text, UnusedSettingsWarning, stacklevel=2)
    wants_devices = kind.value != "NO" and not (cpu and cpu.value)
    return Layer(values, accelerators=kind if wants_devices else None)


def _check_environment(given: Mapping[str, Given]) -> None:
    environment = given.get("compute_environment")
    if environment is not None and environment.value != "LOCAL_MACHINE":
        raise SettingsError(
            message(environment.where, "compute_environment", "be LOCAL_MACHINE", environment.value)
        )


def _distributed_type(given: Mapping[str, Given]) -> Given:
    """The type; YAML reads an unquoted NO as false."""
    if "distributed_type" not in given:
        source = next(iter(given.values())).source
        raise SettingsError(f"{source}: distributed_type must be given, as accelerate does")
    each = given["distributed_type"]
    kind = Given("NO" if each.value is False else each.value, each.source, each.line)
    types = (*_PLAIN, _SHARDS, *_OTHER_TYPES)
    if kind.value not in types:
        meant = nearest_type(str(kind.value), types)
        repair = f"did you mean {meant}?" if meant else ""
        rule = f"be one of {', '.join(types)}"
        raise SettingsError(message(kind.where, "distributed_type", rule, kind.value, repair))
    return kind


def nearest_type(name: str, types: tuple[str, ...]) -> str:
    """The type that was probably meant."""
    return nearest(name, [each.lower() for each in types]).upper()


def _processes(given: Mapping[str, Given], kind: Given) -> Iterator[tuple[str, Given]]:
    """How many; -1 says that somebody else does, and NO is one."""
    each = given.get("num_processes")
    if kind.value == "NO":
        if each is not None and each.value != 1:
            repair = "set distributed_type to MULTI_CPU or MULTI_GPU for more"
            rule = "be 1 where distributed_type is NO"
            raise SettingsError(message(each.where, "num_processes", rule, each.value, repair))
        yield "num_processes", each or Given(1, kind.source, kind.line)
    elif each is not None and each.value != -1:
        yield "num_processes", each


def _use_cpu(given: Mapping[str, Given], kind: Given) -> Given | None:
    """MULTI_CPU is the CPU, also where use_cpu is not there or says otherwise."""
    if kind.value == "MULTI_CPU":
        return Given(True, kind.source, kind.line)
    each = given.get("use_cpu")
    if each is None:
        return None
    if each.value is True and str(kind.value).startswith("MULTI_"):
        rule = f"be false where distributed_type is {kind.value}"
        raise SettingsError(message(each.where, "use_cpu", rule, True, "or set MULTI_CPU"))
    return each


def _precision(given: Mapping[str, Given]) -> Iterator[tuple[str, Given]]:
    """mixed_precision, or the key that came before it."""
    each = given.get("mixed_precision")
    if each is None and (old := given.get("fp16")) is not None:
        each = Given("fp16" if old.value else "no", old.source, old.line)
    if each is not None and each.value != "fp8":
        yield "mixed_precision", each


def _microbatches(given: Mapping[str, Given]) -> Iterator[tuple[str, Given]]:
    """How often their back ends accumulate is how often we split."""
    for section, key in _MICROBATCHES:
        each = given.get(section)
        if each is not None and isinstance(each.value, dict):
            count = each.value.get(key, "auto")
            if count != "auto":
                yield "num_microbatches", Given(count, each.source, each.line)


def _unused(given: Mapping[str, Given], kind: Given, values: Mapping[str, Given]) -> Iterator[str]:
    if kind.value in _OTHER_TYPES:
        yield f"distributed_type {kind.value}"
    if given.get("mixed_precision", kind).value == "fp8":
        yield "mixed_precision fp8"
    taken = [key for _, key in _MICROBATCHES] if "num_microbatches" in values else []
    for name, default in _DEFAULTS.items():
        value = given[name].value if name in given else None
        if value == default or not _asks(value):
            continue
        if not isinstance(value, dict):
            yield name
        elif left := [key for key, each in value.items() if _asks(each) and key not in taken]:
            yield f"{name} ({', '.join(map(str, left))})"


def _asks(value: object) -> bool:
    """Is it more than an empty answer?"""
    if isinstance(value, list):
        return any(map(_asks, value))
    return value is not False and value not in (None, "", "no", "none", {})
