"""Run a launch: start torch's agent and its ranks, wait for them, report how they ended."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    LogsDest,
    SignalException,
    Std,
)
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from accel_fn.errors import WorldError
from accel_fn.launcher import worker
from accel_fn.launcher.failures import (
    Failure,
    cause,
    has_failed,
    has_record,
    lost_peer,
    read_failure,
    report,
)
from accel_fn.launcher.machines import Machines, own_address
from accel_fn.launcher.plan_launch import ROLE, LaunchPlan, parent_of_store, store_variables
from accel_fn.launcher.reaper import Reaper, kill_left
from accel_fn.launcher.settings import Settings
from accel_fn.launcher.store_rendezvous import GONE_AFTER_S, StoreRendezvous

# ---- torch's agent, extended

_RECORD_WITHIN_S, _POLL_S = 1.2, 0.05
_BARRIER_S = 5
"""The time-out of the barrier at the end of torch's agent. It can be short: with our rendezvous,
all machines have finished before the barrier."""

_STOP_WITHIN_S, _LEAVE_WITHIN_S = 3, 30
"""Seconds from SIGTERM until ranks are killed. The first value is for a stop after a failure, the
second for a signal to the launcher, when ranks may save their state."""

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_logger = logging.getLogger(__name__)


class RankFolders(DefaultLogsSpecs):
    """Torch's folders of logs, and our folder for the record of each rank's end."""

    def __init__(
        self,
        logs: Path,
        records: Path,
        *,
        store: Path | None,
        redirects: Std,
        tee: Std,
        size: int,
    ) -> None:
        super().__init__(log_dir=str(logs), redirects=redirects, tee=tee)
        self._store = store
        """The folder of the file in which the ranks meet; None if they meet at a port."""
        self._records, self._size, self._attempts = records, size, itertools.count()
        self.ranks: dict[int, Path] = {}
        self.logs = logs
        """The folder with the logs of the attempt: `0/stderr.log` and so on."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the folders of an attempt, and set the variables through which ranks find them.

        Refuse a rendezvous with another world size than that of the settings.
        """
        size = envs[0]["WORLD_SIZE"]
        if size != str(self._size):
            raise WorldError(
                f"launch: num_processes must be those that came together, {size}, got "
                f"{self._size}; is it the same on every machine?"
            )
        logs = super().reify(envs)
        self.logs = Path(logs.error_files[0]).parents[1]
        number = next(self._attempts)
        if self._store is not None:
            found = store_variables(self._store, number, envs[0]["MASTER_PORT"], os.environ)
            for each in envs.values():
                each |= found
        attempt = self._records / f"records_{number}"
        self.ranks = {rank: attempt / str(rank) for rank in envs}
        for rank, folder in self.ranks.items():
            folder.mkdir(parents=True)
            envs[rank]["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")
        files = {rank: each["TORCHELASTIC_ERROR_FILE"] for rank, each in envs.items()}
        return replace(logs, error_files=files)


class Agent(LocalElasticAgent):
    """Torch's agent, with our records of failures, our signal handlers and our count of restarts.

    `failures` has those of the latest attempt, in no particular order.
    """

    def __init__(self, spec: WorkerSpec, folders: RankFolders, reaper: Reaper) -> None:
        handler = spec.rdzv_handler
        self._machines = handler if isinstance(handler, StoreRendezvous) else None
        super().__init__(
            spec,
            folders,
            exit_barrier_timeout=300 if self._machines is None else _BARRIER_S,
            log_line_prefix_template="[rank ${rank}]: ",
        )
        self.folders, self._reaper = folders, reaper
        self.failures: list[Failure] = []
        self._is_stopping = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        """Start the ranks; at a restart, log its number and its cause."""
        most = worker_group.spec.max_restarts
        # Torch counts only the restarts that this machine has caused. Count the attempts of all
        # machines.
        if self._machines is not None:
            self._remaining_restarts = max(0, most - self._machines.attempt)
        attempt = most - self._remaining_restarts
        if attempt:
            why = "started by another machine"
            if self.failures:
                why = cause(self.failures).summary
            _logger.warning("restart %d of %d: %s", attempt, most, why)
        self.failures = []
        # Block Ctrl-C while ranks start. They inherit the mask, and unblock Ctrl-C as soon as it
        # can end them without a traceback.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            started: dict[int, int] = super()._start_workers(worker_group)
            # Replace torch's handlers: they would raise at a second signal too, and interrupt the
            # clean-up.
            for number in STOPS:
                signal.signal(number, self._stop)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._reaper.watch(started.values())
        return started

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(timeout=_STOP_WITHIN_S)
        self._kill_left()

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = _LEAVE_WITHIN_S
    ) -> None:
        """Stop the ranks; kill them if a signal arrives during the wait."""
        try:
            # Stop the ranks here, with the timeout: before 2.12, torch's `_shutdown` takes none.
            if self._pcontext is not None:
                self._pcontext.close(death_sig, timeout)
            super()._shutdown(death_sig)
        except SignalException:
            self._kill()
            raise

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """At the first signal, make the agent stop the ranks; at later ones, kill them.

        Only the first signal raises, so that later signals do not interrupt clean-ups.
        """
        if self._is_stopping:
            self._kill()
            return
        self._is_stopping = True
        name = signal.Signals(number)
        raise SignalException(f"got {name.name}", name)

    def _kill(self) -> None:
        if isinstance(self._pcontext, SubprocessContext):
            for each in self._pcontext.subprocess_handlers.values():
                each.proc.kill()

    def forward_signal(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal to the ranks."""
        # Do not restart ranks that end after the signal: they have saved their state for the next
        # job.
        self._remaining_restarts = 0
        if self._pcontext is not None:
            for pid in self._pcontext.pids().values():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Poll the ranks; if one has failed, stop the others and record how each ended."""
        exit_codes = self._poll_until_cause()
        ended, stopped_at = _failed(exit_codes), time.time()
        has_lost = self._has_lost_machine()
        # Return before torch polls again: it could find another rank's end before the rank that
        # caused it has recorded its error.
        if None in exit_codes.values() and not ended and not has_lost:
            return RunResult(state=WorkerState.HEALTHY)
        if ended or has_lost:
            self._shutdown(timeout=_STOP_WITHIN_S)
            self._kill_left()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            self.failures = [
                read_failure(
                    self.folders.ranks[failure.local_rank],
                    rank=rank,
                    host=socket.gethostname(),
                    pid=failure.pid,
                    exit_code=failure.exitcode,
                    stopped_at=stopped_at,
                    stopped=failure.local_rank not in ended,
                )
                for rank, failure in result.failures.items()
            ]
        # The ranks of this machine have finished. Keep the agent until the ranks of all machines
        # have: if a rank of another machine fails, all ranks start again.
        elif not has_lost and self._machines is not None and not self._machines.all_finished():
            return RunResult(state=WorkerState.HEALTHY)
        if has_lost:
            return RunResult(state=WorkerState.FAILED, failures=result.failures)
        return result

    def _has_lost_machine(self) -> bool:
        """Send our heartbeat; return whether another machine has ended the run or sends no heartbeat."""
        if self._machines is None:
            return False
        if self._machines.has_ended():
            self._remaining_restarts = 0
            return True
        silent = self._machines.beat()
        if silent is not None:
            _logger.warning("machine %d has not answered for %g s", silent, GONE_AFTER_S)
        return silent is not None

    def _poll_until_cause(self) -> dict[int, int | None]:
        """Return local exit codes, None for a running rank; after a failure, wait for its cause."""
        # A rank that loses a peer may end first, while the peer has not recorded the error that is
        # the cause. So wait while all ended ranks have only lost a peer.
        deadline = time.monotonic() + _RECORD_WITHIN_S
        folders = self.folders.ranks
        while True:
            exit_codes = self._poll()
            ended = _failed(exit_codes)
            running = [rank for rank, code in exit_codes.items() if code is None]
            all_lost_peers = ended and all(lost_peer(folders[rank]) for rank in ended)
            if not all_lost_peers or not running or time.monotonic() > deadline:
                return exit_codes
            if any(has_record(folders[rank]) for rank in running):
                return exit_codes
            time.sleep(_POLL_S)

    def _poll(self) -> dict[int, int | None]:
        """Poll the ranks; return their exit codes, None for a running rank."""
        assert isinstance(self._pcontext, SubprocessContext)
        processes = {rank: each.proc for rank, each in self._pcontext.subprocess_handlers.items()}
        for rank, process in processes.items():
            # An exit handler may end a failed rank with code 0. Correct `returncode` in place,
            # since torch reads it too.
            if process.poll() == 0 and has_failed(self.folders.ranks[rank]):
                process.returncode = 1
        return {rank: process.returncode for rank, process in processes.items()}

    def _kill_left(self) -> None:
        """Kill processes that failed ranks left behind, before the next attempt starts."""
        if self._pcontext is not None:
            kill_left(self._pcontext.pids().values(), self._reaper.run_id)


def _failed(exit_codes: dict[int, int | None]) -> set[int]:
    """Return the local ranks that have ended with an error."""
    return {rank for rank, code in exit_codes.items() if code}


# ---- the run

_MEET_WITHIN_S = 600


def run(plan: LaunchPlan) -> tuple[int, str]:
    """Start the ranks of this machine and wait for them.

    Return the exit code (0, the cause's, or 128 + the signal that stopped the launcher), and the
    report of the ranks that failed.
    """
    machines, settings, command = plan.machines, plan.settings, plan.command
    run_id = machines.job or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    reaper = Reaper(run_id)
    # Torch's agent passes this process's environment to the ranks.
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
            # Escape `$`: torch replaces names such as `${local_rank}` in arguments.
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
    # Forward SIGUSR1 to the ranks: Slurm sends it before a job's time is over.
    before = signal.signal(signal.SIGUSR1, agent.forward_signal)
    try:
        result = agent.run()
    except SignalException as stop:
        # Ignore further signals: no rank is left to stop. At its end, Python would reset a handler,
        # and a signal would then kill this process.
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
        _logger.warning(
            "stopped by %s", "Ctrl-C" if stop.sigval is signal.SIGINT else stop.sigval.name
        )
        # With restarts, do not end the run of the other machines: they wait until a new launcher
        # replaces this one.
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
        # Write the report to a file too, since stderr may be lost. If the disk is full, still
        # return it.
        with suppress(OSError):
            (agent.folders.logs / "report.txt").write_text(text, encoding="utf-8")
    return cause(failures).exit_status, text


def _handler(machines: Machines, run_id: str) -> RendezvousHandler:
    """Make our rendezvous, or one of torch's if the settings name a backend of torch."""
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
    """Make the folder of the ranks' output; refuse a folder that cannot be written to."""
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
    """Silence the log of torch's agent, unless the user has set LOGLEVEL."""
    # Otherwise torch would log a failure too, between the ranks' output and our report.
    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
