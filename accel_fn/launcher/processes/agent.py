"""Torch's elastic agent, extended: it records how each rank ended, and leaves none behind."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
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

from accel_fn.errors import WorldError
from accel_fn.launcher.machines.store_rendezvous import StoreRendezvous
from accel_fn.launcher.processes.failures import (
    Failure,
    cause,
    has_record,
    lost_peer,
    read_failure,
)
from accel_fn.launcher.processes.reaper import kill_left

_RECORD_WITHIN_S, _POLL_S = 1.2, 0.05
_STOP_WITHIN_S, _LEAVE_WITHIN_S = 3, 30
"""A failed world ends within five seconds; one that is signalled to stop may still save its state."""

_logger = logging.getLogger(__name__)


class RankFolders(DefaultLogsSpecs):
    """A folder for each rank of each attempt; checks the size of the world that came together."""

    def __init__(
        self,
        folder: Path,
        *,
        redirects: Std,
        tee: Std,
        world_size: int,
        on_start: Callable[[Path], None],
    ) -> None:
        super().__init__(log_dir=str(folder), redirects=redirects, tee=tee)
        self._world_size, self._on_start = world_size, on_start
        self.ranks: dict[int, Path] = {}

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the folders of an attempt."""
        for variables in envs.values():
            if variables["WORLD_SIZE"] != str(self._world_size):
                raise WorldError(
                    f"launch: num_processes must be those that came together, "
                    f"{variables['WORLD_SIZE']}, got {self._world_size}; is it the same on every "
                    "machine?"
                )
        places = super().reify(envs)
        self.ranks = {rank: Path(file).parent for rank, file in places.error_files.items()}
        self._on_start(self.ranks[0].parent)
        return places


class Agent(LocalElasticAgent):
    """Torch's agent; `failures` are those of the latest attempt, in no order."""

    def __init__(self, spec: WorkerSpec, folders: RankFolders) -> None:
        super().__init__(spec, folders, log_line_prefix_template="[rank ${rank}]: ")
        handler = spec.rdzv_handler
        self._folders = folders
        self._machines_rendezvous = handler if isinstance(handler, StoreRendezvous) else None
        self.failures: list[Failure] = []
        self._kill_at_once = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        """Start the ranks; all machines count restarts alike."""
        most = worker_group.spec.max_restarts
        if self._machines_rendezvous is not None:
            self._remaining_restarts = max(0, most - self._machines_rendezvous.attempt)
        attempt = most - self._remaining_restarts
        if attempt:
            why = "started by another machine"
            if self.failures:
                why = cause(self.failures).summary
            _logger.warning("restart %d of %d: %s", attempt, most, why)
        self.failures = []
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:  # ranks inherit it: Ctrl-C reaches them once they can end without a traceback
            started: dict[int, int] = super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return started

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(timeout=_STOP_WITHIN_S)
        self._kill_left()

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = _LEAVE_WITHIN_S
    ) -> None:
        """Stop the ranks; kill them if another signal comes during the wait."""
        try:
            if self._pcontext is not None:  # torch before 2.12 has no timeout to pass on
                self._pcontext.close(signal.SIGKILL if self._kill_at_once else death_sig, timeout)
            super()._shutdown(death_sig)
        except SignalException:
            self._kill_at_once = True
            raise

    def forward_signal(self, number: int, frame: FrameType | None) -> None:
        """Send a signal on to the ranks; those that leave for it are not started again here."""
        self._remaining_restarts = 0
        if self._pcontext is not None:
            for pid in self._pcontext.pids().values():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Poll the ranks; if one has failed, stop the others and record how each ended."""
        exit_codes = self._poll_until_cause()
        ended = _failed(exit_codes)
        peer_gone = self._machines_rendezvous is not None and self._machines_rendezvous.has_ended()
        stopped_at = time.time()
        if None in exit_codes.values() and not ended and not peer_gone:
            return RunResult(state=WorkerState.HEALTHY)  # torch would poll again: others may end
        if ended or peer_gone:
            self._shutdown(timeout=_STOP_WITHIN_S)
            self._kill_left()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            self.failures = [
                read_failure(
                    self._folders.ranks[failure.local_rank],
                    rank=rank,
                    host=socket.gethostname(),
                    pid=failure.pid,
                    exit_code=failure.exitcode,
                    stopped_at=stopped_at,
                    stopped=failure.local_rank not in ended,
                )
                for rank, failure in result.failures.items()
            ]
        if peer_gone:
            self._remaining_restarts = 0
            return RunResult(state=WorkerState.FAILED, failures=result.failures)
        return result

    def _poll_until_cause(self) -> dict[int, int | None]:
        """Each local rank's exit code, None while it runs; a failure counts once its cause is known.

        A rank that loses a peer ends at once, while the peer may still be unwinding from its
        own error: it gets a moment to record that.
        """
        deadline = time.monotonic() + _RECORD_WITHIN_S
        folders = self._folders.ranks
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
        assert isinstance(self._pcontext, SubprocessContext)
        handlers = self._pcontext.subprocess_handlers
        return {rank: each.proc.poll() for rank, each in handlers.items()}

    def _kill_left(self) -> None:
        """What failed ranks left behind must not meet those of the next attempt."""
        run_id = self._worker_group.spec.rdzv_handler.get_run_id()
        for folder in self._folders.ranks.values():
            kill_left(folder, run_id)


def _failed(exit_codes: dict[int, int | None]) -> set[int]:
    """The local ranks that have failed by themselves."""
    return {rank for rank, code in exit_codes.items() if code}
