"""simulate: run ranks as threads of one process, over real collectives.

This module uses private names of torch; tests/core/test_torch_internals.py fails when one of them
changes.
"""

from __future__ import annotations

import atexit
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from accel_fn.core.mesh_axes import mesh_shape, ranks_along
from accel_fn.core.state import Axis, DistState
from accel_fn.errors import ArgumentError, ArgumentTypeError, check_count, check_positive, message
from accel_fn.parallel.groups import (
    close_group,
    make_axes,
    make_group,
    num_connections,
    release_group,
)
from accel_fn.testing.seed_turns import rank_of

T = TypeVar("T")

_POLL_S, _GRACE_S, _SETTLE_S, _END_WITHIN_S = 0.05, 1.0, 0.1, 5.0
_RELEASE_S = 0.1
"""The longest time that a Gloo thread may take to release a tensor after its collective."""
_MAX_LOST_SOCKETS = 256
"""The most sockets of failed worlds that may stay open: the limit of open files is often 1024."""
_MAX_IDLE_SOCKETS, _UNUSED_S = 384, 1.0
"""The most sockets of worlds that wait for the next simulation, and the time for which a world
must have been unused before its release: a busy machine may stop a Gloo thread for a while."""


_Key = tuple[int, float, tuple[tuple[str, int], ...]]
"""The number of ranks of a world, the time-out of its collectives, and the shape of its mesh."""


@dataclass(frozen=True, slots=True)
class _World:
    """The process groups of a world: each rank's group of all ranks, and its groups along mesh axes."""

    key: _Key
    groups: list[ProcessGroup | None]
    axes: list[tuple[Axis, ...]]

    def called_equally_many(self) -> bool:
        """Return whether, in each group, all ranks have called the same number of collectives."""
        every: dict[tuple[str, tuple[int, ...]], set[int]] = {}
        for rank, group in enumerate(self.groups):
            every.setdefault(("", ()), set()).add(_num_collectives(group))
            for axis in self.axes[rank]:
                ranks = ranks_along(dict(self.key[2]), axis.name, rank)
                every.setdefault((axis.name, tuple(ranks)), set()).add(_num_collectives(axis.group))
        return all(len(counts) == 1 for counts in every.values())

    def num_sockets(self) -> int:
        return sum(num_connections(group) for group in self.groups if group is not None)

    def release(self) -> None:
        """Release the groups of all ranks; no collective may be running in them."""
        self.axes.clear()
        while self.groups:
            if (group := self.groups.pop()) is not None:
                release_group(group)


def _num_collectives(group: ProcessGroup | None) -> int:
    return 0 if group is None else int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


class _IdleWorlds:
    """Worlds that wait for the next simulation, since making a world costs more than using it."""

    def __init__(self) -> None:
        self._worlds: list[tuple[float, _World]] = []
        """The worlds, each with the monotonic time at which its last simulation ended, oldest
        first."""
        self._lock = threading.Lock()
        self._newest_s = -math.inf

    def take(self, key: _Key) -> _World:
        with self._lock:
            self._release_oldest()
            for place in reversed(range(len(self._worlds))):
                if self._worlds[place][1].key == key:
                    return self._worlds.pop(place)[1]
        _lost.join_oldest(_MAX_LOST_SOCKETS)
        return _make_world(key)

    def give(self, world: _World) -> None:
        with self._lock:
            self._newest_s = time.monotonic()
            self._worlds.append((self._newest_s, world))

    def rest(self) -> None:
        """Wait, at exit, until Gloo's threads have released all tensors.

        A release after Python's end would abort the process.
        """
        _sleep_until(self._newest_s + _RELEASE_S)

    def _release_oldest(self) -> None:
        """Release the oldest worlds until the others hold at most `_MAX_IDLE_SOCKETS`."""
        num_sockets = sum(world.num_sockets() for _, world in self._worlds)
        while num_sockets > _MAX_IDLE_SOCKETS:
            ended_s, world = self._worlds.pop(0)
            num_sockets -= world.num_sockets()
            _sleep_until(ended_s + _UNUSED_S)
            world.release()


