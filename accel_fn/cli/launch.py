"""The command `launch`: run a script on many processes, or show the variables of each."""

from __future__ import annotations

import gc
import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

import click

from accel_fn.cli.output import (
    SHELL_FILE,
    config_option,
    json_option,
    one_line_errors,
    print_json,
    print_table,
    resolve_settings,
)
from accel_fn.launcher.plan_launch import LaunchPlan, Variable, plan_launch, rank_variables
from accel_fn.launcher.settings import SETTINGS

_FEW, _LATER = 4, "(at the start)"


_TYPES: dict[type, Any] = {Path: click.Path(file_okay=False, path_type=Path)}


def setting_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add a flag for each setting; `resolve` checks the values."""
    for name, setting in reversed([*SETTINGS.items()]):
        kind, short = setting.kind, ["-n"] if name == "num_processes" else []
        command = click.option(
            *short,
            f"--{name.replace('_', '-')}",
            type=click.Choice(kind.choices) if kind.choices else _TYPES.get(kind.flag, kind.flag),
            is_flag=kind.flag is bool,
            default=None,
            metavar=kind.metavar,
            help=f"{setting.about[0].upper()}{setting.about[1:]}.",
        )(command)
    return command


@click.command(
    context_settings={
        # Arguments after the script belong to the script.
        "allow_interspersed_args": False,
        # Accept underscores in the names of options, as accelerate does.
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)
@setting_options
@config_option()
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.option("--no-python", is_flag=True, help="SCRIPT is a program.")
@click.option("--dry-run", is_flag=True, help="Start nothing: print the variables of each rank.")
@json_option("Print it as JSON.")
@click.argument("script", type=SHELL_FILE)
@click.argument("arguments", nargs=-1, type=SHELL_FILE, metavar="[ARGS]...")
def launch(
    *,
    config_file: Path | None,
    module: bool,
    no_python: bool,
    dry_run: bool,
    as_json: bool,
    script: str,
    arguments: tuple[str, ...],
    **flags: Any,
) -> None:
    """Run a script on every process of a world.

    ARGS go to the script, even if they look like options of this command. `accel-fn
    config --show` prints the settings that apply without options.

    The exit code is that of the rank that failed first; 128 + the signal if it was killed.
    """
    # Switch off garbage collection until torch is imported: it would take a tenth of the time.
    gc.disable()
    if module and no_python:
        raise click.UsageError("--module cannot be combined with --no-python")
    if as_json and not dry_run:
        raise click.UsageError("--json needs --dry-run")
    kind: Literal["script", "module", "program"]
    kind = "module" if module else "program" if no_python else "script"
    _name_options_of_script(script, arguments, flags)
    resolved = resolve_settings(flags, config_file)

    with one_line_errors():
        plan = plan_launch(resolved, kind, script, arguments)
        if dry_run:
            _show(plan, as_json=as_json)
            return
        exit_code, report = _start(plan)
    # Flush stdout, so that the output of ranks comes before the report.
    _print("", sys.stdout)
    _print(report, sys.stderr)
    sys.exit(exit_code)


def _name_options_of_script(
    script: str, arguments: Sequence[str], flags: Mapping[str, object]
) -> None:
    """Warn if options of the launch stand after the script's name: the script gets them instead.

    The warning leaves out options that also stand before the script, and names a `--` right after it.
    """
    not_given = [name for name in SETTINGS if flags[name] is None]
    own = {f"--{name.replace('_', '-')}" for name in not_given}
    own |= {"-n"} if "num_processes" in not_given else set()
    named = [each.partition("=")[0] for each in arguments if each.startswith("-")]
    after = ["--"] if arguments[:1] == ("--",) else []
    after += [each for each in named if each.replace("_", "-") in own]
    if after:
        click.echo(
            f"accel-fn launch: {' and '.join(after)} after {script} goes to the script; options of the "
            "launch stand before it",
            err=True,
        )


def _start(plan: LaunchPlan) -> tuple[int, str]:
    """Run the launch, with torch's warnings about lost machines switched off."""
    is_set = "TORCH_CPP_LOG_LEVEL" in os.environ
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from accel_fn.launcher.run import run

    # The variable is for the stores of this process: ranks must not inherit it.
    if not is_set:
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    gc.enable()
    logging.getLogger("accel_fn.launcher").addHandler(_TerminalHandler())
    return run(plan)


class _TerminalHandler(logging.Handler):
    """Prints the launcher's log records on stderr, one record per line."""

    def emit(self, record: logging.LogRecord) -> None:
        _print(f"accel-fn launch: {record.getMessage()}\n", sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    """Print and flush; ignore the error of a closed terminal or pipe."""
    try:
        print(text, end="", file=stream, flush=True)
    except OSError:
        # Redirect the stream to /dev/null: Python flushes it again at exit, which would fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _show(plan: LaunchPlan, *, as_json: bool) -> None:
    """Print each variable that the ranks of this machine would get, with the reason for its value."""
    machines = plan.machines
    ranks = [
        rank_variables(machines, rank, plan.settings.max_restarts, os.environ)
        for rank in range(machines.num_local)
    ]
    if as_json:
        print_json(_as_dict(plan, ranks))
        return
    click.echo(shlex.join(plan.command.command_line()))
    click.echo(
        f"on machine {machines.machine_rank or 0} of {machines.num_machines}, "
        f"as {machines.num_local} of {machines.num_processes} processes"
    )
    click.echo()
    rows = [
        (each.name, _merge([rank[index].value or _LATER for rank in ranks]), each.why)
        for index, each in enumerate(ranks[0])
    ]
    rows += [(each.name, each.value or _LATER, each.why) for each in plan.variables]
    if plan.cpus:
        cpus = [",".join(map(str, each)) for each in plan.cpus]
        rows.append(("(processors)", _merge(cpus), "memory nodes"))
    print_table(("variable", "value", "why"), rows)


def _merge(values: list[str]) -> str:
    """Join values to text: only one if all are equal; if there are many, the first and the last."""
    if len(set(values)) == 1:
        return values[0]
    return ", ".join(values) if len(values) <= _FEW else f"{values[0]}, ..., {values[-1]}"


def _as_dict(plan: LaunchPlan, ranks: list[list[Variable]]) -> dict[str, Any]:
    cpus: Sequence[Sequence[int] | None] = plan.cpus or [None] * len(ranks)
    return {
        "command": plan.command.command_line(),
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
        "why": {each.name: each.why for each in (*ranks[0], *plan.variables)},
    }
