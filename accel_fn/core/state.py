"""The state that a rank passes from step to step: its place in the world, position and loss scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from accel_fn.core.mesh_axes import AXES, mesh_name, ranks_along
from accel_fn.errors import (
    ArgumentError,
    ArgumentTypeError,
    StateError,
    check_count,
    check_positive,
    message,
)
from accel_fn.names import CALLS

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

_CPU = torch.device("cpu")
_COUNTS = {
    "rank": 0,
    "world_size": 1,
    "local_rank": 0,
    "local_world_size": 1,
    "step": 0,
    "call": 0,
    "seed": 0,
    "samples": 0,
}
"""The integer fields of a state, and their minima."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossScale:
    """The factor that keeps float16 gradients in range, and the rule by which it moves.

    All tensors are 0-dim and on the device of the run, so the host waits for nothing.

    Attributes:
        scale: [], float32. The loss is multiplied by it before its backward.
        good_steps: [], int32. Updates applied since the scale last moved.
        skipped: [], int64. Updates skipped since the start.
        growth_factor: multiplies the scale after `growth_interval` good steps.
        backoff_factor: multiplies it after a non-finite gradient.
        growth_interval: number of good steps in a row before it grows.

    Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2.

    >>> import torch, accel_fn as af
    >>> scaler = af.extend.LossScale.start(1024.0)
    >>> float(scaler.adjust(torch.tensor(False)).scale)
    512.0
    """

    scale: Tensor
    good_steps: Tensor
    skipped: Tensor
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    @classmethod
    def start(
        cls,
        init_scale: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        device: torch.device | str = "cpu",
    ) -> LossScale:
        """Make the scale of a new run.

        Args:
            init_scale: the first scale, finite and > 0.
            growth_factor: > 1.
            backoff_factor: in (0, 1).
            growth_interval: >= 1.
            device: the device of the three tensors.

        Returns:
            A new scale.

        Raises:
            ValueError: an argument is outside its range.
        """
        check_positive("LossScale", "init_scale", init_scale)
        if not check_positive("LossScale", "growth_factor", growth_factor) > 1:
            raise ArgumentError(message("LossScale", "growth_factor", "be > 1", growth_factor))
        if not check_positive("LossScale", "backoff_factor", backoff_factor) < 1:
            raise ArgumentError(message("LossScale", "backoff_factor", "be < 1", backoff_factor))
        check_count("LossScale", "growth_interval", growth_interval)
        return cls(
            scale=torch.full((), init_scale, dtype=torch.float32, device=device),
            good_steps=torch.zeros((), dtype=torch.int32, device=device),
            skipped=torch.zeros((), dtype=torch.int64, device=device),
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
        )

    def adjust(self, ok: Tensor) -> LossScale:
        """Return the scale after one step. Pure.

        It stays finite and > 0.

        Args:
            ok: [], bool, on the scale's device: were all gradients finite?

        Returns:
            A new `LossScale`; this one stays as it is.

        Cost: a few 0-dim operations on the device; no host synchronisation.
        """
        good_steps = self.good_steps + 1
        # On the host, return early in most steps, in which the scale does not change. This saves a
        # dozen operations.
        reads = ok.is_cpu and not torch.compiler.is_compiling()
        if reads and ok and good_steps < self.growth_interval:
            return replace(self, good_steps=good_steps)
        limits = torch.finfo(self.scale.dtype)
        grows = good_steps >= self.growth_interval
        risen = torch.where(grows, self.scale * self.growth_factor, self.scale).clamp(
            max=limits.max
        )
        fallen = (self.scale * self.backoff_factor).clamp(min=limits.tiny)
        return LossScale(
            scale=torch.where(ok, risen, fallen),
            good_steps=torch.where(ok & ~grows, good_steps, 0),
            skipped=self.skipped + ~ok,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
        )


class Axis(NamedTuple):
    """One axis of the device mesh for this rank: the ranks that differ only in this axis."""

    name: str
    rank: int
    """This rank's place along the axis, 0 <= rank < world_size."""
    world_size: int
    group: ProcessGroup | None
    """The process group for sums over this axis; None for a state without one."""


