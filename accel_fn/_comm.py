"""Groups and the few collectives that everything else is made of: the one user of torch.distributed."""

from __future__ import annotations

import atexit
import pickle
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from accel_fn._errors import StateError, WorldError, WorldTimeoutError
from accel_fn._state import DistState

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

Work = dist.Work


_SETTLE_S = 0.05


def group_of(state: DistState, function: str) -> ProcessGroup:
    """The group that a state of several ranks communicates through."""
    if state.group is None:
        raise StateError(
            f"{function}: state must carry a process group to talk to {state.world_size} ranks, "
            "got one built by hand or unpickled; take it from af.init()"
        )
    return state.group


def start_sum(tensor: Tensor, state: DistState, function: str) -> Work:
    """Start to sum `tensor` over the ranks, in place; wait for it before use."""
    return group_of(state, function).allreduce([tensor])


def all_gather(tensor: Tensor, state: DistState, function: str) -> list[Tensor]:
    """Every rank's `tensor`; shapes and dtypes must be known to be equal."""
    parts = [torch.empty_like(tensor) for _ in range(state.world_size)]
    group_of(state, function).allgather([parts], [tensor]).wait()
    return parts


def broadcast(tensor: Tensor, state: DistState, source: int, function: str) -> None:
    """Overwrite `tensor` with rank `source`'s; shapes and dtypes must be known to be equal."""
    options = dist.BroadcastOptions()
    options.rootRank = source
    group_of(state, function).broadcast([tensor], options).wait()


def send(tensor: Tensor, state: DistState, rank: int, tag: int, function: str) -> Work:
    """Start to send a host `tensor` to `rank`; keep it until the work is done."""
    return group_of(state, function).send([tensor], rank, tag)


def receive(tensor: Tensor, state: DistState, source: int, tag: int, function: str) -> None:
    """Overwrite a host `tensor` with what `source` sent under this tag, in the order sent."""
    group_of(state, function).recv([tensor], source, tag).wait()


def exchange(value: Any, state: DistState, function: str) -> list[Any]:
    """Every rank's picklable `value`, in rank order. Cost: two small collectives on the host."""
    if state.world_size == 1:
        return [value]
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [int(size) for size in all_gather(torch.tensor([len(data)]), state, function)]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = data
    parts = all_gather(padded, state, function)
    return [
        pickle.loads(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)
    ]


def default_backend(device: torch.device, backend: str | None) -> str:
    """Backends by device: one for `device`, and Gloo beside it for what the host has to say."""
    if device.type == "cpu" or (backend is not None and ":" in backend):
        return backend or "gloo"
    return f"cpu:gloo,{device.type}:{backend or dist.get_default_backend_for_device(device)}"


def has_backend(device: torch.device) -> bool:
    """Can processes on such devices talk to each other?"""
    return device.type in dist.Backend.default_device_backend_map


def current_world() -> tuple[int, int] | None:
    """Rank and world size of the world that this process is in already, if any."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None


def join_world(
    *,
    rank: int,
    world_size: int,
    host: str,
    port: int,
    serves: bool,
    backend: str,
    timeout_s: float,
) -> ProcessGroup:
    """The group of a world of processes that all call this, each as its own rank.

    A process that is in a world already gets a second group over it.
    """
    timeout = timedelta(seconds=timeout_s)
    if dist.is_initialized():
        _check_world(rank, world_size)
        second: ProcessGroup = dist.new_group(backend=backend, timeout=timeout)
        return second
    deadline = time.monotonic() + timeout_s
    store = _reach_store(rank, world_size, host, port, serves, timeout_s)
    store = _wait_for_all(store, rank, world_size, f"{host}:{port}", timeout_s, deadline)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    return group


def leave_world(group: ProcessGroup) -> None:
    """Leave a group; leaving the first of a process leaves all. Harmless when left already.

    Gloo's threads may still hold the tensors of the last collectives for an
    instant, and need the interpreter to let go of them: one that is late
    aborts the process when Python is gone. Sleeping gives them both.
    """
    if dist.is_initialized() and (
        group is dist.group.WORLD or group in dist.distributed_c10d._world.pg_map
    ):
        dist.destroy_process_group(group)
        time.sleep(_SETTLE_S)


def _check_world(rank: int, world_size: int) -> None:
    if current_world() != (rank, world_size):
        raise WorldError(
            f"init: RANK={rank} WORLD_SIZE={world_size} must agree with the world that this process "
            f"is in, got rank {dist.get_rank()} of {dist.get_world_size()}"
        )


def _reach_store(
    rank: int, world_size: int, host: str, port: int, serves: bool, timeout_s: float
) -> Store:
    """The key-value store at `host:port`: served by rank 0, or by the launcher's agent."""
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        raise WorldError(
            f"init: MASTER_ADDR must be a host that resolves, got {host!r} ({error})"
        ) from error
    try:
        store = TCPStore(
            host,
            port,
            world_size,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (dist.DistNetworkError, dist.DistStoreError, TimeoutError, ValueError) as error:
        what = "serve" if serves else "reach"
        raise WorldTimeoutError(
            f"init: rank {rank} of {world_size} could not {what} MASTER_ADDR={host} MASTER_PORT={port} "
            f"within {timeout_s:g} s; is rank 0 running there, and is the port free and open? "
            f"({str(error).splitlines()[0]})"
        ) from error
    atexit.register(_keep, store)  # peers may still be talking to it: it ends with this process
    return store


def _keep(_store: Store) -> None:
    """Hold what it is registered with until the process exits."""


def _wait_for_all(
    store: Store, rank: int, world_size: int, address: str, timeout_s: float, deadline: float
) -> Store:
    """A store of this world's own, once every rank has come to it."""
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