class _LostThreads:
    """The threads of failed simulations: one per rank, and one to recover or release the world."""

    def __init__(self) -> None:
        self._ranks: list[list[threading.Thread]] = []
        self._lock = threading.Lock()

    def add(self, threads: list[threading.Thread]) -> None:
        with self._lock:
            self._ranks.append(threads)

    def join_oldest(self, num_sockets: int = 0) -> None:
        """Join the oldest threads until the rest hold at most `num_sockets`.

        At exit, all threads are joined: a thread that returns after Python's end aborts the
        process.
        """
        with self._lock:
            waiting = [each for each in self._ranks if any(map(threading.Thread.is_alive, each))]
            first = len(waiting)
            while first and sum(len(ranks) ** 2 for ranks in waiting[first - 1 :]) <= num_sockets:
                first -= 1
            self._ranks = waiting[first:]
        for threads in waiting[:first]:
            _join(threads, _END_WITHIN_S)


_exiting = threading.Event()
_lost = _LostThreads()
# Exit handlers run in reverse order. So `_exiting` is set before `join_oldest` waits for recovering
# threads, which then stop waiting themselves.
atexit.register(_lost.join_oldest)
atexit.register(_exiting.set)
_idle = _IdleWorlds()
atexit.register(_idle.rest)


def _make_world(key: _Key) -> _World:
    world_size, timeout_s, shape = key
    world = _World(key, [None] * world_size, [()] * world_size)
    store = HashStore()

    def join(rank: int) -> None:
        whole = None
        if world_size > 1:
            whole = world.groups[rank] = make_group(store, rank, world_size, timeout_s)
        state = DistState(rank=rank, world_size=world_size, group=whole)
        world.axes[rank] = make_axes(state, dict(shape), join_part)

    def join_part(state: DistState, name: str, ranks: range) -> ProcessGroup | None:
        if state.rank not in ranks:
            return None
        part = PrefixStore(f"{name} {ranks.start}", store)
        place = ranks.index(state.rank)
        return make_group(part, place, len(ranks), timeout_s, part_of=state.group)

    _run_threads([partial(join, rank) for rank in range(world_size)])
    return world


@dataclass(frozen=True, slots=True)
class _Ending:
    """The result of a rank: a value or an error."""

    rank: int
    value: Any = None
    error: BaseException | None = None


def simulate(
    fn: Callable[[DistState], T],
    *,
    world_size: int | None = None,
    timeout_s: float = 10.0,
    seed: int = 0,
    mesh: Mapping[str, int] | None = None,
) -> list[T]:
    """Call `fn(state)` on every rank of a world of threads, over real DDP and real Gloo.

    Every rank has its own `DistState` on the CPU. Ranks share the variables that `fn` closes over:
    give each its own copy of a model (`copy.deepcopy`). They share the generators of the process
    too. After `torch.manual_seed`, only this rank draws until its next collective, so a model that
    it makes there is reproducible. Numbers that it draws later (dropout) need a seed again, or an
    explicit generator.

    Args:
        fn: the function of one rank.
        world_size: number of ranks, >= 1; with `mesh`, default: as many as the mesh has.
        timeout_s: the time-out of collectives.
        seed: the seed of every state, >= 0.
        mesh: as for `init`.

    Returns:
        The results of `fn`, in rank order.

    Raises:
        BaseException: the first error that `fn` raised on any rank, at once, with a note of the
            rank. Collectives that other ranks are in fail a second later, in the background. Python
            waits for them at exit for a few seconds, and so does a later simulation if they are
            many.
        ValueError: an argument is outside its range.
        TypeError: an argument is of the wrong type.

    Cost: about a millisecond a rank and the time of `fn`; groups are reused by
    the next simulation of the same size.

    >>> import accel_fn as af
    >>> from accel_fn.testing import simulate
    >>> simulate(lambda state: af.reduce_sum(state.rank, state), world_size=3)
    [3, 3, 3]
    >>> simulate(lambda state: af.reduce_sum(state.rank, state), mesh={"dp": 2, "tp": 2})
    [2, 4, 2, 4]
    """
    if not callable(fn):
        raise ArgumentTypeError(message("simulate", "fn", "be a function", fn))
    if world_size is None:
        world_size = _num_ranks(mesh)
    check_count("simulate", "world_size", world_size)
    check_positive("simulate", "timeout_s", timeout_s)
    check_count("simulate", "seed", seed, minimum=0)
    shape = {} if mesh is None else mesh_shape("simulate", mesh, world_size)
    world = _idle.take((world_size, timeout_s, tuple(shape.items())))
    start = time.monotonic()
    endings: queue.SimpleQueue[_Ending] = queue.SimpleQueue()

    def run(rank: int) -> None:
        state = DistState(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            seed=seed,
            group=world.groups[rank],
            axes=world.axes[rank],
        )
        try:
            with rank_of(state.group):
                value = fn(state)
            endings.put(_Ending(rank, value=value))
        except BaseException as error:
            endings.put(_Ending(rank, error=error))

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank} of {world_size}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    try:
        results = _results(endings, world_size)
    except BaseException:
        # Give the ranks a moment to end: most errors are raised on all ranks, and if all end, their
        # world can be used again.
        _join(threads, _POLL_S)
        if any(map(threading.Thread.is_alive, threads)) or not _given_back(world, start):
            _recover_later(threads, world, start)
        raise
    for thread in threads:
        thread.join()
    if not _given_back(world, start):
        _recover_later(threads, world, start)
    return results


