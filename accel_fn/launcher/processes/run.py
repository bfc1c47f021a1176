"""Run a launch: start torch's agent and its ranks, wait for them, report how they ended."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException, Std
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from accel_fn.errors import WorldError
from accel_fn.launcher.machines.machines import Machines
from accel_fn.launcher.machines.network import own_address
from accel_fn.launcher.machines.store_rendezvous import StoreRendezvous
from accel_fn.launcher.plan_launch import LaunchPlan
from accel_fn.launcher.processes import worker
from accel_fn.launcher.processes.agent import STOPS, Agent, RankFolders
from accel_fn.launcher.processes.environment import ROLE
from accel_fn.launcher.processes.failures import Failure, cause, report
from accel_fn.launcher.processes.private_folder import parent_of_store
from accel_fn.launcher.processes.reaper import Reaper
from accel_fn.launcher.settings.settings import Settings

_MEET_WITHIN_S = 600

_logger = logging.getLogger(__name__)


def run(plan: LaunchPlan) -> tuple[int, str]:
    """Start the ranks of this machine and wait for them.

    Returns the exit code (0, the cause's, or 128 + the signal that stopped the launcher), and
    the report of the ranks that failed.
    """
    machines, settings, command = plan.machines, plan.settings, plan.command
    run_id = machines.job or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    reaper = Reaper(run_id)
    # Torch's agent starts ranks with this process's environment.
    os.environ.update({each.name: each.value for each in plan.variables if each.value is not None})
    _quieten_torch()
    redirects = Std.ALL if settings.log_dir or settings.tee else Std.NONE
    records, store = reaper.make_folder(tempfile.gettempdir()), None
    if machines.num_machines == 1 and machines.backend == "static":
        store = reaper.make_folder(parent_of_store(os.environ))
    folders = RankFolders(
        _log_folder(settings.log_dir) or records,
        records,
        store=store,
        redirects=redirects,
        tee=Std.ALL if settings.tee else Std.NONE,
        size=machines.num_processes,
    )
    handler = _handler(machines, run_id)
    cpus = ";".join(",".join(map(str, each)) for each in plan.cpus or ())
    show = "1" if redirects else ""
    arguments = [worker.__file__, str(os.getpid()), cpus, show]
    arguments += [command.kind, command.target, *command.arguments]
    agent = Agent(
        WorkerSpec(
            role=ROLE,
            local_world_size=machines.num_local,
            entrypoint=sys.executable,
            # Torch replaces `${...}` in arguments by its own values.
            args=tuple(each.replace("$", "$$") for each in arguments),
            rdzv_handler=handler,
            max_restarts=settings.max_restarts,
            local_addr=machines.host,
        ),
        folders,
        reaper,
    )
    try:
        return _wait(agent, handler, machines, settings)
    finally:
        reaper.finish()


def _wait(
    agent: Agent, handler: RendezvousHandler, machines: Machines, settings: Settings
) -> tuple[int, str]:
    """Run the agent to its end; return the exit code and the report."""
    # Slurm sends it before a job's time is over.
    before = signal.signal(signal.SIGUSR1, agent.forward_signal)
    try:
        result = agent.run()
    except SignalException as stop:
        # Nothing is left to stop, and Python resets its handlers before it has ended.
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
        _logger.warning(
            "stopped by %s", "Ctrl-C" if stop.sigval is signal.SIGINT else stop.sigval.name
        )
        # With restarts, the other machines wait for a successor of this launcher.
        if isinstance(handler, StoreRendezvous) and not settings.max_restarts:
            handler.leave()
        return 128 + stop.sigval, ""
    except RendezvousError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise WorldError(f"launch: the machines could not meet: {reason}") from error
    finally:
        signal.signal(signal.SIGUSR1, before)
        handler.shutdown()
    if result is not None and not result.is_failed():
        return 0, ""
    failures = agent.failures
    if isinstance(handler, StoreRendezvous):
        reports = handler.exchange_reports(json.dumps([asdict(each) for each in failures]))
        failures = [Failure(**each) for text in reports for each in json.loads(text)]
    if all(each.stopped for each in failures):
        _logger.warning("stopped: another machine has ended")
        return 1, ""
    text = report(failures, machines.num_processes, full_traceback=settings.full_traceback)
    if settings.log_dir:
        # Nobody may read stderr, and a full disk must not hide the cause.
        with suppress(OSError):
            (agent.folders.logs / "report.txt").write_text(text, encoding="utf-8")
    return cause(failures).exit_status, text


def _handler(machines: Machines, run_id: str) -> RendezvousHandler:
    """Our rendezvous, or torch's own if settings name its backend."""
    if machines.backend == "static":
        assert machines.machine_rank is not None
        return StoreRendezvous(machines, machines.machine_rank, run_id)
    several = machines.num_machines > 1
    config: dict[str, object] = {"timeout": _MEET_WITHIN_S}
    if machines.machine_rank is not None:
        config["is_host"] = machines.machine_rank == 0
    return get_rendezvous_handler(
        RendezvousParameters(
            backend=machines.backend,
            endpoint=f"{machines.host}:{machines.port}",
            run_id=(machines.job or "accel_fn") if several else run_id,
            min_nodes=machines.num_machines,
            max_nodes=machines.num_machines,
            local_addr=own_address(machines.host) if several else machines.host,
            **config,
        )
    )


def _log_folder(log_dir: Path | None) -> Path | None:
    """Make the folder of the ranks' output; refuse one that cannot be written to."""
    try:
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=log_dir).close()
    except OSError as error:
        raise WorldError(
            f"launch: log_dir must be a folder that can be written to, got {str(log_dir)!r} "
            f"({error.strerror})"
        ) from None
    return log_dir


def _quieten_torch() -> None:
    """Silence torch's agent, unless the user has set a level."""
    # Its log of a failure would stand between the ranks' output and the report.
    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
