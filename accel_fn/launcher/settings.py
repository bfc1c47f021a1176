"""The settings of a launch: their rules, their sources, and checks against the machine."""

from __future__ import annotations

import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from accel_fn.errors import SettingsError, message
from accel_fn.launcher.hardware import Machine, detect
from accel_fn.parallel.clusters import Node, Task, read_node, read_task

# ---- values and their sources


@dataclass(frozen=True, slots=True)
class Given:
    """One value of one setting, not checked yet."""

    value: object
    source: str
    line: int | None = None

    @property
    def where(self) -> str:
        """Return the source of the value, with the line if there is one."""
        return self.source if self.line is None else f"{self.source}:{self.line}"

    def becomes(self, value: object) -> Given:
        """Return another value with the same source and line."""
        return replace(self, value=value)

    def refuse(self, name: str, rule: str, repair: str = "") -> NoReturn:
        raise SettingsError(message(self.where, name, rule, self.value, repair))


@dataclass(frozen=True, slots=True)
class Layer:
    """The settings of one source."""

    values: Mapping[str, Given]
    check: Callable[[Settings, int, Mapping[str, str]], None] = lambda *_: None
    """Raises if the source does not fit the settings, the number of accelerators or the environment."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that was probably meant; "" if none is similar."""
    found = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.7)
    return found[0] if found else ""


def check_names(names: Mapping[str, str], known: Iterable[str]) -> None:
    """Refuse unknown names, with one line per name; `names` maps each name to its place."""
    known = list(known)
    unknown = [
        f"{where}: {_unknown(name, known)}" for name, where in names.items() if name not in known
    ]
    if unknown:
        raise SettingsError("\n".join(unknown))


def _unknown(name: str, known: list[str]) -> str:
    meant = nearest(name, known)
    if meant:
        return f"key must be a setting, got {name}: did you mean {meant}?"
    return f"key must be a setting, got {name}; there are {', '.join(known)}"


# ---- the settings and their rules


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of values: the rule that each value must follow, and the function that reads a value.

    `read` raises a ValueError, TypeError or OverflowError for an invalid value.
    """

    rule: str
    read: Callable[[Any], Any]
    flag: type = str
    choices: tuple[str, ...] = ()
    metavar: str | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. The value None means that the user has not given it.

    The launch may then use a value of the cluster or of the machine.
    """

    kind: Kind
    about: str
    default: object = None

    def read(self, value: object) -> Any:
        return None if value is None and self.default is None else self.kind.read(value)


def _refuse_unless(is_right: bool) -> None:
    if not is_right:
        raise ValueError


def _number(make: type, least: float, most: float, value: Any) -> Any:
    # YAML reads `yes` as True. Refuse it: True == 1, but the user did not mean the number 1.
    _refuse_unless(not isinstance(value, bool) and (isinstance(value, str) or make(value) == value))
    _refuse_unless(least <= make(value) <= most)
    return make(value)


def _boolean(value: object) -> bool:
    text = str(value).lower()
    _refuse_unless(isinstance(value, bool | int | str) and text in (*_YES, *_NO))
    return text in _YES


def _choice(choices: tuple[str, ...], value: object) -> object:
    # YAML reads `mixed_precision: no` as false.
    value = "no" if value is False else value
    _refuse_unless(isinstance(value, str) and value in choices)
    return value


def _host(value: Any) -> str:
    _refuse_unless(_HOST.fullmatch(value) is not None)
    return str(value)


def _indices(value: Any) -> tuple[int, ...] | None:
    """Read indices of devices, from `0,1`, a list or one integer; None for `all`."""
    if isinstance(value, str):
        if value.strip() == "all":
            return None
        value = value.split(",")
    each = [value] if isinstance(value, int) else value
    ids = tuple(_number(int, 0, math.inf, index) for index in each)
    _refuse_unless(0 < len(ids) == len(set(ids)))
    return ids


def _mesh(value: Any) -> str:
    """Read a mesh as text, from a text such as `dp=-1,tp=2` or from a mapping in a file."""
    if isinstance(value, Mapping):
        value = ",".join(f"{axis}={size}" for axis, size in value.items())
    text: str = re.sub(" ", "", value)
    axes = [pair.partition("=")[0] for pair in text.split(",")]
    _refuse_unless(_MESH.fullmatch(text) is not None and len(set(axes)) == len(axes))
    _refuse_unless(text.count("-1") <= 1)
    return text


