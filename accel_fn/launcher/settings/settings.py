"""Settings of a launch: one checked value for each flag, variable and line of a file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

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
    """A wrong setting; the code that reports it knows where it was given."""

    name: str
    rule: str
    value: object
    repair: str = ""

    def message(self, where: str) -> str:
        return message(where, self.name, self.rule, self.value, self.repair)


class _ConflictError(SettingsError):
    """Settings that are right alone and wrong together. Pydantic passes it on."""

    def __init__(self, mistakes: list[Mistake]) -> None:
        super().__init__("; ".join(mistake.message("Settings") for mistake in mistakes))
        self.mistakes = mistakes


def _no_boolean(value: object) -> object:
    """Refuse YAML's `yes`, which is not the number 1."""
    if isinstance(value, bool):
        raise SettingsError("a boolean is no number")
    return value


def _indices(value: object) -> object:
    """Parse `all`, `0,1` and 0."""
    if isinstance(value, str):
        return None if value.strip() == "all" else tuple(value.split(","))
    return (value,) if isinstance(value, int) else value


def _path(value: object) -> object:
    """Expand `~`: no shell has read the value in a file."""
    if isinstance(value, str):
        if not value:
            raise SettingsError("an empty path is none")
        return os.path.expanduser(value)
    return value


def _mesh(value: object) -> object:
    """Parse `dp=-1,tp=2`, and a mapping in a file."""
    if isinstance(value, Mapping):
        value = ",".join(f"{axis}={size}" for axis, size in value.items())
    if isinstance(value, str):
        value = value.replace(" ", "")
        axes = [pair.partition("=")[0] for pair in value.split(",")]
        if not _MESH.fullmatch(value) or len(set(axes)) != len(axes) or value.count("-1") > 1:
            raise SettingsError("no axes with sizes")
    return value


Integer = Annotated[int, BeforeValidator(_no_boolean)]
Index = Annotated[Integer, Field(ge=0)]
Number = Annotated[float, BeforeValidator(_no_boolean)]
_MESH = re.compile(r"(pp|dp|cp|tp)=(-1|[1-9]\d*)(,(pp|dp|cp|tp)=(-1|[1-9]\d*))*")
_HOST = re.compile(r"[^\s/:]+|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.%a-z]*")


class Settings(BaseModel):
    """Settings of a launch. Frozen; None lets the machine or the cluster decide."""

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
    mixed_precision: Literal["no", "fp16", "bf16", "fp8"] | None = Field(
        None, description="what with_amp() without an argument does"
    )
    num_microbatches: Integer | None = Field(
        None, ge=1, description="what accumulate() without an argument does"
    )
    wrap: Literal["ddp", "fsdp", "deepspeed"] | None = Field(
        None,
        description=(
            "what wrap_as_launched() does: replicas on all ranks (ddp), shards (fsdp), or ZeRO by deepspeed"
        ),
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
    mesh: Annotated[str, BeforeValidator(_mesh)] | None = Field(
        None, description="axes that the ranks form, with their sizes; one may be -1, for the rest"
    )
    log_dir: Annotated[Path, BeforeValidator(_path)] | None = Field(
        None, description="folder for each rank's output"
    )
    tee: bool = Field(False, description="show what goes to log_dir on the screen too")
    full_traceback: bool = Field(
        False, description="show frames of accel_fn and torch in the traceback of an error"
    )
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
    """Find settings that no machine could satisfy together."""
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


RULES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("num_processes", "num_machines"), "be an integer >= 1"),
        **dict.fromkeys(("num_microbatches", "threads_per_process"), "be an integer >= 1"),
        **dict.fromkeys(("machine_rank", "max_restarts"), "be an integer >= 0"),
        "main_process_ip": "be a host name or an IP address, without a port",
        "main_process_port": "be an integer in 0 .. 65535",
        **dict.fromkeys(("cpu", "tee", "full_traceback"), "be true or false"),
        "gpu_ids": "be 'all' or indices of devices, each once, such as 0,1",
        "mixed_precision": "be one of no, fp16, bf16, fp8",
        "wrap": "be one of ddp, fsdp, deepspeed",
        "rdzv_backend": "be one of static, c10d, etcd-v2",
        "timeout_s": "be a finite number > 0",
        "mesh": "be axes (pp, dp, cp, tp) with sizes, each once, such as dp=-1,tp=2",
        "log_dir": "be a path",
    }
)
"""Rule for the value of each setting."""


def check_settings(values: Mapping[str, object], where: Mapping[str, str]) -> Settings:
    """Make settings, or raise an error with a line for each mistake; `where` names each source."""
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
                mistakes[name] = Mistake(name, RULES[name], values[name])
    raise SettingsError("\n".join(each.message(where[each.name]) for each in mistakes.values()))


def is_on(name: str, value: object) -> bool:
    """Does this value turn the setting on? A wrong one is reported later."""
    try:
        return bool(getattr(Settings.model_validate({name: value}), name))
    except ValidationError:
        return False
