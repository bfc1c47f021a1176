"""Where the machines of a launch meet: each attempt has a store of its own, in the order asked for.

Torch's static rendezvous keeps the order of machines, but its store and what failed
attempts left in it; its c10d rendezvous brings machines together again, in an order
of its own. This is both. Stores, barriers and the processes stay torch's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from accel_fn.errors import WorldError, WorldTimeoutError
from accel_fn.launcher.log import say
from accel_fn.launcher.machines.machines import Machines
from accel_fn.launcher.machines.network import answers, listen

_MEET_WITHIN_S, _SAY_AFTER_S, _LINGER_S, _POLL_S = 600.0, 10.0, 3.0, 0.05


class Meeting(RendezvousHandler):
    """One machine's part in the meeting of all."""

    def __init__(self, machines: Machines, rank: int, run_id: str) -> None:
        self._machines, self._rank, self._run_id = machines, rank, run_id
        self._store: TCPStore | None = None
        self._fresh: TCPStore | None = None
        self.attempt = -1

    def get_backend(self) -> str:
        """Its name in torch's events."""
        return "static"

    @property
    def use_agent_store(self) -> bool:
        """Ranks find a store that is served by the launcher."""
        return True

    def is_closed(self) -> bool:
        """Never: it ends with the launcher."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def shutdown(self) -> bool:
        """Nothing to do."""
        return True

    def get_run_id(self) -> str:
        """The name of this run."""
        return self._run_id

    def num_nodes_waiting(self) -> int:
        """Is another machine at a later attempt? Then torch's agent starts over here, too."""
        if self._machines.num_machines == 1 or self._store is None:
            return 0
        try:
            return int(self._store.check([f"attempt/{self.attempt + 1}"]))
        except DistError:
            return 0  # the first machine is gone: `has_ended` says so

    def next_rendezvous(self) -> RendezvousInfo:
        """Come to the newest attempt, the next one where nobody is ahead, and wait for all to come."""
        port = 0
        if self._store is None:
            self._store, port = self._open()
        self.attempt += 1
        self._gather(self._store)
        if self._rank == 0 and self.attempt > 0:
            # The ranks of an attempt must not read what those before them wrote.
            self._fresh, port = _serve(self._machines, 0)
        own = PrefixStore(f"store/{self.attempt}", self._store)
        info = RendezvousStoreInfo.build(self._rank, own, self._machines.host, port)
        return RendezvousInfo(own, self._rank, self._machines.num_machines, info)

    def _open(self) -> tuple[TCPStore, int]:
        host, port = self._machines.host, self._machines.port
        if self._rank == 0:
            return _serve(self._machines, port)
        self._wait(lambda: answers(host, port, 1.0), f"machine 0 at {host}:{port}")
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_MEET_WITHIN_S))
        if store.add(f"machine/{self._rank}", 1) > 1:
            self._take_over(store)
        return store, port

    def _take_over(self, store: TCPStore) -> None:
        """Another launcher was this machine: wait until the others begin an attempt without it."""
        deadline = time.monotonic() + _LINGER_S
        newest = 0
        while True:
            while store.check([f"attempt/{newest + 1}"]):
                newest += 1
            if not store.check([f"here/{newest}/{self._rank}"]):
                return
            if time.monotonic() > deadline:
                raise WorldError(
                    f"launch: machine_rank must be another on each machine, got {self._rank} twice"
                )
            time.sleep(_POLL_S)

    def _gather(self, store: TCPStore) -> None:
        """Wait for all machines to come to one attempt."""
        asked = json.dumps([self._machines.num_machines, self._machines.num_local])
        while True:
            while self.num_nodes_waiting():
                self.attempt += 1
            store.set(f"attempt/{self.attempt}", "")
            store.set(f"here/{self.attempt}/{self._rank}", asked)
            if self._sees_all(store, asked):
                return

    def _sees_all(self, store: TCPStore, asked: str) -> bool:
        """False where a later attempt began before all came; an error where they ask for two worlds."""
        for peer in range(self._machines.num_machines):
            key = f"here/{self.attempt}/{peer}"
            self._wait(partial(self._sees, store, key), f"machine {peer}")
            if self._is_late():
                return False
            other = store.get(key).decode()
            if other != asked:
                self._linger(store)
                raise WorldError(
                    f"launch: all machines must ask for one world, got {_in_words(self._rank, asked)} "
                    f"and {_in_words(peer, other)}"
                )
        return True

    def _sees(self, store: TCPStore, key: str) -> bool:
        return store.check([key]) or self._is_late()

    def _is_late(self) -> bool:
        return self.num_nodes_waiting() > 0 or self.has_ended()

    def _wait(self, arrived: Callable[[], bool], whom: str) -> None:
        """Wait for another machine, and say so if it takes long."""
        start, said = time.monotonic(), False
        while not arrived():
            if self.has_ended():
                raise WorldError("launch: another machine has ended")
            waited = time.monotonic() - start
            if waited > _MEET_WITHIN_S:
                raise WorldTimeoutError(
                    f"launch: all {self._machines.num_machines} machines must come within "
                    f"{_MEET_WITHIN_S:g} s, machine {self._rank} did not see {whom}; "
                    "is it running, and is the port open between them?"
                )
            if waited > _SAY_AFTER_S and not said:
                said = True
                say(f"machine {self._rank} waits for {whom}")
            time.sleep(_POLL_S)

    def _linger(self, store: TCPStore) -> None:
        """Machine 0 serves the store: it stays until the others have read what they need."""
        store.add("left", 1)
        deadline = time.monotonic() + _LINGER_S
        while self._rank == 0 and time.monotonic() < deadline:
            if store.add("left", 0) == self._machines.num_machines:
                break
            time.sleep(_POLL_S)

    def has_ended(self) -> bool:
        """Has another machine given up, or is the first one gone?"""
        if self._machines.num_machines == 1 or self._store is None:
            return False
        try:
            return self._store.check(["ended"])
        except DistError:
            return True

    def share_end(self, words: str) -> list[str]:
        """Tell the others how this machine's ranks ended, and hear of theirs, as far as they tell.

        Cost: up to a few seconds, where another machine does not answer.
        """
        if self._machines.num_machines == 1 or self._store is None:
            return [words]
        heard = {self._rank: words}
        try:
            self._store.set(f"end/{self._rank}", words)
            self._store.set("ended", "")
            deadline = time.monotonic() + _LINGER_S
            while time.monotonic() < deadline and len(heard) < self._machines.num_machines:
                for peer in range(self._machines.num_machines):
                    if peer not in heard and self._store.check([f"end/{peer}"]):
                        heard[peer] = self._store.get(f"end/{peer}").decode()
                time.sleep(_POLL_S)
            self._linger(self._store)
        except DistError:
            pass  # machine 0 is gone: what has been heard has to do
        return list(heard.values())


def _in_words(rank: int, asked: str) -> str:
    machines, processes = json.loads(asked)
    return f"{machines} machines of {processes} processes from machine {rank}"


def _serve(machines: Machines, port: int) -> tuple[TCPStore, int]:
    """A store at a port of this machine, 0 being a free one."""
    alone = machines.num_machines == 1
    listener = listen(machines.host, port, alone=alone)
    port = listener.getsockname()[1]
    store = TCPStore(
        machines.host if alone else "localhost",
        port,
        is_master=True,
        timeout=timedelta(seconds=_MEET_WITHIN_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    if not alone and not answers(machines.host, port, 5.0):
        raise WorldError(
            f"launch: main_process_ip must lead to machine 0, which this is, got {machines.host!r}; "
            "give one of its own addresses"
        )
    return store, port
