"""Collectives of tensors and of plain objects over the ranks of a state."""

from __future__ import annotations

import io
import pickle
import struct
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from accel_fn.core.signed import signed, verified
from accel_fn.core.state import DistState
from accel_fn.errors import ArgumentError, StateError, WorldError, message

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def bytes_of(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes, [num_bytes], uint8, in the same memory.

    Set the strides first: a tensor of one element counts as contiguous with any strides, and `view`
    refuses some of them.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def unpickled(data: bytes, device: torch.device) -> Any:
    """Restore a value; its accelerator tensors go to `device`, all other tensors to the host."""
    return _Unpickler(data, device).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, device: torch.device) -> None:
        super().__init__(io.BytesIO(data))
        self._device = str(device)

    def find_class(self, module: str, name: str) -> Any:
        # A pickled tensor holds its storage as bytes, and these name the sender's device. torch
        # would restore the storage there, so every rank would use memory, and a context, on that
        # device.
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return self._storage
        return super().find_class(module, name)

    def _storage(self, data: bytes) -> Any:
        return torch.load(io.BytesIO(data), map_location=self._placed, weights_only=False)

    def _placed(self, storage: Any, location: str) -> Any:
        if location == "cpu":
            return storage
        return torch.serialization.default_restore_location(storage, self._device)  # type: ignore[no-untyped-call]


def check_backend(function: str, backend: str | None) -> None:
    """Refuse a backend that this torch lacks; `backend` may name one for each device type."""
    if backend is None:
        return
    named = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    there = [name for name in named if dist.is_backend_available(name)]
    if not {part.split(":")[-1].lower() for part in str(backend).split(",")} <= {*there}:
        rule = f"be None or of those that this torch has ({', '.join(there)})"
        raise ArgumentError(message(function, "backend", rule, backend))


def default_backend(device: torch.device, backend: str | None) -> str:
    """Return the backend to use, or one for each device type, such as "cpu:gloo,cuda:nccl"."""
    if device.type == "cpu" or (backend is not None and ":" in backend):
        return backend or "gloo"
    if backend is None and not has_backend(device):
        raise WorldError(
            "init: device must be one that has a backend for several ranks, got "
            f"{device.type!r} in a world of several; pass device='cpu', or the backend that has one"
        )
    return f"cpu:gloo,{device.type}:{backend or dist.get_default_backend_for_device(device)}"


def has_backend(device: torch.device) -> bool:
    """Return whether a backend supports such devices. torch names Gloo for MPS, but Gloo cannot use MPS."""
    name = dist.Backend.default_device_backend_map.get(device.type, "")
    return device.type in dist.Backend.backend_capability.get(name, ())


def device_backend(group: ProcessGroup) -> Any:
    """Return the backend of a group's collectives on accelerators; None if Gloo runs all collectives."""
    devices = [each for each in group._device_types if each.type != "cpu"]
    backends = [group._get_backend(each) for each in devices]
    own = next((each for each in backends if each.name() != dist.Backend.GLOO), None)
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch wraps the backend. Return the backend inside.
    return getattr(own, "wrapped_pg", own)


def nccl_of(group: ProcessGroup) -> Any:
    """Return the NCCL backend of a group; None if no device uses it."""
    backend = device_backend(group)
    return backend if backend is not None and backend.name() == dist.Backend.NCCL else None


def num_collectives(group: ProcessGroup) -> int | None:
    """Count a group's collectives over its backends; None if one, such as MPI, does not count."""
    backends: list[Any] = [group._get_backend(device) for device in group._device_types]
    try:
        return sum(int(each._get_sequence_number_for_group()) for each in backends)
    except RuntimeError:
        return None


def current_world() -> tuple[int, int] | None:
    """Return rank and world size if this process is in a world already."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None


Work = dist.Work

_NUMBERS_BYTES, _NAME_BYTES = 40, 24
"""The sizes of the two parts of a head, a message of `_Heads`: up to five numbers, and the name of
the collective. There may be more numbers if all ranks send equally many."""
_UNWATCHED = nullcontext()


class _Calls(threading.local):
    number = 0


_calls = _Calls()


def num_calls() -> int:
    """Count the collectives that this thread has begun, except those that move shards."""
    return _calls.number


def group_of(state: DistState, function: str) -> ProcessGroup:
    """Return the process group of a state's ranks: all ranks, or the ranks along an axis."""
    group = state.group
    if group is None:
        raise StateError(
            f"{function}: state must carry a process group for {state.world_size} ranks, "
            "got one built by hand or unpickled; take it from af.init()"
        )
    check_joined(state, function)
    return group


def check_joined(state: DistState, function: str) -> None:
    """Refuse a state whose process group was destroyed."""
    if state.watchdog is not None and state.group not in dist.distributed_c10d._world.pg_map:
        raise StateError(
            f"{function}: state must be of a world that is not over, got one whose group was left; a "
            "state is of use until the end of af.distributed(), or of the process after af.init()"
        )


