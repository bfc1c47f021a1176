"""Run a script and the program that replaces it, and compare them update by update."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from accel_fn import launch
from accel_fn.contrib.migrate.child import Part, Recording, Seen, record
from accel_fn.errors import RankError

_RELATIVE = {True: 1e-9, False: 1e-4}
"""The largest relative difference of losses that count as equal, by whether OLD computes in float64."""
_ABSOLUTE = {True: 1e-12, False: 1e-6}
NOT_COMPARED = "not compared"
_SHOWN = 30
"""The number of output lines of a failed script that are shown."""


@dataclass(frozen=True)
class Result:
    """The comparison of two runs."""

    what: str
    num_equal: int
    """The number of equal updates, from the first."""
    difference: str = ""
    """The first update that differs, with both values, or `NOT_COMPARED`; empty if all are equal."""
    explanation: str = ""
    """The known difference that explains it; empty if there is none."""
    is_theirs: bool = False
    """Whether the explanation shows that the old script is wrong, and not the new one."""

    @property
    def is_compared(self) -> bool:
        return self.difference != NOT_COMPARED

    @property
    def holds(self) -> bool:
        return not self.difference or self.is_theirs


def verify(
    old: Path,
    new: Path,
    arguments: Sequence[str],
    num_updates: int,
    say: Callable[[str], None],
) -> list[Result]:
    """Run OLD on one process, NEW on one and on two, and compare their updates.

    Args:
        old: a script whose loop calls `backward` and `step` of optimizers.
        new: a program that uses accel_fn.
        arguments: the arguments of both scripts.
        num_updates: the most updates that are compared.
        say: called with a line of text when each run begins.

    Returns:
        The comparison of OLD with NEW on one process, and of NEW on one process with NEW on two.
    """
    # Two processes cannot share one accelerator. If there is only one, run both on the CPU, and also
    # the run on one process to which they are compared.
    has_two = torch.accelerator.device_count() > 1
    cpu = torch.accelerator.is_available() and not has_two

    def run(
        script: Path, kind: Literal["old", "new"], size: int, *, draws: str = "global", cpu: bool
    ) -> Recording:
        say(f"{script.name} on {size} process{'es' if size > 1 else ''}")
        return _run(script, arguments, num_updates, kind, size, draws, cpu=cpu)[0]

    before, after = run(old, "old", 1, cpu=False), run(new, "new", 1, cpu=False)
    is_double = all(each.is_double for each in before.updates)
    what = f"{old.name} and {new.name} on one process"
    results = [_compared(what, before, after, is_double=is_double)]
    what = f"{new.name} on one process and on two"
    if any(each.draws for each in after.updates):
        explanation = "the step draws random numbers, as dropout does, which depend on the split"
        return [*results, Result(what, 0, NOT_COMPARED, explanation, is_theirs=True)]
    one = run(new, "new", 1, draws="state", cpu=cpu) if after.uses_draw or cpu else after
    two = run(new, "new", 2, draws="state", cpu=cpu)
    return [*results, _compared(what, one, two, is_double=is_double)]


def _run(
    script: Path,
    arguments: Sequence[str],
    num_updates: int,
    kind: Literal["old", "new"],
    size: int,
    draws: str,
    *,
    cpu: bool,
) -> list[Recording]:
    with tempfile.TemporaryDirectory(prefix="accel_fn_verify_") as place:
        folder = Path(place) / "run"
        folder.mkdir()
        for each in Path.cwd().iterdir():
            (folder / each.name).symlink_to(each)
        given = (script.resolve(), arguments, folder, num_updates, kind, draws)
        try:
            found = launch(record, *given, num_processes=size, cpu=cpu)
        except Exception as error:
            printed = [
                each.read_text(errors="replace") for each in Path(place).glob("run_output_*.txt")
            ]
            lines = [*"".join(printed).splitlines(), *str(error.__cause__ or "").splitlines()]
            tail = "\n".join(lines[-_SHOWN:])
            raise RankError(
                f"migrate: {script.name} must run on {size} process{'es' if size > 1 else ''}, got "
                f"{type(error).__name__}: {error}\n{tail}"
            ) from error
    if not found[0].updates:
        what = "an optimizer steps after a backward" if kind == "old" else "step(state, batch) runs"
        raise RankError(
            f"migrate: {script.name} must make an update, got none: {what} nowhere in it"
        )
    return found


def _compared(what: str, old: Recording, new: Recording, *, is_double: bool) -> Result:
    """Compare two runs up to the first update that differs."""
    pairs = zip(old.updates, new.updates, strict=False)
    for number, (a, b) in enumerate(pairs, start=1):
        same_loss = _equal(a.loss, b.loss, is_double=is_double)
        if not same_loss or (a.rows != b.rows and a.rows and b.rows):
            shown = (
                f"update {number}: loss {a.loss:.9g} and {b.loss:.9g}, rows {a.rows} and {b.rows}"
            )
            explanation, is_theirs = _explained(old, new, number - 1, is_double=is_double)
            return Result(what, number - 1, shown, explanation, is_theirs)
    counts = len(old.updates), len(new.updates)
    if counts[0] != counts[1]:
        shown = f"update {min(counts) + 1}: one run has {counts[0]} updates, the other {counts[1]}"
        return Result(what, min(counts), shown)
    return Result(what, counts[0])


def _equal(a: float, b: float, *, is_double: bool) -> bool:
    both_nan = math.isnan(a) and math.isnan(b)
    return both_nan or math.isclose(
        a, b, rel_tol=_RELATIVE[is_double], abs_tol=_ABSOLUTE[is_double]
    )


def _explained(old: Recording, new: Recording, index: int, *, is_double: bool) -> tuple[str, bool]:
    """Return the known difference that explains unequal updates, and whether OLD is wrong."""
    a, b = old.updates[index], new.updates[index]
    if _is_shifted(old, b, index):
        return (
            "a window of accumulation that begins with the first batch alone: the old script steps after it, "
            "and after whole windows from then on",
            True,
        )
    weighed = _explained_by_weights(old, b, index, is_double=is_double) if a.rows == b.rows else ""
    if weighed:
        return weighed, True
    if any(each.is_cleared for each in old.updates[:index]):
        return (
            "cleared gradients: the old script clears gradients between the backwards of an update, so "
            "the batches before do not count",
            True,
        )
    if len({part.shapes for part in a.parts}) > 1:
        return (
            "padding: the batches of an update have rows of unequal lengths, which one larger batch pads "
            "to the longest, and the loss depends on it",
            False,
        )
    were_equal = index > 0 and old.updates[index - 1].position == new.updates[index - 1].position
    if a.parts and a.position != b.position and (were_equal or _draws(old) or _draws(new)):
        return "another number of draws: the random generators are at other positions", False
    return "", False


def _is_shifted(old: Recording, new: Seen, index: int) -> bool:
    """Return whether OLD's first update has only one batch, where NEW's has a whole window of batches."""
    parts = [part for each in old.updates[:2] for part in each.parts]
    is_first = index == 0 and len(old.updates[0].parts) == 1 < len(parts) - 1
    return is_first and new.rows == sum(part.rows for part in parts[:-1])


def _explained_by_weights(old: Recording, new: Seen, index: int, *, is_double: bool) -> str:
    """Describe the weights with which the losses of OLD's batches give NEW's loss; "" if there are none."""
    parts = old.updates[index].parts
    most = max([old.divisor, *(len(each.parts) for each in old.updates[: index + 1])])
    means = [part.value * most for part in parts]

    def fits(weights: Sequence[int]) -> bool:
        total = sum(weights)
        if not total:
            return False
        mean = sum(value * weight for value, weight in zip(means, weights, strict=True)) / total
        return _equal(mean, new.loss, is_double=is_double)

    for place in range(min((len(part.num_labels) for part in parts), default=0)):
        if fits([part.num_labels[place] for part in parts]):
            return (
                f"labels counted unevenly: {a_list(parts, place)} labels weigh the same in the old "
                "script; the new one divides by their number"
            )
    if not fits([part.rows for part in parts]):
        return ""
    if len(parts) < most:
        return (
            f"a short last window of accumulation: the old script divides {len(parts)} of {most} "
            f"batches by {most}"
        )
    return "batches of unequal sizes weigh the same in the old script"


def _draws(run: Recording) -> bool:
    """Return whether a run calls `af.draw`, or most updates draw. A loader alone draws once per epoch."""
    positions = [each.position for each in run.updates]
    changes = [a != b for a, b in itertools.pairwise(positions)]
    return run.uses_draw or 2 * sum(changes) > len(changes)


def a_list(parts: Sequence[Part], place: int) -> str:
    """Return the number of labels of each backward of an update, as a text."""
    numbers = [str(part.num_labels[place]) for part in parts]
    return " and ".join([", ".join(numbers[:-1]), numbers[-1]]) if len(numbers) > 1 else numbers[0]
