"""The command `test`: check the library's promises on this machine, over real processes."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import click

from accel_fn.cli.output import (
    config_option,
    interruptible,
    json_option,
    num_processes_option,
    one_line_errors,
    print_json,
    resolve_settings,
    wrapped,
)
from accel_fn.launcher.hardware import detect
from accel_fn.parallel.clusters.tasks import read_task
from accel_fn.testing.outcomes import Outcome, RankReport, merge

_TIMEOUT_S, _POLL_S = 60.0, 0.1
_HEADINGS = "verdict   largest   bound  promise"
_HANGING = " " * len("verdict   largest   bound  ")


@click.command()
@num_processes_option("Ranks.  [default: the accelerators here, else 2]")
@click.option("--cpu", is_flag=True, default=None, help="Use the CPU.")
@config_option()
@json_option()
def test(
    *, num_processes: int | None, cpu: bool | None, config_file: Path | None, as_json: bool
) -> None:
    """Check the library's promises on this machine, over real processes.

    Trains small models on all ranks and by a plain loop on one, shares out data, runs collectives, and
    prints for each promise, as soon as it is checked, the largest difference that was found beside
    what rounding explains. The exit code is 0 if all promises hold. Settings are those of `accel-fn launch`.

    On several machines, start it there: `accel-fn launch ... -m accel_fn.cli test`, or srun.
    """
    prints = True
    with one_line_errors():
        if "RANK" in os.environ or read_task(os.environ) is not None:
            if num_processes is not None or cpu or config_file is not None:
                raise click.UsageError(
                    "-n, --cpu and --config are for ranks of its own, and this is a rank already"
                )
            reports, prints = _check_this_world(as_json=as_json)
        else:
            reports = _check_new_world(num_processes, cpu, config_file, as_json=as_json)
    merged = [merge(ranks) for ranks in zip(*[each.outcomes for each in reports], strict=True)]
    if prints:
        (_print_as_json if as_json else _print_summary)(reports[0], merged)
    sys.exit(0 if all(verdict.holds for verdict in merged) else 1)


def _check_this_world(*, as_json: bool) -> tuple[list[RankReport], bool]:
    """Check the world that this process is a rank of; return all reports, and if this is rank 0."""
    from accel_fn.core.primitives import exchange
    from accel_fn.parallel.world import init
    from accel_fn.testing.promises import check_promises

    state = init(mesh={"dp": -1})  # the promises are about ranks that share each batch
    report = check_promises(state)
    failed = [outcome.traceback for outcome in report.outcomes if outcome.traceback]
    # The other ranks may wait in a collective of that check, so reports cannot be exchanged.
    if failed:
        raise click.ClickException(f"test: a check failed on rank {state.rank}\n{failed[0]}")
    reports = exchange(report, state, "test")
    if state.is_main and not as_json:
        click.echo(_HEADINGS)
        for ranks in zip(*[each.outcomes for each in reports], strict=True):
            _print_row(merge(ranks))
    return reports, state.is_main


def _check_in_rank(folder: str) -> RankReport:
    # Imported in the rank alone: the promises import torch, which would delay the command.
    from accel_fn.testing.promises import check_this_rank

    return check_this_rank(folder)


def _check_new_world(
    num_processes: int | None, cpu: bool | None, config_file: Path | None, *, as_json: bool
) -> list[RankReport]:
    """Start ranks with the settings of a launch; return their reports."""
    from accel_fn.launcher.launch import launch

    resolved = resolve_settings({"num_processes": num_processes, "cpu": cpu}, config_file)
    settings = resolved.settings
    if (settings.num_machines or 1) > 1:
        raise click.ClickException(
            f"test: num_machines must be 1 for processes of its own, got {settings.num_machines} "
            f"({resolved.sources['num_machines']}); start it on each machine: "
            "accel-fn launch -m accel_fn.cli test"
        )
    # One rank on the CPU would share nothing, so there is little that could break.
    on_cpu = settings.cpu or not detect().num_devices
    count = settings.num_processes or 1
    if on_cpu and not resolved.is_given("num_processes"):
        count = 2
    with (
        interruptible(),
        tempfile.TemporaryDirectory() as folder,
        nullcontext() if as_json else _rows_printed(Path(folder), count),
    ):
        return launch(
            _check_in_rank,
            folder,
            num_processes=count,
            cpu=settings.cpu,
            gpu_ids=settings.gpu_ids,
            threads_per_process=settings.threads_per_process,
            timeout_s=settings.timeout_s or _TIMEOUT_S,
        )


@contextmanager
def _rows_printed(folder: Path, count: int) -> Iterator[None]:
    """Print a row for each promise as soon as all ranks have written its outcome."""
    is_over = threading.Event()

    def follow() -> None:
        num_shown, is_last = 0, False
        while not is_last:
            is_last = is_over.wait(_POLL_S)
            ranks = [_read_outcomes(folder / str(rank)) for rank in range(count)]
            for outcomes in [*zip(*ranks, strict=False)][num_shown:]:
                _print_row(merge(outcomes))
                num_shown += 1

    click.echo(_HEADINGS)
    # A thread, since `launch` returns when all ranks have ended.
    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _read_outcomes(file: Path) -> list[Outcome]:
    """The whole lines of a rank's file; none before there is one."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [Outcome(**json.loads(line)) for line in text.split("\n")[:-1]]


def _print_as_json(report: RankReport, merged: Sequence[Outcome]) -> None:
    def number(value: float | None) -> float | str | None:  # JSON has no infinity and no NaN
        return value if value is None or math.isfinite(value) else str(value)

    print_json(
        {
            "holds": all(verdict.holds for verdict in merged),
            "num_processes": report.world_size,
            "device": report.device,
            "backend": report.backend,
            "promises": [
                {
                    "promise": each.promise,
                    "holds": each.holds,
                    "largest": number(each.largest),
                    "bound": each.bound,
                    "error": each.error,
                    "traceback": each.traceback,
                }
                for each in merged
            ],
        }
    )


def _print_row(verdict: Outcome) -> None:
    """Print one promise; colours go where the output is no terminal."""
    status, colour = ("holds", "green") if verdict.holds else ("broken", "red")
    largest = "-" if verdict.largest is None else f"{verdict.largest:.3g}"
    row = wrapped(f"{status:<8}{largest:>9}{verdict.bound:>8g}  ", verdict.promise)
    click.echo(click.style(status, fg=colour) + row.removeprefix(status))
    if verdict.error:
        click.echo(wrapped(_HANGING, verdict.error.splitlines()[-1]))


def _print_summary(report: RankReport, merged: Sequence[Outcome]) -> None:
    ranks = f"{report.world_size} ranks" if report.world_size > 1 else "1 rank"
    num_held = sum(verdict.holds for verdict in merged)
    where = f"{ranks}, {report.device}, backend {report.backend}"
    click.echo(f"{num_held} of {len(merged)} promises hold on {where}")
    for verdict in merged:
        if verdict.traceback:
            click.echo(verdict.traceback, err=True)
    if report.world_size == 1:
        click.echo(
            "On one rank there is no other to compare with: -n 2 --cpu checks what ranks share."
        )