def _path(value: Any) -> Path:
    _refuse_unless(value != "")
    # Expand `~` here: no shell has done so for a value in a file.
    return Path(os.path.expanduser(value)) if isinstance(value, str) else Path(value)


def _integer(least: int) -> Kind:
    return Kind(f"an integer >= {least}", partial(_number, int, least, math.inf), int)


def _one_of(*choices: str) -> Kind:
    return Kind(f"one of {', '.join(choices)}", partial(_choice, choices), choices=choices)


_YES, _NO = ("true", "yes", "on", "1", "y", "t"), ("false", "no", "off", "0", "n", "f")
_MESH = re.compile(r"(pp|dp|cp|tp)=(-1|[1-9]\d*)(,(pp|dp|cp|tp)=(-1|[1-9]\d*))*")
_HOST = re.compile(r"[^\s/:]+|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.%a-z]*")

_ADDRESS = Kind("a host name or an IP address, without a port", _host, metavar="HOST")
_PORT = Kind("an integer in 0 .. 65535", partial(_number, int, 0, 65535), int)
# 5e-324 is the smallest number > 0.
_SECONDS = Kind("a finite number > 0", partial(_number, float, 5e-324, sys.float_info.max), float)
_SWITCH = Kind("true or false", _boolean, bool)
_INDICES = Kind("'all' or indices of devices, each once, such as 0,1", _indices, metavar="LIST")
_AXES = Kind(
    "axes (pp, dp, cp, tp) with sizes, each once, such as dp=-1,tp=2", _mesh, metavar="AXES"
)
_FOLDER = Kind("a path", _path, Path)


