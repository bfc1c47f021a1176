"""Reading the configuration that `accelerate config` writes: what maps, what has no counterpart."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping

from accel_fn.errors import SettingsError, message
from accel_fn.launcher.settings.accelerate_keys import SECTIONS, asks, in_script, named
from accel_fn.launcher.settings.value import Given, Layer, check_names, nearest

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

_YES_OR_NO = ("same_network", "debug", "enable_cpu_affinity")
"""Of these, two are met whatever they say: machines meet by address, collectives are always checked."""

_DEVICES = ("GPU", "XPU", "NPU", "MLU", "SDAA", "MUSA", "HPU", "NEURON")
_PLAIN = ("NO", "MULTI_CPU", *(f"MULTI_{device}" for device in _DEVICES))
_SHARDS = "FSDP"
_OTHER_TYPES = ("DEEPSPEED", "MEGATRON_LM", "TP", "XLA")
"""Types that ask for more than processes with replicas."""

_XLA_DEVICE = "TPU"
"""What `accelerate config` calls XLA when it asks."""

_OTHERS = (
    "main_training_function",
    "downcast_bf16",
    "dynamo_backend",
    "tpu_name",
    "tpu_zone",
    "tpu_use_cluster",
    "tpu_use_sudo",
    "tpu_vm",
    "tpu_env",
    "command_file",
    "commands",
)
"""Keys, beside the sections, that are no settings here."""

_KNOWN = (
    "compute_environment",
    *_SAME,
    *_YES_OR_NO,
    *_OTHERS,
    *SECTIONS,
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


_Asked = tuple[str, str, object]
"""A section (or none), a key and its value."""


class UnusedSettingsWarning(UserWarning):
    """A file asks for something that accel_fn does not do."""


def wrote(given: Mapping[str, Given]) -> bool:
    """Is this one of accelerate's files?"""
    return any(mark in given for mark in _MARKS)


def translate(given: Mapping[str, Given]) -> Layer:
    """Our settings out of accelerate's; one warning names what is left, unknown keys are refused."""
    _check_environment(given)
    check_names({name: each.where for name, each in given.items()}, _KNOWN)
    _check_yes_or_no(given)
    sections = {name: _section(name, given[name]) for name in SECTIONS if name in given}
    kind = _distributed_type(given)
    values = {name: given[name] for name in _SAME if name in given}
    values |= dict(_processes(given, kind))
    cpu = _use_cpu(given, kind)
    if cpu is not None:
        values["cpu"] = cpu
    values |= dict(_precision(given))
    values |= dict(_microbatches(given, sections))
    if kind.value == _SHARDS:
        values["wrap"] = Given("fsdp", kind.source, kind.line)
    on_cpu = bool(cpu and cpu.value)
    _warn_of(kind.source, [*_asked(given, kind, on_cpu=on_cpu), *_in_sections(sections, values)])
    return Layer(values, accelerators=None if kind.value == "NO" or on_cpu else kind)


def _check_environment(given: Mapping[str, Given]) -> None:
    environment = given.get("compute_environment")
    if environment is not None and environment.value != "LOCAL_MACHINE":
        raise SettingsError(
            message(environment.where, "compute_environment", "be LOCAL_MACHINE", environment.value)
        )


def _check_yes_or_no(given: Mapping[str, Given]) -> None:
    for name in _YES_OR_NO:
        each = given.get(name)
        if each is not None and str(each.value).lower() not in ("true", "false", "yes", "no"):
            raise SettingsError(message(each.where, name, "be true or false", each.value))


def _section(name: str, each: Given) -> Mapping[str, object]:
    """What a section says, by the keys that accelerate writes today; none is empty."""
    if each.value is None:
        return {}
    if not isinstance(each.value, dict):
        raise SettingsError(message(each.where, name, "be a section", each.value))
    section = {named(name, str(key)): value for key, value in each.value.items()}
    check_names(dict.fromkeys(section, f"{each.where}: {name}"), SECTIONS[name])
    return section


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
    if name == _XLA_DEVICE:
        return "XLA"
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
        ids = given.get("gpu_ids")
        if ids is not None and ids.value not in (None, "all"):
            rule = "be left out where distributed_type is MULTI_CPU"
            raise SettingsError(message(ids.where, "gpu_ids", rule, ids.value))
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


def _microbatches(
    given: Mapping[str, Given], sections: Mapping[str, Mapping[str, object]]
) -> Iterator[tuple[str, Given]]:
    """How often their back ends accumulate is how often we split."""
    for section, key in _MICROBATCHES:
        count = sections.get(section, {}).get(key, "auto")
        if count != "auto":
            each = given[section]
            yield "num_microbatches", Given(count, each.source, each.line)


def _asked(given: Mapping[str, Given], kind: Given, *, on_cpu: bool) -> Iterator[_Asked]:
    """What stands outside of the sections."""
    if kind.value in _OTHER_TYPES:
        yield "", f"distributed_type {kind.value}", True
    if given.get("mixed_precision", kind).value == "fp8":
        yield "", "mixed_precision fp8", True
    if "enable_cpu_affinity" in given and not on_cpu:
        yield "", "enable_cpu_affinity", given["enable_cpu_affinity"].value
    for name in _OTHERS:
        if name in given:
            yield "", name, given[name].value


def _in_sections(
    sections: Mapping[str, Mapping[str, object]], values: Mapping[str, Given]
) -> Iterator[_Asked]:
    """What stands in them and is not a setting here."""
    taken = [key for _, key in _MICROBATCHES] if "num_microbatches" in values else []
    for name, section in sections.items():
        if not asks(section.get("dynamo_backend", True)):
            continue
        if name == "parallelism_config" and _shards_are_the_rest(section, values):
            taken = [*taken, "parallelism_config_dp_shard_size"]
        yield from ((name, key, value) for key, value in section.items() if key not in taken)


def _shards_are_the_rest(section: Mapping[str, object], values: Mapping[str, Given]) -> bool:
    """All ranks of a replica shard it, here as well."""
    replicas = section.get("parallelism_config_dp_replicate_size", 1)
    shards = section.get("parallelism_config_dp_shard_size", 1)
    if not isinstance(replicas, int) or not isinstance(shards, int):
        return False
    return "num_processes" in values and values["num_processes"].value == replicas * shards


def _warn_of(source: str, asked: Iterable[_Asked]) -> None:
    """One warning: what to write in the script, and what nobody does."""
    written: list[str] = []
    missing: dict[str, list[str]] = {}
    for section, key, value in asked:
        text = in_script(key, value)
        if text:
            written.append(f"{key} is {text}")
        elif text is None:
            missing.setdefault(section or key, []).extend([key] if section else [])
    told = []
    if written:
        told.append(f"not read from this file: in the script, {', '.join(written)}")
    if missing:
        left = [f"{name} ({', '.join(keys)})" if keys else name for name, keys in missing.items()]
        told.append(f"accel_fn has no counterpart yet for {', '.join(left)}; left out")
    if told:
        warnings.warn(f"{source}: {'; '.join(told)}", UnusedSettingsWarning, stacklevel=3)
