"""Where a stream ends that every rank reads whole: at the same item, or no rank goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from accel_fn.comm.channel import Channel
from accel_fn.errors import check_alike


@dataclass(frozen=True, slots=True)
class End:
    """What comes after the last batch of a pass.

    Attributes:
        num_items: of the whole stream.
    """

    num_items: int


def until_end(items: Iterator[Any], channel: Channel | None, first_batch: int) -> Iterator[Any]:
    """The batches of a pass, whose workers end with it.

    With a channel, ranks say before each batch whether they have one; where some have none, or have
    read another number of items at the end, all raise.
    """
    with closing(items):  # type: ignore[type-var]
        for batch, item in enumerate(items, start=first_batch):
            end = item.num_items if isinstance(item, End) else None
            if channel is not None:
                _check_ends(channel.exchange(end), batch)
            if end is not None:
                for _ in items:  # the ends that other workers have come to
                    pass
                return
            yield item


def _check_ends(ends: list[int | None], batch: int) -> None:
    check_alike(
        [_told(end) for end in ends],
        f"shard_loader: loader must be over the same stream on every rank, also before batch {batch}",
        "give every rank the whole stream",
    )


def _told(end: int | None) -> str:
    return "more to come" if end is None else f"its end after {end} items"