def _setting(*given: Any) -> Any:
    """Make a field of `Settings`."""
    setting = Setting(*given)
    return field(default=setting.default, metadata={"setting": setting})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a launch. Flags, variables and file keys have the names of the fields."""

    num_processes: int | None = _setting(
        _integer(1), "processes over all machines; default: the accelerators here, else 1"
    )
    num_machines: int | None = _setting(_integer(1), "machines; default: the cluster's, else 1")
    machine_rank: int | None = _setting(_integer(0), "which machine this is, from 0")
    main_process_ip: str | None = _setting(_ADDRESS, "address of machine 0")
    main_process_port: int | None = _setting(
        _PORT, "port on machine 0; 0: a free one, the default on one machine, else 29500"
    )
    cpu: bool = _setting(_SWITCH, "train on the CPU, whatever accelerators there are", False)
    gpu_ids: tuple[int, ...] | None = _setting(_INDICES, "accelerators to use, such as 0,1")
    mixed_precision: str | None = _setting(
        _one_of("no", "fp16", "bf16", "fp8"), "what with_amp() without an argument does"
    )
    num_microbatches: int | None = _setting(
        _integer(1), "what accumulate() without an argument does"
    )
    wrap: str | None = _setting(
        _one_of("ddp", "fsdp", "deepspeed"),
        "what wrap_as_launched() does: replicas (ddp, the default), shards (fsdp), or deepspeed's ZeRO",
    )
    max_restarts: int = _setting(
        _integer(0), "times to start the world again after a failure; default: 0", 0
    )
    rdzv_backend: str | None = _setting(
        _one_of("static", "c10d", "etcd-v2"),
        "rendezvous of the machines, as torchrun names it; default: static",
    )
    timeout_s: float | None = _setting(
        _SECONDS, "seconds that a collective may take before all ranks report and end"
    )
    mesh: str | None = _setting(
        _AXES, "axes that the ranks form, with their sizes; one may be -1, for the rest"
    )
    log_dir: Path | None = _setting(  # noqa: RUF009 - it returns a field
        _FOLDER, "folder for each rank's output"
    )
    tee: bool = _setting(_SWITCH, "print what goes to log_dir, too, each line with its rank", False)
    full_traceback: bool = _setting(
        _SWITCH, "show frames of accel_fn and torch in the traceback of an error", False
    )
    threads_per_process: int | None = _setting(
        _integer(1), "CPU threads of each process; default: the cores, divided"
    )


SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {each.name: each.metadata["setting"] for each in fields(Settings)}
)


class Mistake(NamedTuple):
    """An invalid setting without its source; the code that reports it adds the source."""

    name: str
    rule: str
    value: object
    repair: str = ""


def _refuse(mistakes: Iterable[Mistake], where: Mapping[str, str]) -> None:
    """Raise an error with one line per mistake, if there are any; `where` names each source."""
    lines = [message(where[each.name], *each) for each in mistakes]
    if lines:
        raise SettingsError("\n".join(lines))


def check_settings(values: Mapping[str, object], where: Mapping[str, str]) -> Settings:
    """Make settings, or raise an error with one line per mistake; `where` names each source."""
    found, mistakes = {}, []
    for name, value in values.items():
        try:
            found[name] = SETTINGS[name].read(value)
        except (ValueError, TypeError, OverflowError):
            mistakes.append(Mistake(name, f"be {SETTINGS[name].kind.rule}", value))
    _refuse(mistakes, where)
    settings = Settings(**found)
    _refuse(_conflicts(settings), where)
    return settings


def _conflicts(settings: Settings) -> Iterator[Mistake]:
    """Find settings that no machine could satisfy together."""
    num_machines = settings.num_machines or 1
    processes, rank, ids = settings.num_processes, settings.machine_rank, settings.gpu_ids
    if settings.cpu and ids is not None:
        rule = f"be false with gpu_ids={','.join(map(str, ids))}"
        yield Mistake("cpu", rule, True, "leave one of them out")
    if rank is not None and rank >= num_machines:
        yield Mistake("machine_rank", f"be below num_machines={num_machines}", rank)
    if processes is not None and processes % num_machines:
        rule, repair = (
            f"be a multiple of num_machines={num_machines}",
            "it counts the processes of all machines",
        )
        yield Mistake("num_processes", rule, processes, repair)


def is_on(name: str, value: object) -> bool:
    """Return whether this value turns the setting on; False if it is invalid, which is reported later."""
    try:
        return bool(SETTINGS[name].read(value))
    except (ValueError, TypeError, OverflowError):
        return False


# ---- sources

SETTINGS_FILE = "accel_fn.yaml"
PREFIX = "ACCEL_FN_"


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings, and a description of the source of each."""

    settings: Settings
    sources: Mapping[str, str]

    def is_given(self, name: str) -> bool:
        """Return whether the setting was given, and is neither a default nor detected."""
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
        flags: values by the setting's name; None for a flag that was not given.
        config: the file to read; default: the nearest `accel_fn.yaml`, or
            `[tool.accel_fn]` of a pyproject.toml, in or above `folder`. Settings
            that it leaves open are read from the user's own file.
        environment: the variables of this process.
        folder: the folder in which the search starts; default: the working folder.
        machine: the machine of the launch; default: this one, detected.

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
    for layer in layers:
        layer.check(settings, machine.num_devices, environment)
    check_machine(settings, where, environment, machine)
    if settings.num_processes is None:
        count, source = default_processes(settings, machine)
        settings = replace(settings, num_processes=count)
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

    `cpu` and `gpu_ids` both choose the devices: whichever has the stronger source overrides the
    other.
    """
    given: dict[str, Given] = {}
    sources = dict.fromkeys(SETTINGS, "default")
    for layer in reversed(layers):
        for name, other in (("cpu", "gpu_ids"), ("gpu_ids", "cpu")):
            if other in given and name in layer.values and is_on(name, layer.values[name].value):
                del given[other]
                sources[other] = f"default, because of {layer.values[name].source}"
        given |= layer.values
        sources |= {name: each.source for name, each in layer.values.items()}
    return given, sources


def default_processes(settings: Settings, machine: Machine) -> tuple[int, str]:
    """Return the default number of processes on all machines, and its source.

    A machine has one process for each accelerator that may be used, or one if there is none.
    """
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
    check_names({name: each.source for name, each in given.items()}, SETTINGS)
    return Layer(given)


def _from_variables(environment: Mapping[str, str]) -> Layer:
    """Read the variables ACCEL_FN_* that are not empty.

    A name that is similar to that of a setting is refused as a spelling mistake; any other unknown
    name is ignored.
    """
    values, mistyped = {}, {}
    for variable, value in environment.items():
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or not value:
            continue
        if name in SETTINGS:
            values[name] = Given(value, variable)
        elif nearest(name, SETTINGS):
            mistyped[name] = variable
    check_names(mistyped, SETTINGS)
    return Layer(values)


def _read(path: Path, *, is_pyproject: bool = False) -> Layer | None:
    """Read a file of settings.

    The readers are imported only here, since many launches have no file.
    """
    from accel_fn.launcher.settings_files import read_pyproject, read_yaml

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
    """Return the path of the user's own file; None if there is no home folder."""
    base, home = environment.get("XDG_CONFIG_HOME", ""), environment.get("HOME", "")
    if os.path.isabs(base):
        return Path(base, "accel_fn", "config.yaml")
    return Path(home, ".config", "accel_fn", "config.yaml") if home else None


