"""The rendezvous of a world of processes: ranks meet in a store, connect, and leave at the end.

Rank 0 gives each of its tries a random name. Every rank that reads the name leaves a note under
this name. Once all notes are there, rank 0 publishes them, and a rank connects if its note is among
them. So the note of a rank that died or gave up does not count in later tries, however often each
rank has tried.
"""

from __future__ import annotations

import atexit
import json
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from accel_fn.core.primitives import current_world, device_backend, nccl_of
from accel_fn.core.signed import run_token
from accel_fn.core.state import Watchdog
from accel_fn.core.warn import LIBRARIES
from accel_fn.errors import WorldError, WorldTimeoutError
from accel_fn.parallel.stores import FolderStore, SignedStore, address_of
from accel_fn.parallel.watchdog import StoreLog, StoreWatchdog, ending_error

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

T = TypeVar("T")

_LEADER = "accel_fn/leader"
_POLL_S, _POLLS_PER_S = 0.01, 2000
"""One process serves the store to all ranks: the larger the world, the less often each rank polls."""
_SETTLE_S, _TRY_AGAIN_S, _ANSWER_S, _LINGER_S = 0.05, 0.1, 1.0, 1.0
_NCCL_AFTER_WATCHDOG_S = 60.0


@dataclass(frozen=True, slots=True)
class Launch:
    """The place of one process in its world, from the variables of a launcher or a cluster."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    port: int
    serves: bool
    """Whether this process serves the store. Otherwise, rank 0 or the launcher's agent serves it."""
    store_file: str | None = None
    """The file of the store of a launch on this machine; None if ranks meet at the address."""


@dataclass(frozen=True, slots=True)
class JoiningRank:
    """A process that joins a world, and its time-outs."""

    rank: int
    world_size: int
    timeout_s: float
    deadline: float
    """The time to give up, on the monotonic clock."""
    task: str
    """The action that all ranks must take in time, for the text of errors."""


def join_world(
    launch: Launch, backend: str, timeout_s: float, mesh: Mapping[str, int]
) -> tuple[ProcessGroup, StoreWatchdog]:
    """Join the world of all processes that call this; return its group and this rank's watchdog.

    The processes meet in the file, if there is one, else at the address. A process that is in a
    world already gets a second group through that world.
    """
    in_world, file = current_world(), launch.store_file
    if in_world not in (None, (launch.rank, launch.world_size)):
        raise WorldError(
            f"init: RANK={launch.rank} WORLD_SIZE={launch.world_size} must agree with the world that this "
            f"process is in, got rank {in_world[0]} of {in_world[1]}"
        )
    me = JoiningRank(
        rank=launch.rank,
        world_size=launch.world_size,
        timeout_s=timeout_s,
        deadline=time.monotonic() + timeout_s,
        task="call it again" if in_world else f"come to {file or f'{launch.host}:{launch.port}'}",
    )
    store: Store | None = None
    try:
        if in_world:
            store = _store_of(dist.distributed_c10d._get_default_group())
        elif file is not None:
            store = _open_store(me, file)
        else:
            store = _reach_store(me, launch.host, launch.port, launch.serves)
        num_groups = dist.distributed_c10d._world.group_count
        group, watchdog = meet(store, me, num_groups, partial(_make_group, backend, me, mesh))
    except BaseException as error:
        # The server ends once no reference to its store is left. The frames of the error hold
        # references, and the caller may keep the error. So clear these frames.
        store = None
        chain: BaseException | None = error
        while chain is not None:
            traceback.clear_frames(chain.__traceback__)
            chain = chain.__cause__ or chain.__context__
        raise
    # Keep the store until this process ends, since peers may still use it.
    atexit.register(_keep, store)
    watchdog.start()
    return group, watchdog


def meet(store: Store, me: JoiningRank, num_groups: int, make: Callable[[Store, int], T]) -> T:
    """Wait until all ranks have joined; return the group that `make` returns.

    `make` gets a store for this world only, and the largest `num_groups` of all ranks.
    """
    note = json.dumps([uuid.uuid4().hex, num_groups])
    try:
        world, notes = (_lead if me.rank == 0 else _follow)(store, me, note)
    except dist.DistNetworkError as error:
        problem = f"rank {me.rank} did not see rank 0 any more; did it end?"
        raise _late(me, problem) from error
    tried = [f"{world}/tried/{rank}" for rank in range(me.world_size)]
    try:
        made = make(PrefixStore(world, store), max(json.loads(each)[1] for each in notes))
    except Exception as error:
        if not _may_be_of_a_peer(error):
            raise
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        problem = f"rank {me.rank} could not ({reason})"
        with suppress(dist.DistError):
            store.set(tried[me.rank], "")
            with suppress(dist.DistStoreError):
                # Wait briefly for the keys of the other ranks: ranks that run fail at about the
                # same time, and then set their keys. Ranks without a key have ended.
                store.wait(tried, timedelta(seconds=_LINGER_S))
            absent = [rank for rank, key in enumerate(tried) if not store.check([key])]
            if absent:
                problem = f"{_named(absent)} did not answer ({reason} on rank {me.rank})"
        raise WorldTimeoutError(
            f"init: all {me.world_size} ranks must connect to each other within {me.timeout_s:g} s, "
            f"but {problem}; do all of them run, and can they reach each other?"
        ) from error
    with suppress(dist.DistError):
        store.set(tried[me.rank], "")
    return made


