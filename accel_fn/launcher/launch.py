"""launch: run a function on every rank of a new world, from Python and notebooks.

Torch's `start_processes` does not suffice. It imports the caller's script and torch in each rank
before variables such as OMP_NUM_THREADS can be set. It returns an exception as text. When one rank
fails, it stops the other ranks at once, though one of them may hold the cause. If SIGCHLD is
ignored, it does not notice the end of ranks. Torch's agent (`torch.distributed.launcher`) leaves
its signal handlers behind in the caller's process. So `launch` starts the ranks itself. Only the
store of their rendezvous is torch's.
"""

from __future__ import annotations

import inspect
import linecache
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never, TypeVar

from accel_fn.errors import ArgumentTypeError, RankError, WorldError, message
from accel_fn.launcher.child import CALL, RAISED, VALUE, Call, Raised, dumps
from accel_fn.launcher.failures import Failure, cause, read_crash
from accel_fn.launcher.hardware import Processors, detect, read_processors
from accel_fn.launcher.machines import Machines, free_port
from accel_fn.launcher.notebook import (
    NO_PIPE,
    check_unused_accelerator,
    shell_of_kernel,
    shown_displays,
)
from accel_fn.launcher.plan_launch import (
    check_mesh,
    check_temporary_folder,
    choose_processors,
    launch_variables,
    parent_of_store,
    rank_variables,
    store_variables,
)
from accel_fn.launcher.reaper import Reaper, kill_left
from accel_fn.launcher.settings import SETTINGS, Settings, check_machine, check_settings

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

    Each rank is a new interpreter, with the variables that torchrun would set, so `af.init()` in
    `fn` needs no argument. Nothing is forked and no script is imported again. So `launch` works for
    functions of a notebook's cell, or of a script without `if __name__ == "__main__"`, also after
    CUDA has started in the script. Such functions are sent by cloudpickle; ranks import functions
    of modules. Settings files are not read. Ranks inherit variables such as ACCEL_FN_WRAP, unless
    an argument replaces them.

    A notebook's cell shows pictures and progress bars of rank 0, and printed lines of all ranks.

    When a rank fails, the others are stopped, and its exception is raised here.
    Ctrl-C stops all ranks. No rank outlives this process.

    Args:
        fn: the function that each rank runs; `af.init()` in it returns the rank's state.
        *args: arguments for `fn`, the same on every rank.
        num_processes: number of ranks, all on this machine.
        kwargs: arguments for `fn` by name.
        cpu: use the CPU even if there are accelerators.
        gpu_ids: accelerators to use, by index.
        mixed_precision: the default of `with_amp()`.
        num_microbatches: the default of `accumulate()`.
        wrap: the wrapper that `wrap_as_launched()` takes: "ddp", "fsdp" or "deepspeed".
        threads_per_process: CPU threads of each rank; default: an equal share of the cores.
        timeout_s: seconds that a collective may take before all ranks report and end.
        mesh: axes that the ranks form and their sizes, as for `init`.
        **others: none; arguments of `fn` go into `kwargs`, which cannot clash with these names.

    Returns:
        The results of `fn`, in rank order.

    Raises:
        Exception: the first exception of `fn` on any rank, with the rank as a note and the
            rank's traceback as the cause.
        RuntimeError: a rank was killed or exited, this process is itself a rank, or, without `cpu`,
            it is a notebook's that has used an accelerator.
        ValueError: an argument is outside its range.
        TypeError: `fn` is not a function, or an argument cannot be pickled or is not one of these.

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
    where = dict.fromkeys(SETTINGS, "launch")
    settings = check_settings(
        {name: each for name, each in given.items() if each is not None}, where
    )
    check_machine(settings, where, os.environ, detect())
    check_mesh(settings, settings.num_processes or 1)
    check_temporary_folder()
    call, processors = _pickle(fn, args, kwargs or {}), read_processors()
    variables = _variables(settings, processors)
    cpus = choose_processors(settings, processors, len(variables), os.environ)
    with shown_displays(shell) as displays:
        return run_ranks(call, variables, cpus or [()] * len(variables), displays)


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
    """Return the name and value of the part of a call that cannot be pickled."""
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


def _variables(settings: Settings, processors: Processors) -> list[dict[str, str]]:
    """Return for each rank the variables that `accel-fn launch` and torch's agent would set."""
    machines = Machines(
        num_machines=1,
        machine_rank=0,
        num_local=settings.num_processes or 1,
        host=_HOST,
        port=free_port(_HOST, 0),
        backend="static",
        job=uuid.uuid4().hex,
        why=defaultdict(lambda: "launch"),
    )
    shared = launch_variables(settings, machines, processors, os.environ)
    ranks = [
        [*shared, *rank_variables(machines, rank, 0, os.environ)]
        for rank in range(machines.num_local)
    ]
    return [{each.name: each.value for each in rank if each.value is not None} for rank in ranks]


# ---- the ranks of a call

_POLL_S, _SETTLE_S, _STOP_WITHIN_S = 0.02, 0.5, 3.0
"""After a failure, the launcher waits half a second: a rank that lost a peer may end first, before
the peer has written the error that is the cause. After SIGTERM, ranks get three seconds to save
their work."""