def waiting(
    state: DistState, function: str, leaves: Sequence[Any] = (), *, counts: bool = True
) -> AbstractContextManager[None]:
    """Record the start of a collective in the watchdog, if any. The caller waits in the context."""
    _calls.number += counts
    watchdog = state.watchdog
    if watchdog is None:
        return _UNWATCHED
    return watchdog.enter(function, leaves, counts=counts, axis=state.axis)


class Pending:
    """A pending sum; after `wait`, its tensor holds the result."""

    __slots__ = ("_waiting", "_work")

    def __init__(self, work: Work, waiting: AbstractContextManager[None]) -> None:
        self._work = work
        self._waiting = waiting

    def wait(self) -> None:
        """Return after every rank has sent its part."""
        with self._waiting:
            self._work.wait()


class PendingTotal:
    """A pending sum of a few numbers of each rank, gathered together with the collective's name."""

    __slots__ = ("_heads", "_totals", "_waiting", "ranks")

    def __init__(
        self, totals: Tensor, heads: _Heads, waiting: AbstractContextManager[None]
    ) -> None:
        # `wait` fills in the numbers of each rank.
        self.ranks = np.zeros((0, 0))
        self._totals = totals
        self._heads = heads
        self._waiting = waiting

    def wait(self) -> None:
        """Return after every rank has sent its part."""
        with self._waiting:
            self._heads.wait()
        totals = self._totals.view(-1)
        self.ranks = self._heads.numbers("f8")[:, : len(totals)]
        totals.copy_(torch.from_numpy(self.ranks.sum(0)))


def start_sum(tensor: Tensor, state: DistState, function: str) -> Pending:
    """Start to sum `tensor`, in place; its shape and dtype must be equal on all ranks."""
    wait = waiting(state, function, [tensor])
    return Pending(group_of(state, function).allreduce([tensor]), wait)


def start_sums(tensors: Sequence[Tensor], state: DistState, function: str) -> Pending:
    """Start to sum tensors of one dtype, in place; their shapes must be equal on all ranks."""
    wait = waiting(state, function, tensors)
    return Pending(group_of(state, function).allreduce_coalesced([*tensors]), wait)


def start_total(
    numbers: Tensor, state: DistState, function: str, what: str | None = None
) -> Pending | PendingTotal:
    """Start to sum a few numbers, in place, without comparing shapes first.

    A rank may be in another collective by mistake. Gloo matches collectives of one kind only by
    their order, and DDP all-reduces too. So an all-reduce on the host could add a gradient to a
    loss. This function gathers numbers instead, each with a name that must be equal on all ranks.

    Args:
        numbers: up to five, or more if all ranks have the same number of them, of any floating
            dtype.
        state: this rank's state.
        function: the name of the public function, for errors and hang reports.
        what: the quantity and its step, such as "losses 12"; only the first 24 bytes are compared.

    Returns:
        The pending sum. Its `wait` raises a WorldError on all ranks if `what` differs.
    """
    if numbers.device.type != "cpu":
        return start_sum(numbers, state, function)
    wait = waiting(state, function, [numbers])
    packed = struct.pack(f"{numbers.numel()}d", *numbers.view(-1).tolist())
    heads = _Heads(packed, what or f"sum of {function}", state, function)
    return PendingTotal(numbers, heads, wait)


def all_gather(tensor: Tensor, state: DistState, function: str) -> list[Tensor]:
    """Gather every rank's `tensor`; its shape and dtype must be equal on all ranks."""
    with waiting(state, function, [tensor]):
        return _all_gather(tensor, state, function)


def _all_gather(tensor: Tensor, state: DistState, function: str) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(state.world_size)]
    group_of(state, function).allgather([parts], [tensor]).wait()
    return parts


def gather(tensor: Tensor, parts: list[Tensor], state: DistState, rank: int, function: str) -> None:
    """Fill `parts` on one rank with every rank's `tensor`; on other ranks, `parts` is empty.

    The tensor's shape and dtype must be equal on all ranks.
    """
    options = dist.GatherOptions()
    options.rootRank = rank
    with waiting(state, function, [tensor]):
        group_of(state, function).gather([parts] if parts else [], [tensor], options).wait()


def gather_shards(whole: Tensor, shard: Tensor, group: ProcessGroup, is_async: bool) -> Work | None:
    """Fill `whole` with every rank's `shard`, in rank order."""
    # The second name is for torch before 2.13.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: Work | None = gather(whole, shard, group, is_async)
    return work


def reduce_to_shards(
    shard: Tensor, whole: Tensor, group: ProcessGroup, op: Any, is_async: bool
) -> Work | None:
    """Reduce all ranks' `whole`, and fill `shard` with this rank's part of the result."""
    if whole.is_complex():
        # NCCL sums real numbers only, so view complex numbers as pairs of real ones.
        shard, whole = torch.view_as_real(shard), torch.view_as_real(whole)
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: Work | None = reduce(shard, whole, op, group, is_async)
    return work


