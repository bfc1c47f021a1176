"""The rendezvous of a world of processes: join it, start its watchdog, leave it."""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from accel_fn.base.state import Watchdog
from accel_fn.comm.backends import current_world, device_backend, nccl_of
from accel_fn.comm.watchdog.store_log import StoreLog
from accel_fn.comm.watchdog.watchdog import StoreWatchdog, ending_error
from accel_fn.errors import WorldError, WorldTimeoutError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

_SETTLE_S, _TRY_AGAIN_S, _ANSWER_S = 0.05, 0.1, 1.0
_NCCL_AFTER_WATCHDOG_S = 60.0
_LIBRARIES = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}")


def join_world(
    *,
    rank: int,
    world_size: int,
    host: str,
    port: int,
    serves: bool,
    backend: str,
    timeout_s: float,
) -> tuple[ProcessGroup, StoreWatchdog]:
    """Join the world of all processes that call this; return its group and this rank's watchdog.

    A process that is in a world already gets a second group over it.
    """
    timeout = timedelta(seconds=timeout_s)
    if dist.is_initialized():
        _check_world(rank, world_size)
        group: ProcessGroup | None = dist.new_group(backend=backend, timeout=timeout)
    else:
        deadline = time.monotonic() + timeout_s
        store = _reach_store(rank, world_size, host, port, serves, timeout_s, deadline)
        store = _wait_for_all(store, rank, world_size, f"{host}:{port}", timeout_s, deadline)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        group = dist.group.WORLD
    assert group is not None
    nccl = nccl_of(group)
    if nccl is not None:
        # NCCL ends a process without a report, so the watchdog must come first.
        nccl._set_default_timeout(timedelta(seconds=timeout_s + _NCCL_AFTER_WATCHDOG_S))
    watchdog = StoreWatchdog(
        _store_log(group),
        rank=rank,
        world_size=world_size,
        timeout_s=timeout_s,
        libraries=_LIBRARIES,
        times_steps=device_backend(group) is not None,
    )
    watchdog.start()
    return group, watchdog


def _store_log(group: ProcessGroup) -> StoreLog:
    """Return a log in the group's own part of the store of its rendezvous."""
    store = dist.distributed_c10d._world.pg_map[group][1]
    served = store
    while isinstance(served, PrefixStore):
        served = served.underlying_store
    address = (served.host, served.port) if isinstance(served, TCPStore) else None
    return StoreLog(cast("Any", store), address)  # torch's stubs lack clone and append


def leave_world(group: ProcessGroup, watchdog: Watchdog | None) -> None:
    """Leave a group; leaving the first of a process leaves all. Does nothing the second time.

    Gloo's threads may still hold the tensors of the last collectives for an
    instant, and need the interpreter to let go of them: one that is late
    aborts the process when Python is gone. Sleeping gives them both.
    """
    if watchdog is not None:
        watchdog.stop()
    if dist.is_initialized() and (
        group is dist.group.WORLD or group in dist.distributed_c10d._world.pg_map
    ):
        fails = ending_error() is not None or (watchdog is not None and watchdog.has_lost_rank)
        if fails and device_backend(group) is not None:
            # Destroying waits for kernels that are queued, whose peers may never come.
            dist.distributed_c10d._abort_process_group(group)
        else:
            dist.destroy_process_group(group)
        time.sleep(_SETTLE_S)


def _check_world(rank: int, world_size: int) -> None:
    if current_world() != (rank, world_size):
        raise WorldError(
            f"init: RANK={rank} WORLD_SIZE={world_size} must agree with the world that this process "
            f"is in, got rank {dist.get_rank()} of {dist.get_world_size()}"
        )


def _reach_store(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    serves: bool,
    timeout_s: float,
    deadline: float,
) -> Store:
    """Connect to the key-value store at `host:port`: served by rank 0, or by the launcher's agent."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise WorldError(
            f"init: MASTER_ADDR must be a host that resolves, got {host!r} ({error})"
        ) from error
    make = partial(
        TCPStore,
        host,
        port,
        world_size,
        is_master=serves,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
    )
    try:
        if not serves:
            _wait_for_server(host, port, len(addresses), deadline)
        store = _made_in_time(make, deadline)
    except (dist.DistNetworkError, dist.DistStoreError, OSError, ValueError) as error:
        verb = "serve" if serves else "reach"
        raise WorldTimeoutError(
            f"init: rank {rank} of {world_size} could not {verb} MASTER_ADDR={host} MASTER_PORT={port} "
            f"within {timeout_s:g} s; is rank 0 running there, and is the port free and open? "
            f"({str(error).splitlines()[0]})"
        ) from error
    atexit.register(_keep, store)  # peers may still use it: it ends with this process
    return store


def _wait_for_server(host: str, port: int, num_addresses: int, deadline: float) -> None:
    """Return once connections are accepted: torch's own tries last seconds longer than the timeout."""
    while True:
        left_s = max(deadline - time.monotonic(), _TRY_AGAIN_S)
        try:
            socket.create_connection((host, port), left_s / num_addresses).close()
            return
        except OSError:
            if time.monotonic() + _TRY_AGAIN_S > deadline:
                raise
        time.sleep(_TRY_AGAIN_S)


def _made_in_time(make: Callable[[], Store], deadline: float) -> Store:
    """Make the store in a thread, which is left behind if the server accepts and never answers."""
    made: Future[Store] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    thread = threading.Thread(target=run, name="accel_fn store", daemon=True)
    thread.start()
    try:
        return made.result(max(deadline - time.monotonic(), _ANSWER_S))
    except TimeoutError as error:
        atexit.register(thread.join, _ANSWER_S)  # giving up when Python is gone aborts the process
        raise WorldTimeoutError(
            str(error) or "connections are accepted, and no store answers"
        ) from error


def _keep(_store: Store) -> None:
    """Keep the store until the process exits."""


def _wait_for_all(
    store: Store, rank: int, world_size: int, address: str, timeout_s: float, deadline: float
) -> Store:
    """Return a store of this world's own once every rank has connected to it."""
    joined = store.add(f"accel_fn/joined/{rank}", 1)  # the n-th join of every rank is one world
    own = PrefixStore(f"accel_fn/world/{joined}", store)
    own.set(f"here/{rank}", "")
    keys = {peer: f"here/{peer}" for peer in range(world_size)}
    left_s = max(deadline - time.monotonic(), 0.001)
    try:
        own.wait(list(keys.values()), timedelta(seconds=left_s))
    except (dist.DistError, RuntimeError) as error:
        missing = _missing(own, keys)
        raise WorldTimeoutError(
            f"init: all {world_size} ranks must come to {address} within {timeout_s:g} s, "
            f"rank {rank} did not see {missing}; is WORLD_SIZE right, and did they start?"
        ) from error
    return own


def _missing(store: Store, keys: dict[int, str]) -> str:
    try:
        absent = [str(peer) for peer, key in keys.items() if not store.check([key])]
    except (dist.DistError, RuntimeError):
        return "rank 0 any more"
    return f"rank{'s' if len(absent) > 1 else ''} {', '.join(absent)}"
