"""Facts about batches that a loader made: their place, number of samples and origin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from accel_fn.core.batch import tensors_of
from accel_fn.errors import BatchError

Place = tuple[int, int]
"""The number of a pass over the loader, and the number of the batch in that pass."""

# Keep places in a dictionary: an attribute of a tensor would be pickled and copied with the tensor.
PLACES = WeakTensorKeyDictionary()
_NUM_BATCHES = 1 << 20
_NUM_PASSES = 1 << 10


def note_place(batch: Any, place: Place) -> None:
    """Record the place of a batch, if the batch is the first one of a pass."""
    for tensor in tensors_of(batch)[:1]:
        PLACES[tensor] = place


def place_of(batch: Any) -> Place | None:
    """Return the place recorded for a batch; None if there is none.

    Only the first batch of a pass has a place. A training loop that replaces the tensors of this
    batch drops its place.
    """
    # Skip the look-up if no batch in memory has a place, as in most steps.
    if not PLACES.data:
        return None
    for tensor in tensors_of(batch)[:1]:
        found: Place | None = PLACES.get(tensor)  # type: ignore[no-untyped-call]
        return found
    return None


def number_of(place: Place | None) -> int:
    """Encode a place as an integer below 2**31, with large numbers wrapped around; 0 for None."""
    if place is None:
        return 0
    epoch, batch = place
    return 1 + epoch % _NUM_PASSES * _NUM_BATCHES + batch % _NUM_BATCHES


def check_same_place(numbers: Sequence[int]) -> None:
    """Raise on all ranks if two ranks begin different passes; 0 means that a rank begins none."""
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
    """The mark of a batch that a loader made, with its number of samples."""

    num_samples: int

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle as None: a copied or pickled batch must not take its data set along.
        return type(None), ()


@dataclass(frozen=True, slots=True, eq=False)
class Origin(Made):
    """A mark with functions that read and collate a few of the batch's samples again."""

    read: Callable[[], list[Any]]
    collate: Callable[[list[Any]], Any]


def mark(batch: Any, made: Made) -> None:
    """Set this mark on every tensor of a batch."""
    for tensor in tensors_of(batch):
        setattr(tensor, _NAME, made)


def carry_mark(moved: Tensor, source: Tensor) -> None:
    """Copy the mark of a tensor to its copy on another device."""
    made = getattr(source, _NAME, None)
    if made is not None:
        setattr(moved, _NAME, made)


def origin_of(batch: Any) -> Origin | None:
    """Return the origin of a batch; None if it has none, or if the user's loop has made a tensor of it."""
    found = _made(batch)
    return found if isinstance(found, Origin) else None


def samples_of(batch: Any) -> int | None:
    """Return how many samples a loader put in a batch; None if the user's loop has made a tensor of it."""
    found = _made(batch)
    return None if found is None else found.num_samples


def _made(batch: Any) -> Made | None:
    found = {id(each): each for each in (getattr(t, _NAME, None) for t in tensors_of(batch))}
    return next(iter(found.values())) if len(found) == 1 else None