def _lead(store: Store, me: JoiningRank, note: str) -> tuple[str, list[str]]:
    """Name a try and wait for the notes of all ranks; return the name of the try, and the notes."""
    world = f"accel_fn/world/{uuid.uuid4().hex}"
    keys = [f"{world}/note/{rank}" for rank in range(me.world_size)]
    store.set(keys[0], note)
    store.set(_LEADER, world)
    late = None
    try:
        store.wait(keys, timedelta(seconds=max(me.deadline - time.monotonic(), 0.001)))
        notes = [each.decode() for each in store.multi_get(keys)]
    except dist.DistStoreError as error:
        late = error
    if store.get(_LEADER).decode() != world:
        raise _displaced(me) from late
    if late is None:
        store.set(f"{world}/begin", json.dumps(["", notes]))
        return world, notes
    present = {rank: store.get(key).decode() for rank, key in enumerate(keys) if store.check([key])}
    absent = [rank for rank in range(me.world_size) if rank not in present]
    failure = _not_seen(me, absent or range(1, me.world_size))
    # Let waiting peers read the error, since the store may end with this process.
    store.set(f"{world}/begin", json.dumps([str(failure), [*present.values()]]))
    with suppress(dist.DistError):
        read = [f"{world}/read/{rank}" for rank in present if rank]
        store.wait(read, timedelta(seconds=_LINGER_S))
    raise failure from late


def _follow(store: Store, me: JoiningRank, note: str) -> tuple[str, list[str]]:
    """Leave a note in each try of rank 0, until a try that has the note begins.

    Return the name of that try, and the notes of all ranks.
    """
    world, pause_s = "", max(_POLL_S, me.world_size / _POLLS_PER_S)
    try:
        while time.monotonic() < me.deadline:
            leader = store.get(_LEADER).decode() if store.check([_LEADER]) else ""
            if leader != world:
                world = leader
                store.set(f"{world}/note/{me.rank}", note)
            if world and store.check([f"{world}/begin"]):
                problem, notes = json.loads(store.get(f"{world}/begin"))
                if note in notes and problem:
                    store.set(f"{world}/read/{me.rank}", "")
                    raise WorldTimeoutError(problem)
                if note in notes:
                    return world, notes
            time.sleep(pause_s)
        raise _late_follower(store, me, note, world)
    except BaseException:
        # Ignore a lost connection: if rank 0 has ended the store, the note is gone with the store.
        with suppress(dist.DistNetworkError):
            if world and store.get(f"{world}/note/{me.rank}").decode() == note:
                store.delete_key(f"{world}/note/{me.rank}")
        raise


def _late_follower(store: Store, me: JoiningRank, note: str, world: str) -> WorldTimeoutError:
    if world and store.get(f"{world}/note/{me.rank}").decode() != note:
        return _displaced(me)
    # Rank 0 has not joined yet. Or it has begun a try without this rank, and not named another one.
    if not world or store.check([f"{world}/begin"]):
        return _not_seen(me, [0])
    ranks = range(me.world_size)
    absent = [rank for rank in ranks if not store.check([f"{world}/note/{rank}"])]
    return _not_seen(me, absent or [0])


def _not_seen(me: JoiningRank, absent: Sequence[int]) -> WorldTimeoutError:
    problem = f"rank {me.rank} did not see {_named(absent)}"
    return _late(me, f"{problem}; is WORLD_SIZE right, and did they start?")


def _displaced(me: JoiningRank) -> WorldTimeoutError:
    return _late(me, f"another process came as rank {me.rank}; is RANK another one on each?")


def _late(me: JoiningRank, problem: str) -> WorldTimeoutError:
    rule = f"all {me.world_size} ranks must {me.task} within {me.timeout_s:g} s"
    return WorldTimeoutError(f"init: {rule}, {problem}")


