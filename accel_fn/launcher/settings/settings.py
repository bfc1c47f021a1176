"""Settings of a launch: one checked value for everything that a flag, a file or a variable may say."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from accel_fn.errors import SettingsError, message


@dataclass(frozen=True, slots=True)
class Mistake:
    """What is wrong with one setting; who reports it knows where the setting was given."""

    name: str
    rule: str
    value: object
    repair: str = ""

    def told(self, where: str) -> str:
        """The mistake as an error says it."""
        return message(where, self.name, self.rule, self.value, self.repair)


class _ConflictError(SettingsError):
    """Settings that are right alone and wrong together. Pydantic hands it on."""

    def __init__(self, mistakes: list[Mistake]) -> None:
        super().__init__("; ".join(mistake.told("Settings") for mistake in mistakes))
        self.mistakes = mistakes


def _no_boolean(value: object) -> object:
    """A number is asked for: YAML's `yes` is not the number 1."""
    if isinstance(value, bool):
        raise SettingsError("a boolean is no number")
    return value


def _indices(value: object) -> object:
    """`all`, `0,1` and 0 mean what they say."""
    if isinstance(value, str):
        return None if value.strip() == "all" else tuple(value.split(","))
    return (value,) if isinstance(value, int) else value


def _path(value: object) -> object:
    """`~` is the home folder: no shell has read a file's value."""
    if isinstance(value, str):
        if not value:
            raise SettingsError("an empty path is none")
        return os.path.expanduser(value)
    return value


Integer = Annotated[int, BeforeValidator(_no_boolean)]
Number = Annotated[float, BeforeValidator(_no_boolean)]
Index = Annotated[int, BeforeValidator(_no_boolean), Field(ge=0)]
_HOST = re.compile(r"[^\s/:]+|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.%a-z]*")


class Settings(BaseModel):
    """What a launch does. Frozen; None means that the machine or the cluster decides."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_processes: Integer | None = Field(None, ge=1, description="processes over all machines")
    num_machines: Integer | None = Field(None, ge=1, description="machines")
    machine_rank: Integer | None = Field(None, ge=0, description="which machine this is, from 0")
    main_process_ip: str | None = Field(None, description="address of machine 0")
    main_process_port: Integer | None = Field(
        None, ge=0, le=65535, description="port on machine 0; 0 or none: a free one"
    )
    cpu: bool = Field(False, description="train on the CPU, whatever accelerators there are")
    gpu_ids: Annotated[tuple[Index, ...] | None, BeforeValidator(_indices)] = Field(
        None, description="accelerators to use, by index"
    )
    mixed_precision: Literal["no", "fp16", "bf16"] | None = Field(
        None, description="what with_amp() without an argument does"
    )
    num_microbatches: Integer | None = Field(
        None, ge=1, description="what accumulate() without an argument does"
    )
    wrap: Literal["ddp", "fsdp"] | None = Field(
        None, description="what wrap() does: replicas on all ranks (ddp), or shards (fsdp)"
    )
    max_restarts: Integer = Field(
        0, ge=0, description="times to start the world again after a failure"
    )
    rdzv_backend: Literal["static", "c10d", "etcd-v2"] | None = Field(
        None, description="how machines find each other, as torchrun names it"
    )
    timeout_s: Number | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="seconds that a collective may take before all ranks report and end",
    )
    log_dir: Annotated[Path, BeforeValidator(_path)] | None = Field(
        None, description="folder for each rank's output"
    )
    tee: bool = Field(False, description="show what goes to log_dir on the screen too")
    threads_per_process: Integer | None = Field(
        None, ge=1, description="CPU threads of each process; none: the cores, divided"
    )

    @field_validator("mixed_precision", mode="before")
    @classmethod
    def _unquoted_no(cls, value: object) -> object:
        """YAML reads `mixed_precision: no` as false."""
        return "no" if value is False else value

    @field_validator("main_process_ip")
    @classmethod
    def _host_alone(cls, value: str | None) -> str | None:
        if value is not None and not _HOST.fullmatch(value):
            raise SettingsError("not a host")
        return value

    @field_validator("gpu_ids")
    @classmethod
    def _each_once(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and not 0 < len(value) == len(set(value)):
            raise SettingsError("empty, or an index twice")
        return value

    @model_validator(mode="after")
    def _agree(self) -> Settings:
        found = list(_conflicts(self))
        if found:
            raise _ConflictError(found)
        return self


def _conflicts(settings: Settings) -> Iterator[Mistake]:
    """What no machine could do."""
    num_machines = settings.num_machines or 1
    processes, rank, ids = settings.num_processes, settings.machine_rank, settings.gpu_ids
    if settings.cpu and ids is not None:
        yield Mistake("cpu", f"be false with gpu_ids={_listed(ids)}", True, "leave one of them out")
    if rank is not None and rank >= num_machines:
        yield Mistake("machine_rank", f"be below num_machines={num_machines}", rank)
    if processes is not None and processes % num_machines:
        yield Mistake(
            "num_processes",
            f"be a multiple of num_machines={num_machines}",
            processes,
            "it counts the processes of all machines",
        )


def _listed(ids: tuple[int, ...]) -> str:
    return ",".join(map(str, ids))


_RULES: Mapping[object, str] = MappingProxyType(
    {
        int: "be an integer",
        float: "be a finite number",
        bool: "be true or false",
        str: "be a host name or an IP address, without a port",
        Path: "be a path",
        tuple: "be 'all' or indices of devices, each once, such as 0,1",
    }
)


def rule(name: str) -> str:
    """What a value of this setting must be, in words."""
    field = Settings.model_fields[name]
    kind = _kind(field.annotation)
    if get_args(kind):
        return f"be one of {', '.join(get_args(kind))}"
    words = _RULES[kind]
    bounds = {
        key: getattr(each, key)
        for each in field.metadata
        for key in ("ge", "gt", "le")
        if hasattr(each, key)
    }
    if "le" in bounds:
        return f"{words} in {bounds['ge']} .. {bounds['le']}"
    if "ge" in bounds:
        return f"{words} >= {bounds['ge']}"
    return f"{words} > {bounds['gt']}" if "gt" in bounds else words


def _kind(annotation: Any) -> Any:
    """The type in an annotation, without None and what pydantic adds; tuple for tuples."""
    while True:
        inner = [each for each in get_args(annotation) if each is not type(None)]
        if annotation in _RULES or getattr(annotation, "__origin__", None) is Literal:
            return annotation
        if getattr(annotation, "__origin__", None) is tuple:
            return tuple
        annotation = inner[0]


def is_on(name: str, value: object) -> bool:
    """Does this value ask for something? A wrong one is told later."""
    try:
        return bool(getattr(Settings.model_validate({name: value}), name))
    except ValidationError:
        return False


def check_settings(values: Mapping[str, object], where: Mapping[str, str]) -> Settings:
    """Settings of these values, or an error with a line for each mistake; `where` says who gave each."""
    try:
        return Settings.model_validate(dict(values))
    except ValidationError as error:
        mistakes: dict[str, Mistake] = {}
        for detail in error.errors(include_url=False, include_input=False):
            if not detail["loc"]:
                conflict = detail["ctx"]["error"]
                mistakes |= {each.rule: each for each in conflict.mistakes}
            else:
                name = str(detail["loc"][0])
                mistakes[name] = Mistake(name, rule(name), values[name])
    raise SettingsError("\n".join(each.told(where[each.name]) for each in mistakes.values()))
