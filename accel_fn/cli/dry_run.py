"""Showing what a launch would do: the `--dry-run` of the command `launch`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import Any

import click

from accel_fn.cli.output import print_json, print_table
from accel_fn.launcher.plan_launch import LaunchPlan
from accel_fn.launcher.processes.environment import Variable, rank_variables

_FEW, _LATER = 4, "(at the start)"


def show(plan: LaunchPlan, *, as_json: bool) -> None:
    """Print each variable that the ranks of this machine would get, and why."""
    ranks = [
        rank_variables(plan.machines, rank, plan.settings.max_restarts, os.environ)
        for rank in range(plan.machines.num_local)
    ]
    if as_json:
        print_json(_as_json(plan, ranks))
        return
    machines = plan.machines
    click.echo(shlex.join(plan.command.words()))
    click.echo(
        f"on machine {machines.machine_rank or 0} of {machines.num_machines}, "
        f"as {machines.num_local} of {machines.num_processes} processes"
    )
    click.echo()
    rows = [
        (each.name, _together([rank[index].value or _LATER for rank in ranks]), each.why)
        for index, each in enumerate(ranks[0])
    ]
    rows += [(each.name, each.value or _LATER, each.why) for each in plan.variables]
    if plan.cpus:
        rows.append(
            ("(processors)", _together([_listed(each) for each in plan.cpus]), "memory nodes")
        )
    print_table(("variable", "value", "why"), rows)


def _together(values: list[str]) -> str:
    """One value where all are alike, else each, or the first and the last of many."""
    if len(set(values)) == 1:
        return values[0]
    return ", ".join(values) if len(values) <= _FEW else f"{values[0]}, ..., {values[-1]}"


def _listed(cpus: Sequence[int]) -> str:
    return ",".join(map(str, cpus))


def _as_json(plan: LaunchPlan, ranks: list[list[Variable]]) -> dict[str, Any]:
    cpus: Sequence[Sequence[int] | None] = plan.cpus or [None] * len(ranks)
    everything = [*ranks[0], *plan.variables]
    return {
        "command": plan.command.words(),
        "num_machines": plan.machines.num_machines,
        "machine_rank": plan.machines.machine_rank,
        "num_processes": plan.machines.num_processes,
        "ranks": [
            {
                "processors": None if own is None else list(own),
                "variables": {each.name: each.value for each in (*rank, *plan.variables)},
            }
            for rank, own in zip(ranks, cpus, strict=True)
        ],
        "why": {each.name: each.why for each in everything},
    }