def _may_be_of_a_peer(failure: Exception) -> bool:
    """Return whether a lost or slow rank may be the cause of an error.

    Gloo raises a bare RuntimeError, so look at the text.
    """
    text = str(failure)
    return (
        isinstance(failure, dist.DistError) or "connectFullMesh" in text or "Wait timeout" in text
    )


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _make_group(
    backend: str, me: JoiningRank, mesh: Mapping[str, int], store: Store, num_groups: int
) -> tuple[ProcessGroup, StoreWatchdog]:
    timeout = timedelta(seconds=me.timeout_s)
    # torch names groups by this count. A failed try may have increased the count on this rank only,
    # so set the same count on all ranks.
    dist.distributed_c10d._world.group_count = num_groups
    if dist.is_initialized():
        group: ProcessGroup | None = dist.new_group(backend=backend, timeout=timeout)
    else:
        dist.init_process_group(
            backend, store=store, rank=me.rank, world_size=me.world_size, timeout=timeout
        )
        group = dist.group.WORLD
    assert group is not None
    try:
        return group, _watchdog(group, me, mesh)
    except BaseException:
        leave_world(group, None)
        raise


def _watchdog(group: ProcessGroup, me: JoiningRank, mesh: Mapping[str, int]) -> StoreWatchdog:
    nccl = nccl_of(group)
    if nccl is not None:
        # NCCL ends a process without a report, so its time-out must be later than the watchdog's.
        nccl._set_default_timeout(timedelta(seconds=me.timeout_s + _NCCL_AFTER_WATCHDOG_S))
    store = _store_of(group)
    return StoreWatchdog(
        # `Any`, since torch's stubs lack `clone` and `append`.
        StoreLog(cast("Any", store), address_of(store)),
        rank=me.rank,
        world_size=me.world_size,
        timeout_s=me.timeout_s,
        libraries=LIBRARIES,
        times_steps=device_backend(group) is not None,
        mesh=mesh,
    )


def _store_of(group: ProcessGroup) -> Store:
    """Return the part of the rendezvous's store that a group uses."""
    store: Store = dist.distributed_c10d._world.pg_map[group][1]
    return store


def leave_world(group: ProcessGroup, watchdog: Watchdog | None) -> None:
    """Leave a group; leaving a process's first group leaves all groups. A second call is a no-op.

    Gloo's threads may hold the tensors of the last collectives for a moment, and need the
    interpreter to release them. A thread that does so after Python has ended aborts the process. So
    sleep: meanwhile the threads get the interpreter.
    """
    if watchdog is not None:
        watchdog.stop()
    if dist.is_initialized() and (
        group is dist.group.WORLD or group in dist.distributed_c10d._world.pg_map
    ):
        fails = ending_error() is not None or (watchdog is not None and watchdog.has_lost_rank)
        if fails and device_backend(group) is not None:
            # Abort the group: destroying it would wait for queued kernels, whose peers may never
            # run them.
            dist.distributed_c10d._abort_process_group(group)
        else:
            dist.destroy_process_group(group)
        time.sleep(_SETTLE_S)


def _open_store(me: JoiningRank, path: str) -> Store:
    """Open the file that the launcher of this machine has named for its ranks."""
    try:
        return FolderStore(path, me.timeout_s)
    except RuntimeError as error:
        raise WorldTimeoutError(
            f"init: rank {me.rank} of {me.world_size} could not open {path}, the store of its "
            f"launcher; does the launcher run? ({str(error).splitlines()[0]})"
        ) from error


def _reach_store(me: JoiningRank, host: str, port: int, serves: bool) -> Store:
    """Serve the key-value store at `host:port`, or connect to it if another process does."""
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
        me.world_size,
        is_master=serves,
        timeout=timedelta(seconds=me.timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
    )
    try:
        if not serves:
            _wait_for_server(host, port, len(addresses), me.deadline)
        store = _made_in_time(make, me.deadline)
        return SignedStore(store) if run_token() else store
    except (dist.DistNetworkError, dist.DistStoreError, OSError, ValueError) as error:
        verb = "serve" if serves else "reach"
        raise WorldTimeoutError(
            f"init: rank {me.rank} of {me.world_size} could not {verb} MASTER_ADDR={host} "
            f"MASTER_PORT={port} within {me.timeout_s:g} s; is rank 0 running there, and is the "
            f"port free and open? ({str(error).splitlines()[0]})"
        ) from error


def _wait_for_server(host: str, port: int, num_addresses: int, deadline: float) -> None:
    """Wait until the server accepts connections, since torch's own tries may outlast the time-out."""
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
    """Make the store in a thread; abandon the thread if the server accepts but never answers."""
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
        # At exit, wait for the thread: if it gave up after Python had ended, it would abort the
        # process.
        atexit.register(thread.join, _ANSWER_S)
        raise WorldTimeoutError(
            str(error) or "connections are accepted, and no store answers"
        ) from error


def _keep(_store: Store) -> None:
    """Do nothing. `atexit` holds the argument, and so keeps the store until the process exits."""
