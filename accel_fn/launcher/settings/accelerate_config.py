"""Translate the configuration that `accelerate config` writes; warn of what has no counterpart."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping

from accel_fn.errors import SettingsError
from accel_fn.launcher.settings.accelerate_keys import SECTIONS, in_script, is_set, named
from accel_fn.launcher.settings.value import Given, Layer, check_names, nearest

_SAME = (
    *("num_machines", "machine_rank", "main_process_ip", "main_process_port"),
    *("rdzv_backend", "gpu_ids"),
)
"""Keys that mean the same here."""

_BOOLEANS = ("same_network", "debug", "enable_cpu_affinity")
"""The first two hold in any case: machines meet by address, collectives are always checked."""

_DEVICES = ("GPU", "XPU", "NPU", "MLU", "SDAA", "MUSA", "HPU", "NEURON")
_PLAIN = ("NO", "MULTI_CPU", *(f"MULTI_{device}" for device in _DEVICES))
_OTHER_TYPES = ("DEEPSPEED", "MEGATRON_LM", "TP", "XLA")
"""Types that need more than processes with replicas."""

_TYPES = (*_PLAIN, "FSDP", *_OTHER_TYPES)
_OTHERS = (
    *("main_training_function", "downcast_bf16", "dynamo_backend", "command_file", "commands"),
    *("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env"),
)
"""Keys, beside the sections, that are no settings here."""

_KNOWN = (
    *("compute_environment", "distributed_type", "num_processes", "use_cpu"),
    *("mixed_precision", "fp16", *_SAME, *_BOOLEANS, *_OTHERS, *SECTIONS),
)
_MICROBATCHES = (
    ("deepspeed_config", "gradient_accumulation_steps"),
    ("megatron_lm_config", "megatron_lm_num_micro_batches"),
)

_Entry = tuple[str, str, object]
"""A section (or none), a key and its value."""


class UnusedSettingsWarning(UserWarning):
    """A file sets something that accel_fn does not read from it."""


def is_accelerate_config(given: Mapping[str, Given]) -> bool:
    """Did accelerate write this file?"""
    return "compute_environment" in given or "distributed_type" in given


def translate(given: Mapping[str, Given]) -> Layer:
    """Make our settings of accelerate's; name the rest in one warning, refuse unknown keys.

    A null is a question that accelerate's dialogue left open, also of a key that a later version has.
    """
    kind = _distributed_type(given)
    given = {name: each for name, each in given.items() if each.value is not None}
    environment = given.get("compute_environment")
    if environment is not None and environment.value != "LOCAL_MACHINE":
        environment.refuse("compute_environment", "be LOCAL_MACHINE")
    check_names({name: each.where for name, each in given.items()}, _KNOWN)
    for name in _BOOLEANS:
        each = given.get(name)
        if each is not None and str(each.value).lower() not in ("true", "false", "yes", "no"):
            each.refuse(name, "be true or false")
    sections = {name: _section(name, given[name]) for name in SECTIONS if name in given}
    translated = {
        **{name: given.get(name) for name in _SAME},
        "num_processes": _processes(given.get("num_processes"), kind),
        "cpu": _use_cpu(given, kind),
        "mixed_precision": _precision(given),
        "num_microbatches": _microbatches(given, sections),
        "wrap": kind.becomes("fsdp") if kind.value == "FSDP" else None,
    }
    values = {name: each for name, each in translated.items() if each is not None}
    on_cpu = "cpu" in values and bool(values["cpu"].value)
    _warn(kind.source, [*_outside(given, kind, on_cpu=on_cpu), *_in_sections(sections, values)])
    return Layer(values, accelerators=None if kind.value == "NO" or on_cpu else kind)


def _section(name: str, each: Given) -> Mapping[str, object]:
    """Read a section, by the keys that accelerate writes today."""
    if not isinstance(each.value, dict):
        each.refuse(name, "be a section")
    keys = {key: value for key, value in each.value.items() if value is not None}
    section = {named(name, str(key)): value for key, value in keys.items()}
    check_names(dict.fromkeys(section, f"{each.where}: {name}"), SECTIONS[name])
    return section


def _distributed_type(given: Mapping[str, Given]) -> Given:
    """Read the type; YAML reads an unquoted NO as false."""
    if "distributed_type" not in given:
        source = next(iter(given.values())).source
        raise SettingsError(f"{source}: distributed_type must be given, as accelerate does")
    kind = given["distributed_type"]
    if kind.value is False:
        kind = kind.becomes("NO")
    if kind.value not in _TYPES:
        meant = nearest(str(kind.value), [each.lower() for each in _TYPES]).upper()
        meant = "XLA" if kind.value == "TPU" else meant  # accelerate's question names it so
        repair = f"did you mean {meant}?" if meant else ""
        kind.refuse("distributed_type", f"be one of {', '.join(_TYPES)}", repair)
    return kind


def _processes(count: Given | None, kind: Given) -> Given | None:
    """Read the number of processes; -1 leaves it open, and NO is one."""
    if kind.value != "NO":
        return None if count is not None and count.value == -1 else count
    if count is not None and count.value != 1:
        repair = "set distributed_type to MULTI_CPU or MULTI_GPU for more"
        count.refuse("num_processes", "be 1 where distributed_type is NO", repair)
    return count or kind.becomes(1)


def _use_cpu(given: Mapping[str, Given], kind: Given) -> Given | None:
    """MULTI_CPU is the CPU even without use_cpu."""
    if kind.value == "MULTI_CPU":
        ids = given.get("gpu_ids")
        if ids is not None and ids.value not in (None, "all"):
            ids.refuse("gpu_ids", "be left out where distributed_type is MULTI_CPU")
        return kind.becomes(True)
    use_cpu = given.get("use_cpu")
    if use_cpu and use_cpu.value is True and str(kind.value).startswith("MULTI_"):
        rule = f"be false where distributed_type is {kind.value}"
        use_cpu.refuse("use_cpu", rule, "or set MULTI_CPU")
    return use_cpu


def _precision(given: Mapping[str, Given]) -> Given | None:
    """Read mixed_precision, or the older key fp16."""
    found, old = given.get("mixed_precision"), given.get("fp16")
    if found is None and old is not None:
        return old.becomes("fp16" if old.value else "no")
    return found


def _microbatches(
    given: Mapping[str, Given], sections: Mapping[str, Mapping[str, object]]
) -> Given | None:
    """Steps of accumulation there are micro-batches here."""
    for section, key in reversed(_MICROBATCHES):
        count = sections.get(section, {}).get(key, "auto")
        if count != "auto":
            return given[section].becomes(count)
    return None


def _outside(given: Mapping[str, Given], kind: Given, *, on_cpu: bool) -> Iterator[_Entry]:
    """Entries outside of the sections that are no settings here."""
    if kind.value in _OTHER_TYPES:
        yield "", f"distributed_type {kind.value}", True
    if "enable_cpu_affinity" in given and not on_cpu:
        yield "", "enable_cpu_affinity", given["enable_cpu_affinity"].value
    for name in _OTHERS:
        if name in given:
            yield "", name, given[name].value


def _in_sections(
    sections: Mapping[str, Mapping[str, object]], values: Mapping[str, Given]
) -> Iterator[_Entry]:
    """Entries in them that are no settings here."""
    taken = [key for _, key in _MICROBATCHES] if "num_microbatches" in values else []
    for name, section in sections.items():
        if not is_set(section.get("dynamo_backend", True)):
            continue
        if name == "parallelism_config" and _shards_are_the_rest(section, values):
            taken = [*taken, "parallelism_config_dp_shard_size"]
        yield from ((name, key, value) for key, value in section.items() if key not in taken)


def _shards_are_the_rest(section: Mapping[str, object], values: Mapping[str, Given]) -> bool:
    """Do all ranks of a replica shard it, as here?"""
    replicas = section.get("parallelism_config_dp_replicate_size", 1)
    shards = section.get("parallelism_config_dp_shard_size", 1)
    if not isinstance(replicas, int) or not isinstance(shards, int):
        return False
    return "num_processes" in values and values["num_processes"].value == replicas * shards


def _warn(source: str, entries: Iterable[_Entry]) -> None:
    """Warn once: what to write in the script, and what has no counterpart."""
    written: list[str] = []
    missing: dict[str, list[str]] = {}
    for section, key, value in entries:
        text = in_script(key, value)
        if text:
            written.append(f"{key} is {text}")
        elif text is None:
            missing.setdefault(section or key, []).extend([key] if section else [])
    lines = []
    if written:
        lines.append(f"not read from this file: in the script, {', '.join(written)}")
    if missing:
        left = [f"{name} ({', '.join(keys)})" if keys else name for name, keys in missing.items()]
        lines.append(f"accel_fn has no counterpart yet for {', '.join(left)}; left out")
    if lines:
        warnings.warn(f"{source}: {'; '.join(lines)}", UnusedSettingsWarning, stacklevel=3)
