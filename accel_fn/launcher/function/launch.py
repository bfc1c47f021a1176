"""launch: run a function on every rank of a new world, from Python and notebooks.

Torch's `start_processes` cannot do this: it imports the caller's script and torch in each rank before
variables such as OMP_NUM_THREADS can be set, returns an exception as text, stops the peers of the rank
that ends first before the cause is known, and does not notice the end of ranks where SIGCHLD is ignored.
Torch's agent (`torch.distributed.launcher`) leaves its signal handlers behind in the caller's process.
So `launch` starts the ranks itself. Only the store of their rendezvous is torch's.
"""

from __future__ import annotations

import inspect
import linecache
import os
import sys
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never, TypeVar

from accel_fn.errors import ArgumentTypeError, WorldError, message
from accel_fn.launcher.function.child import Call, dumps
from accel_fn.launcher.function.notebook import (
    check_unused_accelerator,
    shell_of_kernel,
    shown_displays,
)
from accel_fn.launcher.function.ranks import run_ranks
from accel_fn.launcher.machines.cpus import bind_ranks, read_processors
from accel_fn.launcher.machines.detect import Machine, detect
from accel_fn.launcher.machines.machines import Machines
from accel_fn.launcher.machines.network import free_port
from accel_fn.launcher.plan_launch import check_temporary_folder
from accel_fn.launcher.processes.environment import launch_variables, rank_variables
from accel_fn.launcher.settings.setting_checks import check_machine
from accel_fn.launcher.settings.settings import Settings, check_settings

T = TypeVar("T")
_HOST = "127.0.0.1"


def launch(
    fn: Callable[..., T],
    *args: Any,
    num_processes: int = 2,
    kwargs: Mapping[str, Any] | None = None,
    cpu: bool = False,
    gpu_ids: Sequence[int] | None = None,
    mixed_precision: str | None = None,
    num_microbatches: int | None = None,
    wrap: str | None = None,
    threads_per_process: int | None = None,
    timeout_s: float | None = None,
    mesh: Mapping[str, int] | None = None,
    **others: Never,
) -> list[T]:
    """Run `fn(*args, **kwargs)` on every rank of a world of fresh processes.

    Each rank is a new interpreter, with the variables that torchrun would set, so
    `af.init()` in `fn` needs no argument. Nothing is forked and no script is imported
    again, so `launch` works for functions of a notebook's cell, or of a script without
    `if __name__ == "__main__"`, also after CUDA has started in the script. They are sent by
    cloudpickle; ranks import what comes from a module. Files of settings are not read. Ranks inherit
    variables such as ACCEL_FN_WRAP, unless an argument replaces them.

    A notebook's cell shows what rank 0 displays: pictures and progress bars. What ranks print appears
    there, too.

    When a rank fails, the others are stopped, and its exception is raised here.
    Ctrl-C stops all ranks. No rank outlives this process.

    Args:
        fn: what each rank runs; `af.init()` in it returns the rank's state.
        *args: for `fn`, the same on every rank.
        num_processes: ranks, all on this machine.
        kwargs: for `fn`, by name.
        cpu: use the CPU even if there are accelerators.
        gpu_ids: accelerators to use, by index.
        mixed_precision: what `with_amp()` without an argument does.
        num_microbatches: what `accumulate()` without an argument does.
        wrap: what `wrap_as_launched()` does, "ddp", "fsdp" or "deepspeed".
        threads_per_process: CPU threads of each; default: the cores, divided.
        timeout_s: seconds that a collective may take before all ranks report and end.
        mesh: axes that the ranks form and their sizes, as for `init`.
        **others: none; arguments of `fn` go into `kwargs`, which cannot clash with these names.

    Returns:
        The results of `fn`, in rank order.

    Raises:
        Exception: the first exception of `fn` on any rank, with the rank as a note and the
            rank's traceback as the cause.
        RuntimeError: a rank was killed or exited, this process is itself a rank, or it is a notebook's
            that has used an accelerator, without `cpu`.
        ValueError: an argument is outside its range.
        TypeError: `fn` is no function, an argument cannot be pickled, or is none of these.

    Cost: starts the interpreters, which import torch if `fn` uses it; arguments and
    results are written to a temporary folder and read once.

    >>> import accel_fn as af
    >>> def add_ranks(offset):
    ...     state = af.init(device="cpu")
    ...     return state.rank + offset, af.reduce_sum(state.rank, state)
    >>> af.launch(add_ranks, 10, num_processes=2)
    [(10, 1), (11, 1)]
    """
    if not callable(fn):
        raise ArgumentTypeError(message("launch", "fn", "be a function", fn))
    for name, value in dict[str, object](others).items():
        rule, repair = "be an argument of launch", f"for fn, write kwargs={{{name!r}: ...}}"
        raise ArgumentTypeError(message("launch", name, rule, value, repair))
    if os.environ.get("WORLD_SIZE", "1") != "1":
        rank, size = os.environ.get("RANK"), os.environ["WORLD_SIZE"]
        raise WorldError(
            f"launch: caller must not be a rank of a world itself, got rank {rank} of {size}; "
            "call fn, and take the state from af.init()"
        )
    shell = shell_of_kernel()
    if shell is not None and not cpu:
        check_unused_accelerator(shell)
    given = {
        "num_processes": num_processes,
        "cpu": cpu,
        "gpu_ids": None if gpu_ids is None else tuple(gpu_ids),
        "mixed_precision": mixed_precision,
        "num_microbatches": num_microbatches,
        "wrap": wrap,
        "threads_per_process": threads_per_process,
        "timeout_s": timeout_s,
        "mesh": mesh,
    }
    where, machine = dict.fromkeys(Settings.model_fields, "launch"), detect()
    settings = check_settings(
        {name: each for name, each in given.items() if each is not None}, where
    )
    check_machine(settings, where, os.environ, machine)
    check_temporary_folder()
    call = _pickle(fn, args, kwargs or {})
    variables = _variables(settings, free_port(_HOST, 0))
    with shown_displays(shell) as displays:
        return run_ranks(call, variables, _processors(settings, machine), displays)