def sum_over(tensor: Tensor, group: ProcessGroup) -> None:
    """Sum `tensor` over a group, in place."""
    group.allreduce([tensor]).wait()


def gather_numbers(number: Tensor, group: ProcessGroup) -> Tensor:
    """Gather every rank's 0-dim tensor, in the order of the group's ranks."""
    parts = [torch.empty_like(number) for _ in range(group.size())]
    if len(parts) == 1:
        return number.reshape(1)
    group.allgather([parts], [number]).wait()
    return torch.stack(parts)


def all_to_all(tensor: Tensor, state: DistState, function: str) -> Tensor:
    """Send each rank one of the equal parts of `tensor`; return the received parts, by rank.

    The tensor's shape and dtype must be equal on all ranks.
    """
    received = torch.empty_like(tensor)
    with waiting(state, function, [tensor]):
        group_of(state, function).alltoall_base(received, tensor, [], []).wait()
    return received


def broadcast(tensor: Tensor, state: DistState, source: int, function: str) -> None:
    """Overwrite `tensor` with rank `source`'s; its shape and dtype must be equal on all ranks."""
    options = dist.BroadcastOptions()
    options.rootRank = source
    sent = tensor.contiguous()
    # Send bytes: no backend supports every dtype.
    data = bytes_of(sent)
    with waiting(state, function, [tensor]):
        group_of(state, function).broadcast([data], options).wait()
    if sent is not tensor:
        tensor.copy_(sent)


def send(tensor: Tensor, state: DistState, rank: int, tag: int, function: str) -> Work:
    """Start to send a host `tensor` to `rank`. The caller must keep the tensor until the work is done."""
    return group_of(state, function).send([tensor], rank, tag)


def receive(tensor: Tensor, state: DistState, source: int, tag: int, function: str) -> None:
    """Overwrite a host `tensor` with the next one that `source` sent under this tag."""
    with waiting(state, function, [tensor], counts=False):
        group_of(state, function).recv([tensor], source, tag).wait()


def exchange(value: Any, state: DistState, function: str, leaves: Sequence[Any] = ()) -> list[Any]:
    """Return every rank's picklable `value`, by rank; raise on all if one is in another collective.

    `function` is the public function's name, equal on every rank. Hang reports show the shapes of
    `leaves`.

    Cost: two small collectives on the host.
    """
    if state.world_size == 1:
        return [value]
    data = torch.frombuffer(bytearray(signed(pickle.dumps(value))), dtype=torch.uint8)
    with waiting(state, function, leaves):
        heads = _Heads(struct.pack("q", len(data)), function, state, function)
        heads.wait()
        sizes = heads.numbers("i8")[:, 0].tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = data
        parts = _all_gather(padded, state, function)
    return [
        unpickled(verified(part[:size].numpy().tobytes(), function), state.device)
        for part, size in zip(parts, sizes, strict=True)
    ]


def exchange_number(number: int, state: DistState, function: str) -> list[int]:
    """Return every rank's integer, in rank order; raise on all if one is in another collective.

    Cost: one small collective on the host.
    """
    with waiting(state, function):
        heads = _Heads(struct.pack("q", number), f"number of {function}", state, function)
        heads.wait()
    found: list[int] = heads.numbers("i8")[:, 0].tolist()
    return found


class _Heads:
    """Exchanges a few numbers of every rank; all ranks raise if the collectives' names differ."""

    __slots__ = ("_function", "_received", "_state", "_work")

    def __init__(self, numbers: bytes, what: str, state: DistState, function: str) -> None:
        name = what.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        # All-to-all takes a third less CPU time than Gloo's all-gather between two ranks on one
        # host.
        head = bytearray((numbers.ljust(_NUMBERS_BYTES, b"\0") + name) * state.world_size)
        data = torch.frombuffer(head, dtype=torch.uint8)
        self._received = torch.empty_like(data)
        self._state = state
        self._function = function
        self._work = group_of(state, function).alltoall_base(self._received, data, [], [])

    def wait(self) -> None:
        self._work.wait()

    def numbers(self, kind: str) -> np.ndarray[Any, Any]:
        """Return the numbers of each rank, [ranks, numbers]; raise if the names differ.

        This method has no loop in Python: with thousands of ranks, a loop would take longer than a
        small step.
        """
        heads = self._received.numpy().reshape(self._state.world_size, -1)
        names = heads[:, -_NAME_BYTES:]
        others = (names != names[self._state.rank]).any(1)
        if others.any():
            rank = int(others.argmax())
            other, own = (
                names[each].tobytes().rstrip(b"\0").decode() for each in (rank, self._state.rank)
            )
            along = f" along {self._state.axis}" if self._state.axis else ""
            raise WorldError(
                f"{self._function}: every rank{along} must be in the same collective, got {other} on rank "
                f"{rank} and {own} on rank {self._state.rank}"
            )
        return np.ascontiguousarray(heads[:, :-_NAME_BYTES]).view(kind)
