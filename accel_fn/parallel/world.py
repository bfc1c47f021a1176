"""init and distributed: make a process's state from the variables that a launcher sets."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from accel_fn.core import primitives as backends
from accel_fn.core.collectives import agreed
from accel_fn.core.mesh_axes import mesh_shape
from accel_fn.core.state import DistState, device_of
from accel_fn.errors import ArgumentError, WorldError, check_count, check_equal, check_positive
from accel_fn.parallel.clusters import RANKS, azure_local_world_size, check_alone, read_task
from accel_fn.parallel.groups import make_axes, make_subgroup
from accel_fn.parallel.launch_options import launch_options, launched_mesh
from accel_fn.parallel.rendezvous import Launch, join_world, leave_world

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
_TIMEOUT_S = 600.0


def init(
    *,
    device: torch.device | str | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
    seed: int = 0,
    mesh: Mapping[str, int] | None = None,
) -> DistState:
    """Return the state of this process: its rank, its world and its device.

    It reads the variables that `accel-fn launch`, torchrun and others set (RANK, WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT, and LOCAL_RANK with LOCAL_WORLD_SIZE; without these two, one process
    per machine). Without them it reads the variables of Slurm's srun, LSF's jsrun and the mpirun of
    Open MPI, MPICH and Intel MPI, or else uses the world that the script joined by itself through
    torch.distributed, as under `mp.spawn`. It joins the group of processes, and leaves it at exit.
    Without any of them it is one process on one device. A cluster that gives a job several machines
    and starts no world on them (SageMaker, Kubernetes, Vertex AI, Azure ML, PBS) needs `accel-fn
    launch`. Calling it again returns a second state over a separate group.

    Args:
        device: default: the launch's, else the device that Ray Train gave to this worker, else this
            rank's accelerator (CUDA, MPS, XPU, ...), or the CPU if there is none. For an
            accelerator without an index, the local rank is the index; if the process has only one,
            it is that one; in a world that the script joined by itself, it is the current one.
        backend: the backend of torch.distributed for that device; default: the usual one. Gloo is
            always available too, for tensors on the host.
        timeout_s: how long to wait for the world, and later for any collective. After that, each
            rank prints its current line on stderr, and its process ends with exit code 124.
            Default: the launch's (`--timeout-s`, ACCEL_FN_TIMEOUT_S), else 600.
        seed: the seed of the data order, >= 0.
        mesh: the axes that the ranks form and their sizes, such as `{"dp": -1, "tp": 2}`: "pp", "dp", "cp"
            and "tp", outermost first. One may be -1, for all ranks that the others leave; those left
            out have one rank. Ranks that differ in `dp` alone share a global batch; ranks that
            differ in other axes hold the same part of it. Default: the launch's (`--mesh dp=-1,tp=2`,
            ACCEL_FN_MESH), else all ranks share it.

    Returns:
        A state at step 0.

    Raises:
        RuntimeError: the variables are incomplete or contradict each other, the
            address does not resolve, a machine has fewer devices than processes, or a cluster has
            given several machines without a world.
        TimeoutError: the address is not reached, or not all ranks join, within `timeout_s`; the
            message names the missing ranks. Calling `init` again is a new try, also if the other
            ranks have tried more or fewer times.
        ValueError: an argument is outside its range, or the sizes of `mesh` do not fit the number of ranks
            or differ between ranks.

    Cost: one rendezvous of all processes; with `mesh`, a group for each axis of several ranks.

    >>> import accel_fn as af
    >>> af.init(device="cpu")
    DistState(rank=0, world_size=1, local_rank=0, local_world_size=1, device=device(type='cpu'), \
scaler=None, step=0, call=0, seed=0, samples=0, items=0)
    """
    state = _join(device, backend, timeout_s, seed, mesh)
    if state.group is not None:
        atexit.register(_leave, state)
    return state


@contextmanager
def distributed(
    *,
    device: torch.device | str | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
    seed: int = 0,
    mesh: Mapping[str, int] | None = None,
) -> Iterator[DistState]:
    """Join the world as `init` does, and leave the group at the end of the block.

    Steps and collectives refuse the state from then on. Leaving the first group of a process leaves all.

    Args:
        device: as in `init`.
        backend: as in `init`.
        timeout_s: as in `init`.
        seed: as in `init`.
        mesh: as in `init`.

    Yields:
        The state.

    Raises:
        RuntimeError: as `init`.

    Cost: as `init`.

    >>> import accel_fn as af
    >>> with af.distributed(device="cpu") as state:
    ...     state.world_size
    1
    """
    state = _join(device, backend, timeout_s, seed, mesh)
    try:
        yield state
    finally:
        _leave(state)


def _leave(state: DistState) -> None:
    for group in dict.fromkeys([*(axis.group for axis in state.axes), state.group]):
        if group is not None:
            leave_world(group, state.watchdog)


def _join(
    device: torch.device | str | None,
    backend: str | None,
    timeout_s: float | None,
    seed: int,
    mesh: Mapping[str, int] | None,
) -> DistState:
    if timeout_s is None:
        timeout_s = launch_options().timeout_s or _TIMEOUT_S
    mesh = launched_mesh() if mesh is None else mesh
    check_positive("init", "timeout_s", timeout_s)
    check_count("init", "seed", seed, minimum=0)
    backends.check_backend("init", backend)
    joined = _joined_world(os.environ)
    launch = joined or read_launch(os.environ) or Launch(0, 1, 0, 1, "", 0, False)
    device = device or os.environ.get("ACCEL_FN_DEVICE") or ray_device(os.environ)
    shape = {} if mesh is None else mesh_shape("init", mesh, launch.world_size)
    local_rank = None if joined else launch.local_rank
    place = pick_device(device, local_rank, launch.local_world_size, launch.world_size)
    backend = backends.default_backend(place, backend) if launch.world_size > 1 else ""
    group, watchdog = None, None
    if launch.world_size > 1:
        group, watchdog = join_world(launch, backend, timeout_s, shape)
    state = DistState(
        rank=launch.rank,
        world_size=launch.world_size,
        local_rank=launch.local_rank,
        local_world_size=launch.local_world_size,
        device=place,
        seed=seed,
        group=group,
        watchdog=watchdog,
    )
    if not shape:
        return state
    try:
        shapes = agreed(lambda: shape, state, "init")
        check_equal(shapes, "init: mesh must be the same on every rank", error=ArgumentError)
        make_group = partial(make_subgroup, backend=backend, timeout_s=timeout_s)
        return replace(state, axes=make_axes(state, shape, make_group))
    except BaseException:
        _leave(state)
        raise


def _joined_world(environment: Mapping[str, str]) -> Launch | None:
    """Return the world that the script itself has joined, as under `mp.spawn`."""
    world = backends.current_world()
    if world is None or _is_launched(environment) or read_task(environment) is not None:
        return None
    return Launch(*world, 0, 1, "", 0, False)


def _is_launched(environment: Mapping[str, str]) -> bool:
    """Return whether a launcher has set a rank or a world size for this process.

    A variable with an address alone is not enough, since a script may have set it.
    """
    return any(environment.get(name) for name in ("RANK", "WORLD_SIZE", *_LOCAL))


def read_launch(environment: Mapping[str, str]) -> Launch | None:
    """Read and check the variables of a launcher or a cluster; return None if there are none."""
    names = (*_NEEDED, *_LOCAL)
    given = {name: environment[name] for name in names if environment.get(name)}
    if "LOCAL_RANK" in given and "LOCAL_WORLD_SIZE" not in given:
        given |= azure_local_world_size(environment, given.get("WORLD_SIZE", ""))
    # If the local variables are set, a launcher has started this process. Otherwise, the cluster
    # may have started it.
    if not any(name in given for name in _LOCAL):
        given = {**_from_cluster(environment, given), **given}
    if not given:
        return None
    local_missing = [name for name in _LOCAL if name not in given]
    missing = [name for name in _NEEDED if name not in given]
    if len(local_missing) == 1:
        missing += local_missing
    if missing:
        raise WorldError(
            f"init: the launcher must set {', '.join(missing)} too, got only {', '.join(given)}; "
            "start with accel-fn launch or torchrun, or unset these to run alone"
        )
    numbers = {name: _number(name, given[name]) for name in given if name != "MASTER_ADDR"}
    launch = Launch(
        rank=numbers["RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_rank=numbers.get("LOCAL_RANK", 0),
        local_world_size=numbers.get("LOCAL_WORLD_SIZE", 1),
        host=given["MASTER_ADDR"],
        port=numbers["MASTER_PORT"],
        serves=numbers["RANK"] == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        store_file=_store_file(environment),
    )
    _check_launch(launch)
    return launch


def _store_file(environment: Mapping[str, str]) -> str | None:
    """Return the file of the store that accel-fn's launcher has made; None for other launchers."""
    # If a rank starts another launcher, the ranks of that launcher inherit the variable, but have
    # another MASTER_PORT, so compare the port.
    path = environment.get("ACCEL_FN_STORE")
    return path if path and path.endswith(f"_{environment.get('MASTER_PORT')}") else None