def _is_file(path: Path) -> bool:
    """Return whether a path is a file; False if its folder may not be searched."""
    try:
        return path.is_file()
    except OSError:
        return False


# ---- checks against the machine and the environment

_USE_CPU = "launch with --cpu to train on the CPU"


def check_machine(
    settings: Settings,
    where: Mapping[str, str],
    environment: Mapping[str, str],
    machine: Machine,
) -> None:
    """Refuse settings that this machine cannot satisfy; `where` names each setting's source."""
    _refuse([*_address(settings, environment), *_devices(settings, environment, machine)], where)


def _address(settings: Settings, environment: Mapping[str, str]) -> Iterator[Mistake]:
    count = settings.num_machines or 1
    if count == 1 or settings.main_process_ip or environment.get("MASTER_ADDR"):
        return
    cluster = _cluster(environment)
    if cluster is None or cluster.host is None:
        repair = "give main_process_ip"
        yield Mistake("num_machines", "be 1 without an address of machine 0", count, repair)


def _devices(
    settings: Settings, environment: Mapping[str, str], machine: Machine
) -> Iterator[Mistake]:
    if settings.cpu:
        return
    ids, processes = settings.gpu_ids, settings.num_processes
    if ids is not None:
        yield from _ids(ids, environment.get("CUDA_VISIBLE_DEVICES"), machine)
    most = machine.num_devices if ids is None else len(ids)
    if processes is not None and most:
        num_machines = _num_machines(settings, environment)
        if processes > most * num_machines:
            listed = ",".join(map(str, ids or ()))
            devices = f"gpu_ids={listed}" if listed else f"the {machine.devices}"
            where = "this machine" if num_machines == 1 else f"each of {num_machines} machines"
            rule = f"be at most one for each of {devices} of {where}"
            yield Mistake("num_processes", rule, processes, _USE_CPU)


def _num_machines(settings: Settings, environment: Mapping[str, str]) -> int:
    """Return the number of machines from the settings, else from the cluster, else 1."""
    if settings.num_machines is not None:
        return settings.num_machines
    cluster = _cluster(environment)
    return cluster.num_machines if cluster else 1


def _cluster(environment: Mapping[str, str]) -> Task | Node | None:
    """Read the variables that a cluster has set for this process, or for its machine."""
    return read_task(environment, function="launch") or read_node(environment, function="launch")


def _ids(ids: tuple[int, ...], variable: str | None, machine: Machine) -> Iterator[Mistake]:
    """Find a mistake in `gpu_ids`.

    The devices must be of CUDA, and must exist. CUDA_VISIBLE_DEVICES must not hide them.
    """
    count = machine.num_installed
    if machine.kind not in ("", "CUDA"):
        rule = f"be left out where the devices are {machine.kind}"
        repair = "set the variable of their driver"
        yield Mistake("gpu_ids", rule, ids, repair)
    elif max(ids) >= count:
        rule = f"be devices of this machine, which has {count or 'none'}"
        repair = "indices start at 0" if count else _USE_CPU
        yield Mistake("gpu_ids", rule, ids, repair)
    elif variable is not None:
        visible = [each.strip() for each in variable.split(",")]
        if not all(str(each) in visible for each in ids):
            rule = f"be among CUDA_VISIBLE_DEVICES={variable!r}"
            yield Mistake("gpu_ids", rule, ids, "leave one of the two out")
