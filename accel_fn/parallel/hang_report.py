"""The parts of a hang report: lines of code, collectives and stacks, each with its ranks.

This module does not import torch, since the launcher classifies the lines of a traceback with it.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NamedTuple

from accel_fn.core.mesh_axes import ranks_along

_PYTHON = f"{os.path.dirname(os.__file__)}{os.sep}"
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_NUM_CALLS, _NUM_TENSORS, _NUM_LINES = 30, 4, 12
_COMPILING = (f"_dynamo{os.sep}convert_frame.py", f"_inductor{os.sep}compile_fx.py")
"""Files of torch that are on the stack while it compiles."""

# Functions by which a report finds the phase of a step on the stack, so that a step need not record
# it.
_PHASES = {
    "accel_fn.observe.evaluate.evaluate": "",
    "accel_fn.observe.predict.predict": "",
    "accel_fn.core.loop.Strategy.outputs": "forward",
    "accel_fn.core.torch_internals.run_backward": "backward",
    "accel_fn.core.update.apply_update": "update",
}
"""The phase of a step that each function runs; "" for a function that runs outside of steps."""


def is_in_python(file: str) -> bool:
    """Return whether a file is in the standard library, which reports leave out."""
    return file.startswith((_PYTHON, "<frozen ")) and not _INSTALLED.search(file)


def is_compiling() -> bool:
    """Return whether a thread of this process is compiling for `torch.compile`."""
    stacks = map(traceback.walk_stack, sys._current_frames().values())
    files = (frame.f_code.co_filename for stack in stacks for frame, _ in stack)
    return any(file.endswith(_COMPILING) for file in files)


class CodeLine(NamedTuple):
    """A line of code."""

    code: CodeType
    line: int

    def is_in(self, folders: tuple[str, ...]) -> bool:
        """Return whether the line is in a file below one of these folders."""
        return self.code.co_filename.startswith(folders)

    def __str__(self) -> str:
        return f"{self.code.co_filename}:{self.line} in {self.code.co_name}"


def place_of(frame: FrameType | None, libraries: tuple[str, ...]) -> CodeLine | None:
    """Return the user's innermost line: the first one outside of these folders."""
    while frame is not None:
        if not frame.f_code.co_filename.startswith(libraries):
            return CodeLine(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return None


class Collective(NamedTuple):
    """A collective of accel_fn that a rank has entered."""

    number: int
    """The collective's number, equal on all its ranks; 0 for a message between two ranks."""
    function: str
    axis: str
    """The mesh axis that the collective runs over; empty if it runs over all ranks."""
    shapes: tuple[Any, ...]
    place: CodeLine | None

    def __str__(self) -> str:
        shown = [_shape(each) for each in self.shapes[:_NUM_TENSORS]]
        shown += ["..."] if len(self.shapes) > _NUM_TENSORS else []
        of = f" of {', '.join(shown)}" if shown else ""
        kind = f"collective {self.number}" if self.number else "a message"
        kind += f" along {self.axis}" if self.axis else ""
        return f"{kind}, {self.function}{of}, at {self.place}"


def shapes_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Return the dtypes and shapes of the first leaves; for a leaf that is no tensor, its type's name."""
    # Do not return the tensors: the record of a collective must not keep their memory.
    return tuple(
        [
            (leaf.dtype, leaf.shape) if hasattr(leaf, "shape") else type(leaf).__name__
            for leaf in leaves[: _NUM_TENSORS + 1]
        ]
    )


def _shape(shape: Any) -> str:
    if isinstance(shape, str):
        return shape
    dtype, sizes = shape
    return f"{str(dtype).removeprefix('torch.')} {list(sizes)}"


@dataclass(frozen=True, slots=True)
class Stack:
    """The stack of a thread, outermost call first."""

    calls: tuple[tuple[FrameType, int], ...]

    @classmethod
    def of_thread(cls, frame: FrameType | None) -> Stack:
        """Return the stack of a running thread, given its innermost frame."""
        return cls(() if frame is None else tuple(traceback.walk_stack(frame))[::-1])

    @classmethod
    def of_error(cls, error: BaseException) -> Stack:
        """Return the stack of an error: calls that still run, then calls that it has left."""
        trace = error.__traceback__
        inner = tuple(traceback.walk_tb(trace))
        outer = cls.of_thread(trace.tb_frame.f_back if trace else None)
        return cls((*outer.calls, *inner))

    def place(self, libraries: tuple[str, ...]) -> CodeLine | None:
        """Return the user's innermost line, even if a call in it waits in the standard library."""
        places = [CodeLine(frame.f_code, line) for frame, line in reversed(self.calls)]
        users = (each for each in places if not each.is_in(libraries))
        return next((each for each in users if not is_in_python(each.code.co_filename)), None)

    def under(self, libraries: tuple[str, ...]) -> Stack:
        """Leave out the outermost calls, with which a library started the user's code."""
        for index, (frame, line) in enumerate(self.calls):
            if not CodeLine(frame.f_code, line).is_in(libraries):
                return Stack(self.calls[index:])
        return self

    def phase(self) -> str:
        """Return the phase of a step that is on the stack: forward, backward or update; "" if none is."""
        frames = (frame for frame, _ in self.calls)
        names = (f"{each.f_globals.get('__name__')}.{each.f_code.co_qualname}" for each in frames)
        return next((_PHASES[name] for name in names if name in _PHASES), "")

    def __str__(self) -> str:
        shown = self.calls[-_NUM_CALLS:]
        lines = traceback.StackSummary.extract(iter(shown), capture_locals=False).format()
        left_out = len(self.calls) - len(shown)
        head = [f"  ... {left_out} outer calls\n"] if left_out else []
        return "".join([*head, *lines])


@dataclass(frozen=True, slots=True)
class Entry:
    """The current work of one rank, or its end."""

    rank: int
    doing: str
    left: bool = False
    """Whether the rank has left the world."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The names of a world's ranks, with their places in its mesh."""

    world_size: int
    mesh: Mapping[str, int]
    """The number of ranks along each axis; empty without a mesh."""

    def along(self, axis: str, rank: int) -> range:
        """Return the ranks that take part in this rank's collectives along an axis."""
        return ranks_along(self.mesh, axis, rank) if axis in self.mesh else range(self.world_size)

    def name(self, ranks: Sequence[int]) -> str:
        """Format ranks and the mesh places that they share, such as `ranks 2-3, 7 (dp 1)`."""
        runs: list[list[int]] = []
        for rank in ranks:
            if runs and rank == runs[-1][-1] + 1:
                runs[-1] = [runs[-1][0], rank]
            else:
                runs.append([rank])
        shown = f"rank{'s' if len(ranks) > 1 else ''} {', '.join('-'.join(map(str, run)) for run in runs)}"
        places = {
            axis: {ranks_along(self.mesh, axis, rank).index(rank) for rank in ranks}
            for axis, size in self.mesh.items()
            if size > 1
        }
        shared = [f"{axis} {min(found)}" for axis, found in places.items() if len(found) == 1]
        return f"{shown} ({', '.join(shared)})" if shared else shown

    def list_work(self, entries: Mapping[int, Entry], shown: Sequence[int]) -> str:
        """Return one line for each group of ranks with the same work, and one for missing ranks."""
        by_text: dict[str, list[int]] = {}
        for rank in shown:
            by_text.setdefault(entries[rank].doing if rank in entries else "", []).append(rank)
        silent = by_text.pop("", [])
        lines = [f"{self.name(ranks)}: {text}" for text, ranks in by_text.items()]
        if len(lines) > _NUM_LINES:
            lines[_NUM_LINES:] = [f"... and {len(lines) - _NUM_LINES} lines more"]
        if silent:
            lines.append(f"{self.name(silent)}: no entry; killed, or not here yet")
        return "".join(f"  {line}\n" for line in lines)
