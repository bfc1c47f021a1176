"""The rendezvous of a launch's machines, which makes a new store for each attempt.

Torch's static rendezvous keeps the order of machines, but reuses its store, which holds the keys of
failed attempts. Torch's c10d rendezvous makes a new store, but changes the order of machines. This
rendezvous keeps the order and makes a new store. It uses torch's stores.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from accel_fn.core.signed import run_token
from accel_fn.errors import WorldError, WorldTimeoutError
from accel_fn.launcher.machines import Machines, free_port, is_listening, listen
from accel_fn.parallel.stores import SignedStore

_MEET_WITHIN_S, _LOG_AFTER_S, _LINGER_S, _POLL_S = 600.0, 10.0, 3.0, 0.05
_BEAT_S, GONE_AFTER_S = 1.0, 30.0

_logger = logging.getLogger(__name__)


class StoreRendezvous(RendezvousHandler):
    """One machine's side of the rendezvous; it ends with the launcher, so it is never closed.

    A single machine has a store in memory that no other process can reach: its ranks meet in a file.
    """

    def __init__(self, machines: Machines, rank: int, run_id: str) -> None:
        self._machines, self._rank, self._run_id = machines, rank, run_id
        self._store: Any = None
        self._attempt_store: Any = None
        self._beat_at = 0.0
        self._beats: dict[int, tuple[bytes, float]] = {}
        self.attempt = -1

    @property
    def use_agent_store(self) -> bool:
        """Return whether ranks use a store that the launcher serves."""
        # On one machine, return False: rank 0 then serves a store, for scripts that call
        # init_process_group themselves.
        return self._machines.num_machines > 1

    def get_backend(self) -> str:
        return "static"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self._run_id

    def num_nodes_waiting(self) -> int:
        """Return 1 if another machine is at a later attempt: torch's agent then restarts its ranks."""
        if self._machines.num_machines == 1 or self._store is None:
            return 0
        try:
            return int(self._store.check([f"attempt/{self.attempt + 1}"]))
        except DistError:
            # The store does not answer: machine 0 is gone, and `has_ended` will return True.
            return 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the latest attempt, or start the next one; wait for all machines."""
        port = 0
        if self._store is None:
            self._store, port = self._open()
        elif self._machines.num_machines == 1:
            port = free_port(self._machines.host, self._machines.port)
        self.attempt += 1
        self._join(self._store)
        if self._rank == 0 and self.attempt > 0 and self._machines.num_machines > 1:
            # Serve a new store: ranks must not read the keys of the previous attempt.
            self._attempt_store, port = _serve(self._machines, 0)
        own = PrefixStore(f"store/{self.attempt}", self._store)
        info = RendezvousStoreInfo.build(self._rank, own, self._machines.host, port)
        return RendezvousInfo(own, self._rank, self._machines.num_machines, info)

    def _open(self) -> tuple[Any, int]:
        host, port = self._machines.host, self._machines.port
        if self._machines.num_machines == 1:
            return HashStore(), free_port(host, port)
        if self._rank == 0:
            return _serve(self._machines, port)
        self._wait(lambda: is_listening(host, port, 1.0), f"machine 0 at {host}:{port}")
        store = _signed(
            TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_MEET_WITHIN_S))
        )
        if store.add(f"machine/{self._rank}", 1) > 1:
            self._take_over(store)
        return store, port

    def _take_over(self, store: Any) -> None:
        """Wait until the earlier launcher of this machine has ended, and take its place."""
        # The earlier launcher has ended if it is missing in the latest attempt, or if it sends no
        # heartbeat for GONE_AFTER_S.
        deadline, latest, beat = time.monotonic() + GONE_AFTER_S, 0, f"beat/{self._rank}"
        first = store.get(beat) if store.check([beat]) else b""
        while time.monotonic() < deadline:
            while store.check([f"attempt/{latest + 1}"]):
                latest += 1
            if not store.check([f"here/{latest}/{self._rank}"]):
                return
            if store.check([beat]) and store.get(beat) != first:
                raise WorldError(
                    f"launch: machine_rank must be another on each machine, got {self._rank} twice"
                )
            time.sleep(_POLL_S)
        # `next_rendezvous` starts the attempt after this one, and the waiting machines join it.
        self.attempt = latest

    def beat(self) -> int | None:
        """Send this launcher's heartbeat; on machine 0, return a machine whose heartbeat has stopped."""
        # No machine checks the heartbeat of machine 0: if machine 0 ends, its store is gone, and
        # the other machines notice that.
        now = time.monotonic()
        if self._machines.num_machines == 1 or self._store is None or now < self._beat_at + _BEAT_S:
            return None
        self._beat_at = now
        try:
            self._store.set(f"beat/{self._rank}", str(now))
            for peer in range(1, self._machines.num_machines) if self._rank == 0 else ():
                key = f"beat/{peer}"
                beat = self._store.get(key) if self._store.check([key]) else b""
                last, since = self._beats.setdefault(peer, (beat, now))
                if last != beat:
                    self._beats[peer] = beat, now
                elif now > since + GONE_AFTER_S:
                    # Forget the machine. A launcher that replaces it then gets the full time for
                    # its first heartbeat.
                    del self._beats[peer]
                    return peer
        except DistError:
            # The store does not answer: machine 0 is gone, and `has_ended` will return True.
            pass
        return None

    def _join(self, store: Any) -> None:
        """Join the latest attempt, and wait until all machines have joined it."""
        size = json.dumps([self._machines.num_machines, self._machines.num_local])
        while True:
            while self.num_nodes_waiting():
                self.attempt += 1
            store.set(f"attempt/{self.attempt}", "")
            store.set(f"here/{self.attempt}/{self._rank}", size)
            if self._all_joined(store, size):
                return

    def _all_joined(self, store: Any, size: str) -> bool:
        """Wait for all machines; return False if the attempt is over before they have joined.

        Raise an error if machines differ in their number of machines or processes.
        """
        for peer in range(self._machines.num_machines):
            key = f"here/{self.attempt}/{peer}"
            self._wait(partial(self._has_key, store, key), f"machine {peer}")
            if self._attempt_is_over():
                return False
            other = store.get(key).decode()
            if other != size:
                self._linger(store)
                raise WorldError(
                    f"launch: all machines must be given one world, got {_readable(self._rank, size)} "
                    f"and {_readable(peer, other)}"
                )
        return True

    def _has_key(self, store: Any, key: str) -> bool:
        return bool(store.check([key])) or self._attempt_is_over()

    def _attempt_is_over(self) -> bool:
        return self.num_nodes_waiting() > 0 or self.has_ended()

    def _wait(self, arrived: Callable[[], bool], peer: str) -> None:
        """Wait for another machine; log a warning if the wait is long."""
        start, logged = time.monotonic(), False
        while not arrived():
            if self.has_ended():
                raise WorldError("launch: another machine has ended")
            waited = time.monotonic() - start
            if waited > _MEET_WITHIN_S:
                raise WorldTimeoutError(
                    f"launch: all {self._machines.num_machines} machines must come within "
                    f"{_MEET_WITHIN_S:g} s, machine {self._rank} did not see {peer}; "
                    "is it running, and is the port open between them?"
                )
            if waited > _LOG_AFTER_S and not logged:
                logged = True
                _logger.warning("machine %d waits for %s", self._rank, peer)
            self.beat()
            time.sleep(_POLL_S)

    def _linger(self, store: Any) -> None:
        """On machine 0, which serves the store, wait until all machines have read from it."""
        store.add("left", 1)
        deadline = time.monotonic() + _LINGER_S
        while self._rank == 0 and time.monotonic() < deadline:
            if store.add("left", 0) == self._machines.num_machines:
                break
            time.sleep(_POLL_S)

    def has_ended(self) -> bool:
        """Return whether another machine has ended the run, or machine 0 is gone."""
        if self._machines.num_machines == 1 or self._store is None:
            return False
        try:
            return bool(self._store.check(["ended"]))
        except DistError:
            return True

    def leave(self) -> None:
        """Make the launchers of the other machines end too."""
        if self._store is not None:
            with suppress(DistError):
                self._store.set("ended", "")

    def all_finished(self) -> bool:
        """Record that this machine's ranks have finished; return whether all ranks have."""
        if self._machines.num_machines == 1 or self._store is None:
            return True
        peers = range(self._machines.num_machines)
        try:
            self._store.set(f"done/{self.attempt}/{self._rank}", "")
            return bool(self._store.check([f"done/{self.attempt}/{peer}" for peer in peers]))
        except DistError:
            # The store does not answer: machine 0 is gone, and `has_ended` will return True.
            return False

    def exchange_reports(self, report: str) -> list[str]:
        """Send the report of this machine's ranks to all machines; return the reports that arrive.

        Cost: up to a few seconds if another machine does not answer.
        """
        if self._machines.num_machines == 1 or self._store is None:
            return [report]
        reports = {self._rank: report}
        try:
            self._store.set(f"end/{self._rank}", report)
            self._store.set("ended", "")
            deadline = time.monotonic() + _LINGER_S
            while time.monotonic() < deadline and len(reports) < self._machines.num_machines:
                for peer in range(self._machines.num_machines):
                    if peer not in reports and self._store.check([f"end/{peer}"]):
                        reports[peer] = self._store.get(f"end/{peer}").decode()
                time.sleep(_POLL_S)
            self._linger(self._store)
        except DistError:
            # The store does not answer, since machine 0 is gone. Return the reports that have
            # arrived.
            pass
        return list(reports.values())


def _readable(rank: int, size: str) -> str:
    machines, processes = json.loads(size)
    return f"{machines} machines of {processes} processes from machine {rank}"


def _signed(store: TCPStore) -> Any:
    """Return a store that signs its values, if the run has a token."""
    return SignedStore(store) if run_token() else store


def _serve(machines: Machines, port: int) -> tuple[Any, int]:
    """Serve a store at this port, or at a free one if it is 0; return the store and the port."""
    listener = listen(machines.host, port, alone=machines.num_machines == 1)
    port = listener.getsockname()[1]
    store = TCPStore(
        machines.host,
        port,
        is_master=True,
        timeout=timedelta(seconds=_MEET_WITHIN_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return _signed(store), port