def _num_ranks(mesh: Mapping[str, int] | None) -> int:
    """Return the number of ranks of a mesh; refuse a mesh in which a size is missing."""
    sizes = mesh.values() if isinstance(mesh, Mapping) else ()
    if not mesh or -1 in sizes:
        rule = "be given, unless mesh has the sizes of all its axes"
        raise ArgumentError(message("simulate", "world_size", rule, None))
    # Leave out invalid sizes here: `mesh_shape` will raise an error about them.
    return math.prod(size for size in sizes if isinstance(size, int) and size > 0)


def _given_back(world: _World, start: float) -> bool:
    """Keep a world for reuse, unless a collective may still run in it; return whether it is kept."""
    _forget_modules()
    # `fn` may have caught the error of a collective that timed out, or that not all ranks called.
    # Such a collective may still run.
    fits = time.monotonic() - start < world.key[1] and world.called_equally_many()
    if fits:
        _idle.give(world)
    return fits


def _forget_modules() -> None:
    """Clear the module that DDP holds for the compiler while a forward runs.

    At the end of a forward, DDP restores the module that it found at the start. If the forwards of
    two ranks overlap, that module is the other rank's, and DDP would keep it alive forever.
    """
    DistributedDataParallel._active_ddp_module = None


def _recover_later(threads: list[threading.Thread], world: _World, start: float) -> None:
    """Keep the world for reuse if its ranks end within `_GRACE_S`; else close and release it."""

    def recover() -> None:
        _join(threads, _GRACE_S)
        has_ended = not any(map(threading.Thread.is_alive, threads))
        if has_ended and _given_back(world, start):
            return
        for each in filter(None, world.groups):
            close_group(each)
        for thread in threads:
            thread.join()
        _forget_modules()
        if not _exiting.wait(_SETTLE_S):
            world.release()

    thread = threading.Thread(target=recover, name="recovery of a world", daemon=True)
    thread.start()
    _lost.add([*threads, thread])


def _results(endings: queue.SimpleQueue[_Ending], world_size: int) -> list[Any]:
    """Return the results of all ranks; raise the first error at once."""
    results: list[Any] = [None] * world_size
    for _ in range(world_size):
        ending = endings.get()
        if ending.error is not None:
            ending.error.add_note(f"on simulated rank {ending.rank} of {world_size}")
            raise ending.error
        results[ending.rank] = ending.value
    return results


def _join(threads: Sequence[threading.Thread], within_s: float) -> None:
    """Join threads, unless the current thread is among them: a rank may call `simulate` itself."""
    deadline = time.monotonic() + within_s
    for thread in threads if threading.current_thread() not in threads else ():
        thread.join(max(deadline - time.monotonic(), 0.0))


def _sleep_until(time_s: float) -> None:
    time.sleep(max(time_s - time.monotonic(), 0.0))


def _run_threads(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
