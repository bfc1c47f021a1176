"""What a rank writes of a checkpoint: files of plain data, and its share of the tensors in one more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_fn.checkpoint.format.hashing import FileMark, memory_of, write_file
from accel_fn.checkpoint.format.manifest import Chunk
from accel_fn.checkpoint.format.names import file_of
from accel_fn.checkpoint.format.shard_plan import Part
from accel_fn.errors import CheckpointError

_ALIGNMENT = 64
"""Bytes, as torch aligns tensors: copies between two places that are aligned alike are faster."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank has written."""

    chunks: Sequence[tuple[str, Chunk]]
    """By name of the tensor."""
    files: Mapping[str, FileMark]


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank has to write."""

    rank: int
    files: Mapping[str, bytes]
    parts: Sequence[Part]

    def write(self, draft: Path) -> Written:
        """Write all of it, to the disk."""
        file = file_of("tensors", self.rank, "bin")
        chunks: list[tuple[str, Chunk]] = []
        try:
            marks = {name: write_file(draft / name, [data]) for name, data in self.files.items()}
            if self.parts:
                marks[file] = write_file(draft / file, _bytes_of(self.parts, file, chunks))
        except OSError as error:
            raise cannot_write(draft, error) from error
        return Written(chunks, marks)


def cannot_write(draft: Path, error: OSError) -> CheckpointError:
    """What to tell of a folder in which a draft cannot be written."""
    return CheckpointError(
        f"save: folder must be one that can be written to, got {str(draft.parent)!r} "
        f"({error.strerror or error}); checkpoints that were there are as they were"
    )


def _bytes_of(
    parts: Sequence[Part], file: str, chunks: list[tuple[str, Chunk]]
) -> Iterator[memoryview]:
    """The bytes of tensors, one after another, aligned as in memory; notes where each begins."""
    start = 0
    for part in parts:
        gap = -start % _ALIGNMENT
        if gap:
            yield memoryview(bytes(gap))
        start += gap
        view = memory_of(part.tensor.cpu().contiguous())
        shape = tuple(part.tensor.shape)
        offsets = part.offsets or (0,) * len(shape)
        chunks.append((part.name, Chunk(offsets, shape, file, start, len(view))))
        start += len(view)
        yield view
