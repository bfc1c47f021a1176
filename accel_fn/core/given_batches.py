"""What is known of batches that a loader has given: their place, their number of samples, their origin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from accel_fn.core.batch import tensors_of
from accel_fn.errors import BatchError

Place = tuple[int, int]
"""The number of a pass, and that of the batch in it."""

# An attribute of the tensor would be pickled, and copied, with it.
PLACES = WeakTensorKeyDictionary()
_NUM_BATCHES = 1 << 20
_NUM_PASSES = 1 << 10


def note_place(batch: Any, place: Place) -> None:
    """Note that a batch is the first that the loop gets of a pass."""
    for tensor in tensors_of(batch)[:1]:
        PLACES[tensor] = place


def place_of(batch: Any) -> Place | None:
    """Return the place of a batch if it is the first of its pass and of the tensors that the loader gave."""
    if not PLACES.data:  # most batches
        return None
    for tensor in tensors_of(batch)[:1]:
        found: Place | None = PLACES.get(tensor)  # type: ignore[no-untyped-call]
        return found
    return None


def number_of(place: Place | None) -> int:
    """Write a place as a whole number below 2**31, of large ones the rest; 0 for None."""
    if place is None:
        return 0
    epoch, batch = place
    return 1 + epoch % _NUM_PASSES * _NUM_BATCHES + batch % _NUM_BATCHES


def check_same_place(numbers: Sequence[int]) -> None:
    """Raise on all ranks if two of them begin other passes; 0 is a rank that begins none."""
    if len({*numbers} - {0}) > 1:
        pairs = [divmod(each - 1, _NUM_BATCHES) for each in numbers]
        got = ", ".join(
            f"batch {batch} of pass {epoch} on rank {rank}"
            for rank, (epoch, batch) in enumerate(pairs)
            if epoch >= 0
        )
        raise BatchError(
            f"step: ranks must go through the same passes of a loader together, got {got}; each iter(loader) "
            "is the next pass, so take a look at a batch on every rank, or at loader.loader"
        )


_NAME = "_accel_fn_origin"


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A batch that a loader made, of so many samples."""

    num_samples: int

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a batch that is copied or pickled leaves its data set behind


@dataclass(frozen=True, slots=True, eq=False)
class Origin(Made):
    """The samples of a batch, of which a few can be read again, and what makes a batch of them."""

    read: Callable[[], list[Any]]
    collate: Callable[[list[Any]], Any]


def mark(batch: Any, made: Made) -> None:
    """Note at the tensors of a batch how it was made."""
    for tensor in tensors_of(batch):
        setattr(tensor, _NAME, made)


def carry_mark(moved: Tensor, source: Tensor) -> None:
    """Copy the note of a tensor to its copy on another device."""
    made = getattr(source, _NAME, None)
    if made is not None:
        setattr(moved, _NAME, made)


def origin_of(batch: Any) -> Origin | None:
    """Return the origin of a batch; None if the loop has made or replaced a tensor in it."""
    found = _made(batch)
    return found if isinstance(found, Origin) else None


def samples_of(batch: Any) -> int | None:
    """Return of how many samples a loader made a batch; None if the loop has made some of its tensors."""
    found = _made(batch)
    return None if found is None else found.num_samples


def _made(batch: Any) -> Made | None:
    found = {id(each): each for each in (getattr(t, _NAME, None) for t in tensors_of(batch))}
    return next(iter(found.values())) if len(found) == 1 else None
