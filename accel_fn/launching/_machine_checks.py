"""Whether the settings fit the machine and the environment that they are to run in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from accel_fn._errors import SettingsError, message
from accel_fn.launching._detecting import Machine
from accel_fn.launching._given import Given
from accel_fn.launching._settings import Mistake, Settings

_ADDRESSES = ("MASTER_ADDR", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
"""Variables of a cluster that say where machine 0 is."""


def check_machine(
    settings: Settings,
    where: Mapping[str, str],
    environment: Mapping[str, str],
    machine: Machine,
    *,
    accelerators: Given | None = None,
) -> None:
    """Refuse what this machine cannot do, a line for each; `where` says for each setting who gave it."""
    found = [*_address(settings, environment), *_devices(settings, environment, machine)]
    lines = [each.told(where[each.name]) for each in found]
    if accelerators is not None and not settings.cpu and not machine.num_devices:
        rule = "fit a machine without accelerators"
        repair = "add --cpu to train on the CPU"
        name = "distributed_type"
        lines.append(message(accelerators.where, name, rule, accelerators.value, repair))
    if lines:
        raise SettingsError("\n".join(lines))


def _address(settings: Settings, environment: Mapping[str, str]) -> Iterator[Mistake]:
    count = settings.num_machines or 1
    if count > 1 and not settings.main_process_ip and not any(map(environment.get, _ADDRESSES)):
        repair = "give main_process_ip"
        yield Mistake("num_machines", "be 1 where nothing says where machine 0 is", count, repair)


def _devices(
    settings: Settings, environment: Mapping[str, str], machine: Machine
) -> Iterator[Mistake]:
    if settings.cpu:
        return
    ids, processes = settings.gpu_ids, settings.num_processes
    if ids is not None:
        rule = _allowed(ids, environment.get("CUDA_VISIBLE_DEVICES"), machine)
        if rule:
            yield Mistake("gpu_ids", rule, ids, "leave it out to use all")
    elif processes is not None and machine.num_devices:
        here = processes // (settings.num_machines or 1)
        if here > machine.num_devices:
            rule = f"be at most one for each of {machine.devices} of a machine"
            repair = "add --cpu to train on the CPU"
            yield Mistake("num_processes", rule, processes, repair)


def _allowed(ids: tuple[int, ...], variable: str | None, machine: Machine) -> str:
    """The rule that these devices break; empty where they break none."""
    if max(ids) >= machine.num_installed:
        return f"be devices of this machine, which has {machine.num_installed or 'none'}"
    if variable is None:
        return ""
    visible = [each.strip() for each in variable.split(",")]
    if all(str(each) in visible for each in ids):
        return ""
    return f"be among CUDA_VISIBLE_DEVICES={variable!r}"
