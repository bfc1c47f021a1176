"""Running a launch: torch's agent and its ranks, from the first to the last line on the screen."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
from accel_fn.launcher.log import say, tell
from accel_fn.launcher.machines.machines import Machines
from accel_fn.launcher.machines.network import own_address
from accel_fn.launcher.machines.store_rendezvous import Meeting
from accel_fn.launcher.processes import worker
from accel_fn.launcher.processes.agent import Agent, Folders
from accel_fn.launcher.processes.environment import ROLE
from accel_fn.launcher.processes.failures import Failure, cause, report
from accel_fn.launcher.processes.reaper import Reaper

_MEET_WITHIN_S = 600


@dataclass(frozen=True, slots=True)
class Job:
    """What each rank of this machine is to be."""

    command: Sequence[str]
    """Kind (script, module or program), target and arguments."""
    variables: Mapping[str, str]
    """On top of those of the launcher, and of what torch's agent gives each rank."""
    cpus: str
    """Processors by local rank, such as `0-3;4-7`; empty: any."""
    max_restarts: int
    log_dir: Path | None
    tee: bool


def run(job: Job, machines: Machines) -> int:
    """Start the ranks of this machine, wait for them, say how they ended.

    Args:
        job: what they are to be.
        machines: where they are.

    Returns:
        The exit code: 0, the cause's, or 128 + the signal that stopped the launcher.
    """
    run_id = machines.job or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    reaper = Reaper(run_id)
    os.environ.update(job.variables)
    _be_quiet()
    folder = _folder(job.log_dir, reaper)
    std = Std.ALL if job.log_dir or job.tee else Std.NONE
    folders = Folders(
        folder,
        redirects=std,
        tee=Std.ALL if job.tee else Std.NONE,
        world_size=machines.num_processes,
        started=lambda place: reaper.watch(place, temporary=False),
    )
    handler = _handler(machines, run_id)
    show = "1" if std else ""
    arguments = ["-u", worker.__file__, str(os.getpid()), job.cpus, show, *job.command]
    agent = Agent(
        WorkerSpec(
            role=ROLE,
            local_world_size=machines.num_local,
            entrypoint=sys.executable,
            args=tuple(each.replace("$", "$$") for each in arguments),  # torch fills in ${...}
            rdzv_handler=handler,
            max_restarts=job.max_restarts,
            local_addr=machines.host,
        ),
        folders,
    )
    try:
        return _finish(agent, handler, machines)
    finally:
        reaper.finish()


def _finish(agent: Agent, handler: RendezvousHandler, machines: Machines) -> int:
    """Let the agent run to its end, and say what that was."""
    before = signal.signal(signal.SIGUSR1, agent.pass_on)  # as Slurm sends it ahead of its limit
    try:
        result = agent.run()
    except SignalException as stop:
        name = "Ctrl-C" if stop.sigval is signal.SIGINT else stop.sigval.name
        say(f"stopped by {name}")
        return 128 + stop.sigval
    except RendezvousError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise WorldError(f"launch: the machines could not meet: {reason}") from error
    finally:
        signal.signal(signal.SIGUSR1, before)
        handler.shutdown()
    if result is not None and not result.is_failed():
        return 0
    failures = agent.failures
    if isinstance(handler, Meeting):
        ends = handler.share_end(json.dumps([asdict(each) for each in failures]))
        failures = [Failure(**each) for end in ends for each in json.loads(end)]
    sys.stdout.flush()
    if all(each.stopped for each in failures):
        say("stopped: another machine has ended")
        return 1
    tell(report(failures, machines.num_processes))
    return cause(failures).exit_status


def _handler(machines: Machines, run_id: str) -> RendezvousHandler:
    """Our meeting; or torch's own, where its backend was asked for by name."""
    if machines.backend == "static":
        assert machines.machine_rank is not None
        return Meeting(machines, machines.machine_rank, run_id)
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


def _folder(log_dir: Path | None, reaper: Reaper) -> Path:
    """Where the ranks' output, and what they say of their end, is kept."""
    if log_dir is None:
        return reaper.make_folder(tempfile.gettempdir())
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=log_dir):
            reaper.watch(log_dir, temporary=False)
            return log_dir
    except OSError as error:
        raise WorldError(
            f"launch: log_dir must be a folder that can be written to, got {str(log_dir)!r} "
            f"({error.strerror})"
        ) from None


def _be_quiet() -> None:
    """What torch's agent logs of a failure would stand between the ranks' last words and ours."""
    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