@dataclass(frozen=True, slots=True)
class Rank:
    """The process of one rank, and the folder into which it writes its result or its error."""

    number: int
    folder: Path
    process: subprocess.Popen[bytes]

    def has_ended(self) -> bool:
        """Return whether the rank has exited, or has written the error with which it will exit."""
        return self.process.poll() is not None or (self.folder / RAISED).exists()

    def has_failed(self) -> bool:
        """Return whether the rank has ended without a result."""
        return self.has_ended() and not (self.folder / VALUE).exists()

    def raised(self) -> Raised | None:
        """Read the exception that the rank has written; None if it has written none."""
        try:
            found: Raised = pickle.loads((self.folder / RAISED).read_bytes())
        except FileNotFoundError:
            return None
        return found


class RankTraceback(Exception):  # noqa: N818 - it is not raised, but is the cause of another error
    """The traceback of an error in the rank that raised it."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def run_ranks(
    call: bytes,
    variables: Sequence[Mapping[str, str]],
    cpus: Sequence[Sequence[int]],
    displays: int | None = None,
) -> list[Any]:
    """Start a rank for each set of variables; run the pickled call on all, and return the results.

    The results are in rank order. If ranks fail, end all ranks, then raise the error that caused
    the other failures. In a notebook, rank 0 sends its displays to the pipe `displays`.
    """
    reaper = Reaper(variables[0]["TORCHELASTIC_RUN_ID"])
    folder = reaper.make_folder(tempfile.gettempdir())
    store = reaper.make_folder(parent_of_store(os.environ))
    met = store_variables(store, 0, variables[0]["MASTER_PORT"], os.environ)
    ranks: list[Rank] = []
    try:
        (folder / CALL).write_bytes(call)
        for number, own in enumerate(variables):
            ranks.append(_start(number, {**own, **met}, cpus[number], folder, displays))
            # Register each rank with the reaper before the next one starts: if this process is
            # killed here, the reaper kills the ranks.
            reaper.watch([ranks[-1].process.pid])
        failed_at = _wait(ranks)
        if failed_at is not None:
            raise _failure(ranks, failed_at)
        # Use `map`: the warning in `_result` counts stack frames to find the user's line, and a
        # comprehension is a frame of its own before Python 3.12.
        return list(map(_result, ranks))
    finally:
        _stop(ranks)
        kill_left([rank.process.pid for rank in ranks], reaper.run_id)
        reaper.finish()


def _start(
    number: int,
    variables: Mapping[str, str],
    cpus: Sequence[int],
    folder: Path,
    displays: int | None,
) -> Rank:
    own = folder / str(number)
    own.mkdir()
    code = (
        f"import sys; sys.path[:] = {[str(each) for each in sys.path]!r}; "
        "from accel_fn.launcher.child import main; main(*sys.argv[1:])"
    )
    pipe = "" if displays is None else str(NO_PIPE if number else displays)
    bound = ",".join(map(str, cpus))
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(os.getpid()), bound, str(folder), pipe],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        pass_fds=[] if displays is None or number else [displays],
        # In a new session, ranks get no Ctrl-C from the terminal. This process gets it, and stops
        # them.
        start_new_session=True,
    )
    return Rank(number, own, process)


def _wait(ranks: Sequence[Rank]) -> float | None:
    """Wait until all ranks end, or for `_SETTLE_S` after a failure; return the failure's time, or None."""
    failed_at = None
    while not all(rank.has_ended() for rank in ranks):
        if failed_at is None and any(rank.has_failed() for rank in ranks):
            failed_at = time.time()
        if failed_at is not None and time.time() > failed_at + _SETTLE_S:
            return failed_at
        time.sleep(_POLL_S)
    return failed_at or (time.time() if any(rank.has_failed() for rank in ranks) else None)


def _failure(ranks: Sequence[Rank], failed_at: float) -> Exception:
    """Stop all ranks; return the error of the rank whose failure caused the others."""
    running = {rank.number for rank in ranks if not rank.has_ended()}
    _stop(ranks)
    failures = []
    for rank in ranks:
        if rank.has_failed():
            raised = rank.raised()
            failures.append(
                Failure(
                    rank=rank.number,
                    host=socket.gethostname(),
                    pid=rank.process.pid,
                    exit_code=rank.process.returncode,
                    time=raised.time if raised else failed_at,
                    stack=read_crash(rank.folder),
                    exception=raised.last_line if raised else "",
                    stopped=rank.number in running and not raised,
                )
            )
    first = cause(failures)
    where = f"rank {first.rank} of {len(ranks)} ({first.host}, pid {first.pid})"
    raised = ranks[first.rank].raised()
    if raised is None:
        how = f"ended before fn returned, with {first.last_line}; see what it printed"
        if first.signal_name:
            how = f"was killed by {first.last_line}"
        killed = RankError(f"launch: {where} {how}")
        killed.__cause__ = RankTraceback(first.stack) if first.stack else None
        return killed
    try:
        error: Exception = pickle.loads(raised.error)
    except Exception:
        # This process cannot load the class of the error, for example because `fn` has defined it.
        error = RankError(raised.last_line)
    error.__cause__ = RankTraceback(raised.traceback)
    error.add_note(f"on {where}")
    return error


def _result(rank: Rank) -> Any:
    code = rank.process.wait()
    if code:
        warnings.warn(
            f"launch: rank {rank.number} ended with exit code {code} after fn had returned",
            RuntimeWarning,
            stacklevel=4,
        )
    return pickle.loads((rank.folder / VALUE).read_bytes())


def _stop(ranks: Sequence[Rank]) -> None:
    """Stop the running ranks and their process groups by SIGTERM; kill ranks that do not end in time."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        running = [rank.process for rank in ranks if rank.process.poll() is None]
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, sent)
        deadline = time.monotonic() + _STOP_WITHIN_S
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