class Watchdog(Protocol):
    """The interface of the watchdog in `parallel.watchdog`, which prints a report if ranks hang."""

    @property
    def has_lost_rank(self) -> bool:
        """Return whether a collective has failed because another rank is gone."""

    def enter(
        self, function: str, leaves: Sequence[Any], *, counts: bool = True, axis: str = ""
    ) -> AbstractContextManager[None]:
        """Record the start of a collective. The caller waits for it in the returned context."""

    def begin_step(self, name: str) -> None:
        """Record the start of a step."""

    def end_step(self) -> None:
        """Record the end of a step."""

    def diagnose(self, error: BaseException, function: str) -> None:
        """Abort if an error is a time-out; raise if it means that a rank is gone."""

    def stop(self) -> None:
        """End the watchdog."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistState:
    """One rank's place in the world and the position of the run. Immutable.

    `init()` builds it from the launcher's variables. Built by hand it needs no
    process group, and every pure function of rank and world size accepts it.

    Attributes:
        rank: the rank of this process, 0 <= rank < world_size.
        world_size: number of processes that train together.
        local_rank: the rank of this process among those of its machine.
        local_world_size: number of processes on this machine.
        device: the device of model and batches.
        scaler: the loss scale; None without one.
        step: number of batches consumed: the whole position of a run in its data.
        call: number of steps since `step` advanced. 0 in the usual loop; a step with `advance=False`
            adds one, and the next step without it begins again at 0.
        seed: the seed of the data order and of draws.
        samples: number of rows of these batches, over all ranks that share them: the size of
            dimension 0 of the first tensor in each batch, or its number of `samples`. Like `step`,
            it also counts batches whose update is skipped.
        items: sum of the weights of these batches, over the same ranks; if the loss has several
            terms, of all terms. With `count_labels`, the number of tokens that were trained on.
        axis: the name of the axis whose ranks are this state's world, as `along` gives it; empty for
            the world of all ranks.
        axes: the axes of the mesh, each for this rank; empty without one. Not compared, and pickled
            without groups.
        group: the process group that collectives go through. Not shown, not compared, not pickled.
        watchdog: prints a report if a collective hangs. Not shown, not compared, not pickled.

    Raises:
        ValueError: a count is not an integer or is negative, `items` is not a finite number >= 0,
            or a rank is outside its world.

    >>> import accel_fn as af
    >>> af.DistState(rank=3, world_size=8).is_main
    False
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    device: torch.device = _CPU
    scaler: LossScale | None = None
    step: int = 0
    call: int = 0
    seed: int = 0
    samples: int = 0
    items: float = 0
    axis: str = ""
    axes: tuple[Axis, ...] = field(default=(), repr=False, compare=False)
    group: ProcessGroup | None = field(default=None, repr=False, compare=False)
    watchdog: Watchdog | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.device, torch.device):
            object.__setattr__(self, "device", device_of("DistState", self.device))
        places = (self.rank, self.world_size, self.local_rank, self.local_world_size)
        counts = (*places, self.step, self.call, self.seed, self.samples)
        plain = {*map(type, counts)} == {int} and min(counts) >= 0
        plain = plain and type(self.items) in (int, float) and 0 <= self.items < math.inf
        if not (plain and self.rank < self.world_size and self.local_rank < self.local_world_size):
            self._check()

    def _check(self) -> None:
        """Check each rule, and raise the error of the first one that is broken.

        `__post_init__` runs in every step. It has a faster test, and calls this method only if that
        test fails.
        """
        for name, minimum in _COUNTS.items():
            check_count("DistState", name, getattr(self, name), minimum=minimum)
        if self.rank >= self.world_size:
            rule = f"be in 0 .. world_size - 1 = {self.world_size - 1}"
            raise ArgumentError(message("DistState", "rank", rule, self.rank))
        if self.local_rank >= self.local_world_size:
            rule = f"be in 0 .. local_world_size - 1 = {self.local_world_size - 1}"
            raise ArgumentError(message("DistState", "local_rank", rule, self.local_rank))
        is_number = isinstance(self.items, int | float) and not isinstance(self.items, bool)
        if not (is_number and 0 <= self.items < math.inf):
            rule = "be a finite number >= 0"
            raise ArgumentError(message("DistState", "items", rule, self.items))

    @property
    def is_main(self) -> bool:
        """Return True on rank 0 only, the rank that prints and writes."""
        return self.rank == 0

    @property
    def data(self) -> Axis:
        """Return the axis over which batches, weights and losses are shared: `dp`, or all ranks."""
        for each in self.axes:
            if each.name == "dp":
                return each
        return Axis("data", self.rank, self.world_size, self.group)

    def along(self, axis: str) -> DistState:
        """Return the state of one axis of the mesh: its world is the ranks along that axis.

        Every collective and `shard_loader` accept it. `build`, `save` and `load` need the state of
        all ranks.

        Args:
            axis: "pp", "dp", "cp" or "tp". An axis that the mesh leaves out has one rank; without a
                mesh, "dp" is all ranks.

        Returns:
            A state of this rank's place along the axis.

        Raises:
            ValueError: the axis does not exist, or this state is the state of an axis already.

        Cost: no collective.

        >>> import accel_fn as af
        >>> af.DistState(rank=3, world_size=8).along("tp").world_size
        1
        """
        if axis not in AXES:
            raise ArgumentError(message("along", "axis", f"be one of {', '.join(AXES)}", axis))
        check_world("along", self)
        found = self.data if axis == "dp" else Axis(axis, 0, 1, None)
        found = next((each for each in self.axes if each.name == axis), found)
        place: dict[str, Any] = {
            "rank": found.rank,
            "world_size": found.world_size,
            "group": found.group,
        }
        return replace(self, axis=axis, axes=(), **place)

    def advanced(
        self, scaler: LossScale | None, samples: int, weight: float | Mapping[str, float]
    ) -> DistState:
        """Return the state after one more batch, with this loss scale; do not check fields again.

        `samples` counts the rows of the batch over all ranks; `weight` is the batch's weight.
        """
        items = weight if isinstance(weight, int | float) else sum(weight.values())
        state = object.__new__(DistState)
        for name, value in zip(_KEPT, _kept_of(self), strict=True):
            _set(state, name, value)
        _set(state, "scaler", scaler)
        _set(state, "step", self.step + 1)
        _set(state, "call", 0)
        _set(state, "samples", self.samples + samples)
        _set(state, "items", self.items + items)
        return state

    def __copy__(self) -> DistState:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DistState:
        # A state is immutable, and a process group cannot be copied.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        names = [name for name in self.__dataclass_fields__ if name not in ("group", "watchdog")]
        fields = {name: getattr(self, name) for name in names}
        fields["axes"] = tuple([each._replace(group=None) for each in self.axes])
        return _restored, (fields,)

    def __repr__(self) -> str:
        names = [name for name, each in self.__dataclass_fields__.items() if each.repr]
        shown = [f"{name}={getattr(self, name)!r}" for name in names if name != "axis" or self.axis]
        if self.axes:
            shown.append(f"mesh={mesh_name(mesh_of(self))}")
        return f"DistState({', '.join(shown)})"


