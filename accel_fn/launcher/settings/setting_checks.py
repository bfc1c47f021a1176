"""Check settings against the machine and the environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from accel_fn.errors import SettingsError, message
from accel_fn.launcher.machines.detect import Machine
from accel_fn.launcher.settings.settings import Mistake, Settings
from accel_fn.launcher.settings.value import Given
from accel_fn.parallel.clusters import Node, Task, read_node, read_task

_USE_CPU = "launch with --cpu to train on the CPU"


def check_machine(
    settings: Settings,
    where: Mapping[str, str],
    environment: Mapping[str, str],
    machine: Machine,
    *,
    accelerators: Given | None = None,
) -> None:
    """Refuse what this machine cannot do, a line for each; `where` names the source of each setting."""
    found = [*_address(settings, environment), *_devices(settings, environment, machine)]
    lines = [each.message(where[each.name]) for each in found]
    if accelerators is not None and not lines and not settings.cpu and not machine.num_devices:
        rule = "fit a machine without accelerators"
        name = "distributed_type"
        lines.append(message(accelerators.where, name, rule, accelerators.value, _USE_CPU))
    if lines:
        raise SettingsError("\n".join(lines))


def check_place(environment: Mapping[str, str], sagemaker: Given | None) -> None:
    """Refuse, anywhere else, a file by which accelerate starts a job of SageMaker."""
    if sagemaker is not None and not environment.get("SM_HOSTS"):
        sagemaker.refuse(
            "compute_environment",
            "be LOCAL_MACHINE outside of a job of SageMaker",
            "accel_fn starts no job: give its estimator an entry point that calls accel-fn launch, "
            "which reads this file there",
        )


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
    """The settings' number of machines, else the cluster's."""
    if settings.num_machines is not None:
        return settings.num_machines
    cluster = _cluster(environment)
    return cluster.num_machines if cluster else 1


def _cluster(environment: Mapping[str, str]) -> Task | Node | None:
    """Read the variables that a cluster has set for this process, or for its machine."""
    return read_task(environment, function="launch") or read_node(environment, function="launch")


def _ids(ids: tuple[int, ...], variable: str | None, machine: Machine) -> Iterator[Mistake]:
    """The devices must exist, be visible, and be of a kind that CUDA_VISIBLE_DEVICES selects."""
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
