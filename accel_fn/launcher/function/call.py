"""A call of `launch`: check its settings, pickle it, start its ranks.

Torch's agent (`torch.distributed.launcher`) expects a process of its own: in the caller's it
would leave its signal handlers behind, and turn Ctrl-C into an error of its own. So this starts
the ranks itself, and the caller's process stays as it is. The store is torch's all the same.
"""

from __future__ import annotations

import inspect
import linecache
import os
import socket
import sys
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accel_fn.errors import ArgumentTypeError, WorldError, message
from accel_fn.launcher.function.child import Call, dumps
from accel_fn.launcher.function.wait import Place, run_ranks
from accel_fn.launcher.machines.cpus import bind_ranks, read_processors
from accel_fn.launcher.machines.detect import detect
from accel_fn.launcher.machines.machines import Machines
from accel_fn.launcher.plan_launch import check_temporary_folder
from accel_fn.launcher.processes.environment import launch_variables, rank_variables
from accel_fn.launcher.settings.setting_checks import check_machine
from accel_fn.launcher.settings.settings import Settings, check_settings

_HOST = "127.0.0.1"


def call(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], **settings: Any
) -> list[Any]:
    """Run `fn` on ranks with these settings, None being the default; return their results."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        rank, size = os.environ.get("RANK"), os.environ["WORLD_SIZE"]
        raise WorldError(
            f"launch: caller must not be a rank of a world itself, got rank {rank} of {size}; "
            "call fn, and take the state from af.init()"
        )
    where = dict.fromkeys(Settings.model_fields, "launch")
    given = {name: each for name, each in settings.items() if each is not None}
    checked = check_settings(given, where)
    check_machine(checked, where, os.environ, detect())
    check_temporary_folder()
    data = _pickle(fn, args, kwargs)
    with socket.create_server((_HOST, 0)) as listener:
        return run_ranks(data, _places(checked, listener), listener)


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


def _places(settings: Settings, listener: socket.socket) -> list[Place]:
    """Variables and place of each rank: as from `accel-fn launch` and torch's agent on this machine."""
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
    shared = launch_variables(settings, machines, processors, os.environ)
    on_cpu = settings.cpu or not detect().num_devices  # else the driver binds
    cpus = (bind_ranks(processors, num_local) if on_cpu else None) or [()] * num_local
    return [
        Place(
            variables={
                each.name: each.value
                for each in (*shared, *rank_variables(machines, rank, 0, os.environ))
                if each.value is not None
            },
            cpus=",".join(map(str, cpus[rank])),
        )
        for rank in range(num_local)
    ]