def _pickle(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle the call; if that fails, raise an error that names the argument."""
    cells = {
        name: entry
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and not os.path.exists(name)
    }
    try:
        return dumps(Call(fn, args, kwargs, sys.argv, cells))
    except Exception as error:
        name, value = _unpicklable(fn, args, kwargs)
        rule = f"be something that can be pickled ({error})"
        raise ArgumentTypeError(message("launch", name, rule, value)) from error


def _unpicklable(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, Any]:
    """Find the part of a call that cannot be pickled."""
    parts = {f"args[{index}]": value for index, value in enumerate(args)}
    parts |= {f"kwargs[{name!r}]": value for name, value in kwargs.items()}
    if inspect.isfunction(fn):
        used = inspect.getclosurevars(fn)
        for name, value in {**used.nonlocals, **used.globals}.items():
            parts[f"fn's {name}"] = value
    for name, value in parts.items():
        try:
            dumps(value)
        except Exception:
            return name, value
    return "fn", fn


def _variables(settings: Settings, port: int) -> list[dict[str, str]]:
    """The variables of each rank: as from `accel-fn launch` and torch's agent on this machine."""
    machines = Machines(
        num_machines=1,
        machine_rank=0,
        num_local=settings.num_processes or 1,
        host=_HOST,
        port=port,
        backend="static",
        job=uuid.uuid4().hex,
        why=defaultdict(lambda: "launch"),
    )
    shared = launch_variables(settings, machines, read_processors(), os.environ)
    ranks = [
        [*shared, *rank_variables(machines, rank, 0, os.environ)]
        for rank in range(machines.num_local)
    ]
    return [{each.name: each.value for each in rank if each.value is not None} for rank in ranks]


def _processors(settings: Settings, machine: Machine) -> list[str]:
    """The processors of each rank, as `0,1,2`; empty: any."""
    num_local = settings.num_processes or 1
    on_cpu = settings.cpu or not machine.num_devices
    # A rank should be near its accelerator, and only the driver knows where that is.
    cpus = (bind_ranks(read_processors(), num_local) if on_cpu else None) or [()] * num_local
    return [",".join(map(str, each)) for each in cpus]
