"""Writing a rank's part of a checkpoint: files of plain data, and its share of the tensors in one more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_fn.checkpoint.format.hashing import FileMark, memory_of, uncounted, write_file
from accel_fn.checkpoint.format.host_memory import copied_to_host
from accel_fn.checkpoint.format.manifest import Chunk
from accel_fn.checkpoint.format.names import file_of
from accel_fn.checkpoint.format.shard_plan import Part
from accel_fn.errors import CheckpointError

_ALIGNMENT = 64
"""Bytes, as torch aligns tensors: a copy is faster if both places have the same alignment."""


@dataclass(frozen=True, slots=True)
class Written:
    """The files that a rank has written: chunks by name of the tensor, and marks by name of the file."""

    chunks: Mapping[str, tuple[Chunk, ...]]
    files: Mapping[str, FileMark]


@dataclass(frozen=True, slots=True)
class Share:
    """The data that a rank has to write."""

    rank: int
    files: Mapping[str, bytes]
    parts: Sequence[Part]

    def num_bytes(self) -> int:
        return sum(map(len, self.files.values())) + sum(part.tensor.nbytes for part in self.parts)

    def write(self, folder: Path, count: Callable[[int], object] = uncounted) -> Written:
        file = file_of("tensors", self.rank, "bin")
        chunks: dict[str, tuple[Chunk, ...]] = {}
        try:
            marks = {
                name: write_file(folder / name, [data], count) for name, data in self.files.items()
            }
            if self.parts:
                marks[file] = write_file(folder / file, self._tensor_bytes(file, chunks), count)
        except OSError as error:
            raise write_error(folder, error) from error
        return Written(chunks, marks)

    def _tensor_bytes(
        self, file: str, chunks: dict[str, tuple[Chunk, ...]]
    ) -> Iterator[memoryview]:
        """Yield the bytes of tensors, aligned as in memory, and note in `chunks` where each begins."""
        start = 0
        for part, tensor in copied_to_host(self.parts):
            gap = -start % _ALIGNMENT
            if gap:
                yield memoryview(bytes(gap))
            start += gap
            view = memory_of(tensor.resolve_conj().resolve_neg().contiguous())
            shape = tuple(tensor.shape)
            offsets = part.offsets or (0,) * len(shape)
            chunk = Chunk(offsets, shape, file, start, len(view))
            chunks[part.name] = (*chunks.get(part.name, ()), chunk)
            start += len(view)
            yield view


def write_error(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"save: folder must be one that can be written to, got {str(folder.parent)!r} "
        f"({error.strerror or error}); checkpoints that were there are as they were"
    )
