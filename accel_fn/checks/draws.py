"""Replace random draws by numbers that do not depend on the cut of a batch into parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from accel_fn.core.torch_internals import checkpoint_frame

Fill = Callable[[Tensor, torch.Generator], Any]
"""A function that writes random numbers to a tensor on the host."""
_IN_PLACE = (
    "normal_",
    "uniform_",
    "exponential_",
    "cauchy_",
    "geometric_",
    "log_normal_",
    "random_",
)
_RATES = ("dropout_p", "dropout")
"""Dropout arguments of fused operations that draw inside, such as attention and recurrent
layers."""


class CannotReplayError(Exception):
    """Raised if a batch cannot be compared with its parts, for example because of a random draw.

    The text of the error is the reason.
    """


@dataclass
class Calls:
    """Numbers calls in a run, such as random draws; a recomputed block gets the numbers of its forward."""

    count: int = 0
    in_backward: bool = False
    _of_frames: dict[object, list[int]] = field(default_factory=dict)
    _again: dict[object, int] = field(default_factory=dict)

    def next(self) -> int:
        """Return the number of the current call: a new one, or the forward's if a block is recomputed."""
        found = checkpoint_frame()
        if found is not None and found.is_recomputed:
            return self._number_again(found.frame, found.key)
        if found is not None and self.in_backward:
            raise CannotReplayError("random numbers are drawn in checkpoints inside of each other")
        if found is not None:
            self._of_frames.setdefault(found.frame, []).append(self.count)
        self.count += 1
        return self.count - 1

    def _number_again(self, frame: object, key: object) -> int:
        numbers = self._of_frames.get(frame, [])
        place = self._again.get(key, 0)
        self._again[key] = place + 1
        if place >= len(numbers):
            raise CannotReplayError(
                "a recomputed block draws other random numbers than its forward"
            )
        return numbers[place]


@dataclass(frozen=True)
class Request:
    """One call of a random function: its name, settings and shape."""

    name: str
    settings: tuple[Any, ...]
    shape: tuple[int, ...]


