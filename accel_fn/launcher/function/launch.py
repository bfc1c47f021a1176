"""launch: a function run by every rank of a world of fresh processes, from Python and notebooks.

Torch's agent (`torch.distributed.launcher`) is made to be a process of its own: in the
caller's it would leave its signal handlers behind, and turn Ctrl-C into an error of its
own. Here the caller's process stays as it is. The store is torch's all the same.
"""

from __future__ import annotations

import importlib
import inspect
import linecache
import os
import socket
import sys
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from accel_fn.errors import ArgumentTypeError, ExtraError, WorldError, message

try:
    importlib.import_module("cloudpickle")
    from accel_fn.launcher.function.child import Call, dumps
    from accel_fn.launcher.function.wait import Place, run_ranks
    from accel_fn.launcher.machines.cpus import bind_ranks, read_processors
    from accel_fn.launcher.machines.detect import detect
    from accel_fn.launcher.machines.machines import Machines
    from accel_fn.launcher.processes.environment import launch_variables, rank_variables
    from accel_fn.launcher.settings.setting_checks import check_machine
    from accel_fn.launcher.settings.settings import Settings, check_settings
except ModuleNotFoundError as error:
    if str(error.name).startswith("accel_fn"):
        raise
    raise ExtraError(
        f'launch: {error.name} must be installed; pip install "accel-fn[cli]"', name=error.name
    ) from None

_HOST = "127.0.0.1"

T = TypeVar("T")


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
) -> list[T]:
    """Run `fn(*args, **kwargs)` on every rank of a world of fresh processes; give back what they return.

    Each is an interpreter of its own, with the variables that torchrun would
    set, so `af.init()` in `fn` needs no argument. It works where CUDA is in use
    already, and for functions of a notebook's cell or a script without
    `if __name__ == "__main__"`: nothing is forked, and nothing imported again.
    What `fn` uses travels with it by cloudpickle; modules are imported by the ranks.

    Files of settings are for the command line, and not read here; variables such as
    ACCEL_FN_WRAP the ranks inherit, where no argument says otherwise.

    When a rank fails, the others are stopped, and what it raised is raised
    here. Ctrl-C stops them all. None outlives this process.

    Args:
        fn: what a rank does; `af.init()` in it says which it is.
        *args: for `fn`, the same on every rank.
        num_processes: ranks, all on this machine.
        kwargs: for `fn`, by name.
        cpu: use the CPU, whatever accelerators there are.
        gpu_ids: accelerators to use, by index.
        mixed_precision: what `with_amp()` without an argument does.
        num_microbatches: what `accumulate()` without an argument does.
        wrap: what `wrap()` does, "ddp" or "fsdp".
        threads_per_process: CPU threads of each; default: the cores, divided.
        timeout_s: seconds that a collective may take before all ranks report and end.

    Returns:
        What `fn` returned, in rank order.

    Raises:
        Exception: what `fn` raised first on any rank, with a note of the rank; its
            traceback there is the cause.
        RuntimeError: a RuntimeError: a rank was killed, or ended by itself.
        ValueError: an argument is outside its range, or cannot be pickled.
        RuntimeError: this process is a rank of a world already.

    Cost: starts the interpreters, and imports torch in each that uses it; arguments and
    results are written to a temporary folder and read once.

    >>> import accel_fn as af
    >>> def add_ranks(offset):
    ...     state = af.init(device="cpu")
    ...     return state.rank + offset, af.reduce_sum(state.rank, state)
    >>> af.launch(add_ranks, 10, num_processes=2)
    [(10, 1), (11, 1)]
    """
    _refuse_nested()
    if not callable(fn):
        raise ArgumentTypeError(message("launch", "fn", "be a function", fn))
    settings = _settings(
        num_processes=num_processes,
        cpu=cpu,
        gpu_ids=None if gpu_ids is None else tuple(gpu_ids),
        mixed_precision=mixed_precision,
        num_microbatches=num_microbatches,
        wrap=wrap,
        threads_per_process=threads_per_process,
        timeout_s=timeout_s,
    )
    call = _pickled(fn, args, kwargs or {})
    with socket.create_server((_HOST, 0)) as listener:
        found: list[T] = run_ranks(call, _places(settings, listener), listener)
    return found


def _refuse_nested() -> None:
    """A function that every rank of a world runs would start a world on each."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        rank, size = os.environ.get("RANK"), os.environ["WORLD_SIZE"]
        raise WorldError(
            f"launch: caller must not be a rank of a world itself, got rank {rank} of {size}; "
            "call fn, and take the state from af.init()"
        )


def _settings(**values: Any) -> Settings:
    """The settings of these arguments, checked as those of `accel-fn launch` are."""
    where = dict.fromkeys(Settings.model_fields, "launch")
    settings = check_settings(
        {name: each for name, each in values.items() if each is not None}, where
    )
    check_machine(settings, where, os.environ, detect())
    return settings


def _pickled(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """The call; what cannot be pickled in it is named."""
    cells = {
        name: entry
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and not os.path.exists(name)
    }
    try:
        return dumps(Call(fn, args, kwargs, sys.argv, cells))
    except Exception as error:
        name, value = _culprit(fn, args, kwargs)
        rule = f"be something that can be pickled ({error})"
        raise ArgumentTypeError(message("launch", name, rule, value)) from error


def _culprit(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, Any]:
    """What of a call cannot be pickled."""
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


def _places(settings: Settings, listener: socket.socket) -> list[Place]:
    """Of each rank, what `accel-fn launch` and torch's agent would give it on this machine."""
    num_local = settings.num_processes or 1
    machines = Machines(
        num_machines=1,
        machine_rank=0,
        num_local=num_local,
        host=_HOST,
        port=listener.getsockname()[1],
        backend="static",
        job=uuid.uuid4().hex,
        why=defaultdict(lambda: "launch"),
    )
    processors = read_processors()
    alike = launch_variables(settings, machines, processors, os.environ)
    on_cpu = settings.cpu or not detect().num_devices  # else the driver says what is near a device
    cpus = (bind_ranks(processors, num_local) if on_cpu else None) or [()] * num_local
    return [
        Place(
            variables={
                each.name: each.value
                for each in (*alike, *rank_variables(machines, rank, 0, os.environ))
                if each.value is not None
            },
            cpus=",".join(map(str, cpus[rank])),
        )
        for rank in range(num_local)
    ]
