"""Checking the promises over processes of our own, or over the world that this is started in."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from accel_fn.cli.output import Cell, errors_in_a_line, print_json, print_table
from accel_fn.cli.resolve import resolve_or_fail
from accel_fn.comm.cluster_env import read_task
from accel_fn.launcher.function.launch import launch
from accel_fn.launcher.machines.detect import detect
from accel_fn.launcher.processes.failures import Failure, cause
from accel_fn.testing.selftest.results import Outcome, RankReport

_CHECKING = "accel_fn.testing.selftest.check_world"
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks together say of one promise. `largest` is None where a check came to no end."""

    promise: str
    holds: bool
    largest: float | None
    bound: float
    error: str
    traceback: str


def run_test(
    num_processes: int | None, cpu: bool | None, config: Path | None = None, *, as_json: bool
) -> None:
    """Check all promises, print what came of it, and exit by it."""
    speaks = True
    with errors_in_a_line():
        if "RANK" in os.environ or read_task(os.environ) is not None:
            _refuse_options(num_processes, cpu, config)
            reports, speaks = _over_this_world()
        else:
            reports = _over_a_new_one(num_processes, cpu, config)
    verdicts = [merge(ranks) for ranks in zip(*[each.outcomes for each in reports], strict=True)]
    if speaks and as_json:
        print_json(_as_object(reports[0], verdicts))
    elif speaks:
        _print(reports[0], verdicts)
    sys.exit(0 if all(verdict.holds for verdict in verdicts) else 1)


def _refuse_options(num_processes: int | None, cpu: bool | None, config: Path | None) -> None:
    if num_processes is not None or cpu or config is not None:
        raise click.UsageError(
            "-n, --cpu and --config are for ranks of its own, and this is a rank already"
        )


def _over_this_world() -> tuple[list[RankReport], bool]:
    """Reports of all ranks of the world that this process is started in; does it speak for them?"""
    state = importlib.import_module("accel_fn.comm.world").init()
    report = importlib.import_module(_CHECKING).check_promises(state)
    failed = [outcome.traceback for outcome in report.outcomes if outcome.traceback]
    if failed:  # the others may be in the midst of a check: nothing more can be said together
        raise click.ClickException(f"test: a check failed on rank {state.rank}\n{failed[0]}")
    exchange = importlib.import_module("accel_fn.comm.primitives").exchange
    return exchange(report, state, "test"), state.is_main


def _check_here() -> RankReport:
    """What a rank runs: torch is imported there."""
    report: RankReport = importlib.import_module(_CHECKING).check_this_rank()
    return report


def _over_a_new_one(
    num_processes: int | None, cpu: bool | None, config: Path | None
) -> list[RankReport]:
    """Reports of ranks that are started for it, with the settings of a launch."""
    resolved = resolve_or_fail({"num_processes": num_processes, "cpu": cpu}, config=config)
    settings = resolved.settings
    if (settings.num_machines or 1) > 1:
        raise click.ClickException(
            f"test: num_machines must be 1 for processes of its own, got {settings.num_machines} "
            f"({resolved.sources['num_machines']}); start it on each machine: "
            "accel-fn launch -m accel_fn.cli test"
        )
    on_cpu = settings.cpu or not detect().num_devices
    count = settings.num_processes or 1
    if on_cpu and not resolved.is_given("num_processes"):
        count = 2
    return launch(
        _check_here,
        num_processes=count,
        cpu=settings.cpu,
        gpu_ids=settings.gpu_ids,
        threads_per_process=settings.threads_per_process,
        timeout_s=settings.timeout_s or _TIMEOUT_S,
    )


def merge(ranks: Sequence[Outcome]) -> Verdict:
    """The outcomes of one promise on all ranks, as one."""
    failed = {rank: outcome for rank, outcome in enumerate(ranks) if outcome.error}
    found = [outcome.largest for outcome in ranks if outcome.largest is not None]
    first = None
    if failed:
        failures = [
            Failure(rank, "", 0, 1, outcome.time, exception=outcome.error)
            for rank, outcome in failed.items()
        ]
        first = failed[cause(failures).rank]
    return Verdict(
        promise=ranks[0].promise,
        holds=all(outcome.holds for outcome in ranks),
        largest=None if failed else math.nan if any(map(math.isnan, found)) else max(found),
        bound=ranks[0].bound,
        error=first.error if first else "",
        traceback=first.traceback if first else "",
    )


def _as_object(report: RankReport, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """For JSON, which has no infinity and no not-a-number."""

    def number(value: float | None) -> float | str | None:
        return value if value is None or math.isfinite(value) else str(value)

    return {
        "holds": all(verdict.holds for verdict in verdicts),
        "num_processes": report.world_size,
        "device": report.device,
        "backend": report.backend,
        "promises": [
            {**asdict(verdict), "largest": number(verdict.largest)} for verdict in verdicts
        ],
    }


def _print(report: RankReport, verdicts: Sequence[Verdict]) -> None:
    ranks = f"{report.world_size} ranks" if report.world_size > 1 else "1 rank"
    print(f"{len(verdicts)} promises on {ranks}, {report.device}, backend {report.backend}")
    print_table(
        ["promise", "largest difference", "bound", "verdict"],
        [
            [each.promise, "-" if each.largest is None else f"{each.largest:.3g}",
             f"{each.bound:g}", _judged(each)]
            for each in verdicts
        ],
    )  # fmt: skip
    for verdict in verdicts:
        if verdict.traceback:
            print(verdict.traceback, file=sys.stderr)
    if report.world_size == 1:
        print("One rank has nobody to differ from: -n 2 --cpu checks what ranks share.")


def _judged(verdict: Verdict) -> Cell:
    if verdict.holds:
        return "holds", "green"
    return verdict.error.splitlines()[-1] if verdict.error else "broken", "bold red"