class Draws:
    """Replaces the random functions of a run by its own numbers, without advancing any generator.

    The first two runs, of a batch and of a part, record the requests. A dimension whose size
    differs between the two is a row dimension. Later runs draw one slice and expand it along the
    row dimensions, so that every row has the same numbers at any place. With `rows`, each row of
    the batch has different numbers, and a part gets the numbers of its rows.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._whole: list[Request] = []
        self._part: list[Request] = []
        self._record: list[Request] | None = None
        self._next: list[Request] | None = None
        """The list to which the next run appends its draws."""
        self._rows: Sequence[int] | None = None
        self._num_rows = 0
        self._calls = Calls()

    @property
    def has_any(self) -> bool:
        """Return whether the whole batch has drawn random numbers."""
        return bool(self._whole)

    def record(self, *, whole: bool) -> None:
        """Make the next run, which is of the batch or of a part, record its requests."""
        self._next = self._whole if whole else self._part
        self._next.clear()

    def begin(self, rows: Sequence[int] | None = None, num_rows: int = 0) -> None:
        """Begin a run of all rows, or of `rows` out of `num_rows`, each with its own numbers."""
        self._calls, self._rows, self._num_rows = Calls(), rows, num_rows
        self._record, self._next = self._next, None

    def begin_backward(self) -> None:
        """Record that the forward has ended."""
        self._calls.in_backward = True

    def end(self) -> None:
        """Refuse a run whose number of draws differs from that of the batch."""
        if self._record is None and self._part and self._calls.count != len(self._whole):
            raise CannotReplayError("its parts draw random numbers another number of times")

    def are_by_row(self, num_rows: int, num_in_part: int) -> bool:
        """Return whether all dimensions that differ between batch and part have one entry per row."""
        return self._is_alike() and all(
            (whole.shape[dim], part.shape[dim]) == (num_rows, num_in_part)
            for whole, part in zip(self._whole, self._part, strict=True)
            for dim in _dims_of_rows(whole, part)
        )

    def check_alike(self) -> None:
        """Refuse a part whose requests differ from those of the batch."""
        if not self._is_alike():
            raise CannotReplayError(
                "its parts draw other random numbers: their number or their range depends on the rows"
            )

    def _is_alike(self) -> bool:
        return [(r.name, r.settings, len(r.shape)) for r in self._whole] == [
            (r.name, r.settings, len(r.shape)) for r in self._part
        ]

    def answer(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return random numbers for an operation of torch, instead of its result."""
        name = op._schema.name.removeprefix("aten::")
        if name in _IN_PLACE:
            settings = tuple(args[1:])
            return self._fill(args[0], name, settings, lambda t, g: op(t, *settings, generator=g))
        if op is torch.ops.aten.bernoulli_.float:
            chance = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            return self._fill(
                args[0], name, (chance,), lambda t, g: t.bernoulli_(chance, generator=g)
            )
        if name in ("bernoulli", "bernoulli_"):
            return self._bernoulli(name, args)
        if name == "native_dropout":
            return self._dropout(*args)
        if name == "normal":
            return self._normal(args, kwargs)
        if name.removesuffix("_like") in ("rand", "randn", "randint", "randperm"):
            return self._new(name, args, kwargs)
        raise CannotReplayError(f"{name} draws random numbers that depend on the rows")

    def _new(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Return a new tensor of random numbers, for functions such as `torch.rand`."""
        options = {key: kwargs[key] for key in ("dtype", "device") if kwargs.get(key) is not None}
        kind = name.removesuffix("_like")
        if kind == "randint":
            options.setdefault("dtype", None if name.endswith("_like") else torch.int64)
        if name.endswith("_like"):
            target, numbers = torch.empty_like(args[0], **options), tuple(args[1:])
        elif kind == "randperm":
            options.setdefault("dtype", torch.int64)
            target, numbers = torch.empty(args[0], **options), (args[0],)
        else:
            target, numbers = torch.empty(args[-1], **options), tuple(args[:-1])
        bounds = numbers if len(numbers) > 1 else (0, *numbers)
        fills: dict[str, Fill] = {
            "rand": lambda t, g: t.uniform_(generator=g),
            "randn": lambda t, g: t.normal_(generator=g),
            "randint": lambda t, g: t.random_(*bounds, generator=g),
            "randperm": lambda t, g: t.copy_(torch.randperm(len(t), generator=g)),
        }
        return self._fill(target, name, numbers, fills[kind])

    def _bernoulli(self, name: str, args: Sequence[Any]) -> Tensor:
        chance = args[-1] if len(args) > 1 else args[0]
        # Draw in at least float32: half precision has few different numbers to compare with the
        # rate.
        wide = torch.promote_types(args[0].dtype, torch.float32)
        uniform = torch.empty_like(args[0], dtype=wide)
        self._fill(uniform, name, (), lambda t, g: t.uniform_(generator=g))
        found = (uniform < chance).to(args[0].dtype)
        return cast("Tensor", args[0].copy_(found)) if name.endswith("_") else found

    def _normal(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        mean, std = args[0], args[1] if len(args) > 1 else 1.0
        like = next((each for each in (mean, std) if isinstance(each, Tensor)), None)
        if like is None:
            return self._new("randn", args[2:], kwargs).mul_(std).add_(mean)
        target = torch.empty_like(like + (std if like is mean else mean))
        drawn = self._fill(target, "normal", (), lambda t, g: t.normal_(generator=g))
        return drawn.mul_(std).add_(mean)

    def _dropout(
        self, given: Tensor, rate: float, train: bool | None = True
    ) -> tuple[Tensor, Tensor]:
        kept = torch.ones_like(given)
        if train is not False and rate:
            self._fill(kept, "dropout", (rate,), lambda t, g: t.bernoulli_(1 - rate, generator=g))
        scale = 0.0 if rate == 1 else 1 / (1 - rate)
        return given * kept * (scale if train is not False else 1.0), kept.bool()

    def _fill(self, target: Tensor, name: str, settings: tuple[Any, ...], fill: Fill) -> Tensor:
        """Write the next draw of this run to a tensor."""
        number = self._calls.next()
        # Draw on the host: the generators of different devices draw different numbers, and slices
        # are small.
        generator = torch.Generator().manual_seed(self._seed + number)
        shape = tuple(target.shape)
        if self._record is not None:
            # Do not record a draw twice: the backward runs a checkpointed block again, after its
            # forward.
            if number == len(self._record):
                self._record.append(Request(name, settings, shape))
            drawn = torch.empty(shape, dtype=target.dtype)
            fill(drawn, generator)
            return target.copy_(drawn)
        dims = self._dims(number, shape)
        sizes = list(shape)
        for dim in dims:
            sizes[dim] = 1 if self._rows is None else self._num_rows
        drawn = torch.empty(sizes, dtype=target.dtype)
        fill(drawn, generator)
        for dim in dims if self._rows is not None else ():
            drawn = drawn.index_select(dim, torch.tensor(self._rows))
        return target.copy_(drawn.expand(shape))

    def _dims(self, number: int, shape: tuple[int, ...]) -> list[int]:
        """Return the dimensions of a draw that have one entry per row."""
        if number >= len(self._whole):
            raise CannotReplayError("its parts draw random numbers another number of times")
        whole = self._whole[number]
        dims = _dims_of_rows(whole, self._part[number])
        if [size for dim, size in enumerate(shape) if dim not in dims] != [
            size for dim, size in enumerate(whole.shape) if dim not in dims
        ]:
            raise CannotReplayError("the shape of its random numbers depends on the rows")
        return dims


def _dims_of_rows(whole: Request, part: Request) -> list[int]:
    pairs = zip(whole.shape, part.shape, strict=True)
    return [dim for dim, (size, other) in enumerate(pairs) if size != other]


@cache
def draws_inside(op: Any) -> bool:
    """Return whether an operation of torch draws random numbers."""
    return torch.Tag.nondeterministic_seeded in op.tags


@cache
def _place_of_rate(op: Any) -> tuple[int, str] | None:
    """Return the place and name of a fused operation's dropout rate, or None."""
    names = [each.name for each in op._schema.arguments]
    return next(((names.index(name), name) for name in _RATES if name in names), None)


def has_rate(op: Any) -> bool:
    """Return whether an operation has a dropout rate as an argument."""
    return _place_of_rate(op) is not None


def without_dropout(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a fused operation with dropout 0, since its own draws cannot be replaced."""
    found = _place_of_rate(op)
    assert found is not None
    place, name = found
    if place < len(args):
        return (*args[:place], 0.0, *args[place + 1 :]), dict(kwargs)
    return tuple(args), {**kwargs, name: 0.0}
