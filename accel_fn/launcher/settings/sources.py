"""Resolve settings from flags, variables and files, with the source of each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from accel_fn.errors import SettingsError
from accel_fn.launcher.machines.detect import Machine, detect
from accel_fn.launcher.settings.setting_checks import check_machine, check_place
from accel_fn.launcher.settings.settings import Settings, check_settings, is_on
from accel_fn.launcher.settings.value import Given, Layer, check_names, nearest

SETTINGS_FILE = "accel_fn.yaml"
PREFIX = "ACCEL_FN_"


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings, and a description of the source of each."""

    settings: Settings
    sources: Mapping[str, str]

    def is_given(self, name: str) -> bool:
        """Was it given (not a default, nor detected)?"""
        return not self.sources[name].startswith(("default", "detected"))


def resolve(
    flags: Mapping[str, object],
    *,
    config: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    folder: Path | None = None,
    machine: Machine | None = None,
) -> Resolved:
    """Resolve each setting: the flag, else the variable, else a file, else the default.

    Args:
        flags: by the setting's name; None is a flag that was not given.
        config: the file to read; default: the nearest `accel_fn.yaml`, or
            `[tool.accel_fn]` of a pyproject.toml, in or above `folder`. Settings
            that it leaves open are read from the user's own file.
        environment: of this process.
        folder: where the search starts; default: the working folder.
        machine: default: this one, detected.

    Returns:
        Settings that fit each other and the machine, with `num_processes` filled in.

    Raises:
        SettingsError: a name is unknown, a value is wrong, or two conflict.

    Cost: reads files; runs nvidia-smi if torch is built for CUDA.
    """
    layers = list(_layers(flags, config, environment, folder or _working_folder()))
    machine = machine or detect(environment)
    given, sources = _merged(layers)
    where = {name: each.where for name, each in given.items()}
    settings = check_settings({name: each.value for name, each in given.items()}, where)
    accelerators = next((layer.accelerators for layer in layers if layer.accelerators), None)
    sagemaker = next((layer.sagemaker for layer in layers if layer.sagemaker), None)
    check_place(environment, sagemaker)
    check_machine(settings, where, environment, machine, accelerators=accelerators)
    if settings.num_processes is None:
        count, source = default_processes(settings, machine)
        settings = settings.model_copy(update={"num_processes": count})
        sources["num_processes"] = source
    return Resolved(settings, MappingProxyType(sources))


def _working_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise SettingsError(
            "config: working folder must be there, got one that was removed"
        ) from None


def _merged(layers: list[Layer]) -> tuple[dict[str, Given], dict[str, str]]:
    """Take the strongest value of each setting, and its source.

    `cpu` and `gpu_ids` both choose the devices: the stronger source of either overrides the other.
    """
    given: dict[str, Given] = {}
    sources = dict.fromkeys(Settings.model_fields, "default")
    for layer in reversed(layers):
        for name, other in (("cpu", "gpu_ids"), ("gpu_ids", "cpu")):
            if other in given and name in layer.values and is_on(name, layer.values[name].value):
                del given[other]
                sources[other] = f"default, because of {layer.values[name].source}"
        given |= layer.values
        sources |= {name: each.source for name, each in layer.values.items()}
    return given, sources


def default_processes(settings: Settings, machine: Machine) -> tuple[int, str]:
    """One process for each accelerator that may be used, else one; and why."""
    if settings.cpu:
        count, why = 1, "default"
    elif settings.gpu_ids is not None:
        count, why = len(settings.gpu_ids), "detected: one for each of gpu_ids"
    else:
        count, why = machine.num_devices or 1, f"detected: {machine.devices}"
    num_machines = settings.num_machines or 1
    return count * num_machines, why if num_machines == 1 else f"{why} on each machine"


def _layers(
    flags: Mapping[str, object], config: Path | None, environment: Mapping[str, str], folder: Path
) -> Iterator[Layer]:
    """Read each source, the strongest first."""
    yield _from_flags(flags)
    yield _from_variables(environment)
    file = _nearest_file(folder) if config is None else _read(config)
    if file is not None:
        yield file
    own = user_file(environment)
    if own is not None and _is_file(own) and (layer := _read(own)):
        yield layer


def _from_flags(flags: Mapping[str, object]) -> Layer:
    given = {
        name: Given(value, f"flag --{name.replace('_', '-')}")
        for name, value in flags.items()
        if value is not None
    }
    check_names({name: each.source for name, each in given.items()}, Settings.model_fields)
    return Layer(given)


def _from_variables(environment: Mapping[str, str]) -> Layer:
    """Read variables that are not empty. A name close to a setting's is a mistake; others are not ours."""
    values, mistyped = {}, {}
    for variable, value in environment.items():
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or not value:
            continue
        if name in Settings.model_fields:
            values[name] = Given(value, variable)
        elif nearest(name, Settings.model_fields):
            mistyped[name] = variable
    check_names(mistyped, Settings.model_fields)
    return Layer(values)


def _read(path: Path, *, is_pyproject: bool = False) -> Layer | None:
    """Import the readers only if there is a file: a launch without one starts sooner."""
    from accel_fn.launcher.settings.files import read_pyproject, read_yaml

    return read_pyproject(path) if is_pyproject else read_yaml(path)


def _nearest_file(folder: Path) -> Layer | None:
    for place in (folder, *folder.parents):
        file, project = place / SETTINGS_FILE, place / "pyproject.toml"
        ours = _read(file) if _is_file(file) else None
        section = _read(project, is_pyproject=True) if _is_file(project) else None
        if ours is not None and section is not None:
            raise SettingsError(
                f"{file}: settings must stand in one place, got [tool.accel_fn] "
                f"in {project} too; keep one of them"
            )
        if ours is not None or section is not None:
            return ours or section
    return None


def user_file(environment: Mapping[str, str]) -> Path | None:
    """The path of the user's own file; None if there is no home."""
    base, home = environment.get("XDG_CONFIG_HOME", ""), environment.get("HOME", "")
    if os.path.isabs(base):
        return Path(base, "accel_fn", "config.yaml")
    return Path(home, ".config", "accel_fn", "config.yaml") if home else None


def _is_file(path: Path) -> bool:
    """Is it a file in a folder that can be read?"""
    try:
        return path.is_file()
    except OSError:
        return False