def device_of(function: str, device: torch.device | str) -> torch.device:
    """Parse the name of a device."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        rule = "be a torch.device or the name of one, such as 'cpu' or 'cuda:0'"
        raise ArgumentError(message(function, "device", rule, device)) from error


def check_state(function: str, state: object) -> None:
    """Refuse anything but a `DistState`, such as another argument in its place."""
    if not isinstance(state, DistState):
        call = CALLS.get(function)
        repair = f"the call is {call}" if call else "init, build and every step give one"
        got = type(state).__name__
        raise ArgumentTypeError(message(function, "state", "be a DistState", got, repair))


def check_world(function: str, state: DistState) -> None:
    """Refuse the state of one axis if the function needs all ranks."""
    if state.axis:
        raise StateError(
            f"{function}: state must be of all ranks, got one along {state.axis!r}; give the state that "
            "along was called on"
        )


def over(state: DistState, axis: str | None = None) -> DistState:
    """Return the state of an axis; by default, the axis of ranks that share a global batch."""
    if axis is None and not state.axes:
        return state
    return state.along("dp" if axis is None else axis)


def mesh_of(state: DistState) -> dict[str, int]:
    """Return the number of ranks along each axis; without a mesh, all ranks are along `dp`."""
    return {each.name: each.world_size for each in state.axes} or {"dp": state.world_size}


def data_places(state: DistState) -> slice:
    """Return the ranks that share a global batch with this one, as a slice of all ranks."""
    if not state.axes:
        return slice(None)
    ranks = ranks_along(mesh_of(state), "dp", state.rank)
    return slice(ranks.start, ranks.stop, ranks.step)


def step_name(step: int, call: int) -> str:
    """Name a step for messages, collectives and seeds: 3, or 3.1 for a second step on one batch."""
    return f"{step}.{call}" if call else str(step)


_set = object.__setattr__
_MOVED = ("scaler", "step", "call", "samples", "items")
_KEPT = tuple(name for name in DistState.__dataclass_fields__ if name not in _MOVED)
_kept_of = attrgetter(*_KEPT)


def _restored(fields: dict[str, Any]) -> DistState:
    return DistState(**fields)