def _from_cluster(environment: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return the values of a cluster's variables, by the names that launchers use; {} without a cluster."""
    task = read_task(environment)
    if not _is_launched(environment) and (task is None or task.num_machines == 1):
        check_alone(environment)
    if task is None:
        return {}
    for name, value in (("RANK", task.rank), ("WORLD_SIZE", task.world_size)):
        if given.get(name, str(value)) != str(value):
            raise WorldError(
                f"init: {name} must be {value}, as {task.cluster} has set {RANKS[task.cluster]}="
                f"{task.rank} of {task.world_size}, got {given[name]}; unset RANK and WORLD_SIZE, or set "
                "LOCAL_RANK and LOCAL_WORLD_SIZE too if another launcher has started this process"
            )
    if task.host is None and not environment.get("MASTER_ADDR"):
        raise WorldError(
            f"init: MASTER_ADDR must be set for {task.world_size} processes on several machines: "
            f"{task.cluster} does not set where rank 0 runs; mpirun -x MASTER_ADDR=... passes it on, "
            "of MPICH and Intel -genv MASTER_ADDR ..."
        )
    return {
        "RANK": str(task.rank),
        "WORLD_SIZE": str(task.world_size),
        "LOCAL_RANK": str(task.local_rank),
        "LOCAL_WORLD_SIZE": str(task.local_world_size),
        "MASTER_ADDR": task.host or "",
        "MASTER_PORT": str(task.port),
    }


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise WorldError(f"init: {name} must be an integer, got {text!r}") from None


def _check_launch(launch: Launch) -> None:
    for name, value, bound, of in (
        ("RANK", launch.rank, launch.world_size, "WORLD_SIZE"),
        ("LOCAL_RANK", launch.local_rank, launch.local_world_size, "LOCAL_WORLD_SIZE"),
        ("LOCAL_WORLD_SIZE", launch.local_world_size - 1, launch.world_size, "WORLD_SIZE"),
    ):
        if not 0 <= value < bound:
            shown = value + 1 if name == "LOCAL_WORLD_SIZE" else value
            rule = "be in 1 .." if name == "LOCAL_WORLD_SIZE" else "be >= 0 and below"
            raise WorldError(f"init: {name} must {rule} {of}={bound}, got {shown}")
    if not 0 < launch.port < 2**16:
        raise WorldError(f"init: MASTER_PORT must be in 1 .. 65535, got {launch.port}")


def ray_device(environment: Mapping[str, str]) -> str | None:
    """Return the device that Ray Train gave to this worker; None in any other process."""
    ray, device = sys.modules.get("ray"), environment.get("ACCELERATE_TORCH_DEVICE")
    if device is None or ray is None or not ray.is_initialized():
        return None
    # If Ray gives a worker no GPU, the worker still sees all GPUs, and Ray names the first of them
    # in the variable.
    given = ray.get_runtime_context().get_accelerator_ids()
    return device if any(given.values()) else "cpu"


def pick_device(
    device: torch.device | str | None,
    local_rank: int | None,
    local_world_size: int,
    world_size: int,
) -> torch.device:
    """Return the device of a local rank; an accelerator becomes torch's current device.

    Without a local rank, return the current device: a script that joined its world by itself has
    set it.
    """
    device = device_of("init", device) if device is not None else _default_kind(world_size)
    if device.type in ("cpu", "meta"):
        return device
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        raise WorldError(
            f"init: device must be one that this machine has, got {str(device)!r} and "
            f"{accelerator or 'no accelerator'} here"
        )
    count = torch.accelerator.device_count()
    index = device.index
    if index is None and local_rank is None:
        index = torch.accelerator.current_device_index()
    if index is None and count == 1:
        # Clusters often show each process only its own device (`srun --gpus-per-task=1`, Ray). If
        # several processes share one device, NCCL refuses it.
        index = 0
    if index is None:
        if local_world_size > count:
            raise WorldError(
                f"init: LOCAL_WORLD_SIZE must be at most the {count} {device.type} devices of this "
                f"machine, got {local_world_size}; start fewer processes, or pass device='cpu'"
            )
        index = local_rank
    if index >= count:
        raise WorldError(f"init: device must have an index below {count}, got {str(device)!r}")
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)


def _default_kind(world_size: int) -> torch.device:
    """Return the machine's accelerator, unless several ranks need a backend that it lacks (MPS)."""
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    if accelerator is None or (world_size > 1 and not backends.has_backend(accelerator)):
        return torch.device("cpu")
    return torch.device(accelerator.type)
