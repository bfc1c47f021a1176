"""The rendezvous of a world of processes: join it, start its watchdog, leave it."""

from __future__ import annotations

import atexit
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from accel_fn.core.primitives import current_world, device_backend, nccl_of
from accel_fn.core.signed import run_token
from accel_fn.core.state import Watchdog
from accel_fn.core.warn import LIBRARIES
from accel_fn.errors import WorldError, WorldTimeoutError
from accel_fn.parallel.meeting import Place, meet
from accel_fn.parallel.stores import FolderStore, SignedStore, address_of
from accel_fn.parallel.watchdog.store_log import StoreLog
from accel_fn.parallel.watchdog.watchdog import StoreWatchdog, ending_error

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

T = TypeVar("T")

_SETTLE_S, _TRY_AGAIN_S, _ANSWER_S = 0.05, 0.1, 1.0
_NCCL_AFTER_WATCHDOG_S = 60.0


def join_world(
    *,
    rank: int,
    world_size: int,
    host: str,
    port: int,
    serves: bool,
    store_file: str | None,
    backend: str,
    timeout_s: float,
    mesh: Mapping[str, int],
) -> tuple[ProcessGroup, StoreWatchdog]:
    """Join the world of all processes that call this; return its group and this rank's watchdog.

    They meet in the file, if there is one, else at the address. A process that is in a world already
    gets a second group over it.
    """
    in_world = dist.is_initialized()
    if in_world:
        _check_world(rank, world_size)
    place = Place(
        rank=rank,
        world_size=world_size,
        timeout_s=timeout_s,
        deadline=time.monotonic() + timeout_s,
        task="call it again" if in_world else f"come to {store_file or f'{host}:{port}'}",
    )

    def meet_in(store: Store) -> tuple[ProcessGroup, StoreWatchdog]:
        make = partial(_make_group, backend, place, mesh)
        met = meet(store, place, _num_groups(), make, _leave_made)
        atexit.register(_keep, store)  # peers may still use it: it ends with this process
        return met

    try:
        if in_world:
            group, watchdog = _meet_in_world(place, meet_in)
        else:
            reach = partial(_reach_store, place, host, port, serves)
            if store_file is not None:
                reach = partial(_open_store, place, store_file)
            group, watchdog = meet_at(reach, place, meet_in)
    except BaseException as error:
        _clear_frames(error)
        raise
    watchdog.start()
    return group, watchdog


def _meet_in_world(place: Place, meet_in: Callable[[Store], T]) -> T:
    """Meet in the store of the world that this process is in."""
    group = dist.distributed_c10d._get_default_group()
    try:
        return meet_in(dist.distributed_c10d._world.pg_map[group][1])
    except dist.DistNetworkError as error:
        raise _lost_store(place) from error


def meet_at(reach: Callable[[], Store], place: Place, meet_in: Callable[[Store], T]) -> T:
    """Meet in a store, and in the next one when rank 0 has given it up, until the deadline."""
    problem: WorldTimeoutError | None = None
    while True:
        try:
            # The last store lives until the next is reached: where rank 0 serves it, it is the same.
            store = reach()
        except WorldTimeoutError as error:
            if problem is None:
                raise
            raise problem from error
        try:
            return meet_in(store)
        except WorldTimeoutError as error:
            problem = error
        except dist.DistNetworkError:
            problem = _lost_store(place)
        _clear_frames(problem)
        if time.monotonic() > place.deadline:
            raise problem
        time.sleep(_TRY_AGAIN_S)  # a server that ends is gone by then


def _make_group(
    backend: str, place: Place, mesh: Mapping[str, int], store: Store, num_groups: int
) -> tuple[ProcessGroup, StoreWatchdog]:
    timeout = timedelta(seconds=place.timeout_s)
    # Torch names groups by this count, which a failed try leaves behind.
    dist.distributed_c10d._world.group_count = num_groups
    if dist.is_initialized():
        group: ProcessGroup | None = dist.new_group(backend=backend, timeout=timeout)
    else:
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout
        )
        group = dist.group.WORLD
    assert group is not None
    try:
        return group, _watchdog(group, place, mesh)
    except BaseException:
        leave_world(group, None)
        raise


def _watchdog(group: ProcessGroup, place: Place, mesh: Mapping[str, int]) -> StoreWatchdog:
    nccl = nccl_of(group)
    if nccl is not None:
        # NCCL ends a process without a report, so the watchdog must come first.
        nccl._set_default_timeout(timedelta(seconds=place.timeout_s + _NCCL_AFTER_WATCHDOG_S))
    return StoreWatchdog(
        _store_log(group),
        rank=place.rank,
        world_size=place.world_size,
        timeout_s=place.timeout_s,
        libraries=LIBRARIES,
        times_steps=device_backend(group) is not None,
        mesh=mesh,
    )


def _num_groups() -> int:
    """Return how many groups torch has named in this process."""
    return dist.distributed_c10d._world.group_count


def _leave_made(made: tuple[ProcessGroup, StoreWatchdog]) -> None:
    leave_world(made[0], None)


def _lost_store(place: Place) -> WorldTimeoutError:
    return WorldTimeoutError(
        f"init: all {place.world_size} ranks must {place.task} within {place.timeout_s:g} s, "
        f"rank {place.rank} did not see rank 0 any more; did it end?"
    )


def _clear_frames(error: BaseException) -> None:
    """Let go of the store of a failed try: its server ends, though the caller may keep the error."""
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__


def _store_log(group: ProcessGroup) -> StoreLog:
    """Return a log in the group's own part of the store of its rendezvous."""
    store = dist.distributed_c10d._world.pg_map[group][1]
    return StoreLog(cast("Any", store), address_of(store))  # torch's stubs lack clone and append


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


def _open_store(place: Place, path: str) -> Store:
    """Open the file that the launcher of this machine has named for its ranks."""
    try:
        return FolderStore(path, place.timeout_s)
    except RuntimeError as error:
        raise WorldTimeoutError(
            f"init: rank {place.rank} of {place.world_size} could not open {path}, the store of its "
            f"launcher; does the launcher run? ({str(error).splitlines()[0]})"
        ) from error


def _reach_store(place: Place, host: str, port: int, serves: bool) -> Store:
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
        place.world_size,
        is_master=serves,
        timeout=timedelta(seconds=place.timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
    )
    try:
        if not serves:
            _wait_for_server(host, port, len(addresses), place.deadline)
        store = _made_in_time(make, place.deadline)
        return SignedStore(store) if run_token() else store
    except (dist.DistNetworkError, dist.DistStoreError, OSError, ValueError) as error:
        verb = "serve" if serves else "reach"
        raise WorldTimeoutError(
            f"init: rank {place.rank} of {place.world_size} could not {verb} MASTER_ADDR={host} "
            f"MASTER_PORT={port} within {place.timeout_s:g} s; is rank 0 running there, and is the "
            f"port free and open? ({str(error).splitlines()[0]})"
        ) from error


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
