"""The command `config`: write a file of settings by questions, or show the settings in force."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from accel_fn.cli.output import (
    FILE,
    Cell,
    config_option,
    interruptible,
    json_option,
    one_line_errors,
    print_json,
    print_table,
    resolve_settings,
)
from accel_fn.errors import SettingsError
from accel_fn.launcher.hardware import Machine, detect, read_processors
from accel_fn.launcher.machines import place
from accel_fn.launcher.plan_launch import threads_variable
from accel_fn.launcher.settings import (
    SETTINGS_FILE,
    Resolved,
    Settings,
    check_machine,
    check_settings,
    default_processes,
)

Ask = Callable[[Mapping[str, object], str, str, object], object]
"""A function that asks a question: (answers so far, setting, question, default) -> answer."""

_ASKED = """\
Questions follow on processes, devices, mixed precision, micro-batches, replicas
or shards, and machines. Enter takes the default in brackets. The file is
written after the last one; Ctrl-C writes nothing.
"""
_WRAP = "Replicas of the model on all ranks, or shards (ddp, fsdp, deepspeed)"
_INTERRUPTED = 130
"""The exit code by which shells know that Ctrl-C ended a program."""


@click.command()
@click.option("--default", is_flag=True, help="Ask no question: use the defaults of this machine.")
@click.option(
    "--output", type=FILE, help="The file to write.  [default: accel_fn.yaml]", metavar="FILE"
)
@click.option("--force", is_flag=True, help="Overwrite the file.")
@click.option("--show", is_flag=True, help="Print the settings in force, and the source of each.")
@json_option("Show as JSON.")
@config_option("The file to show.")
def config(
    *,
    default: bool,
    output: Path | None,
    force: bool,
    show: bool,
    as_json: bool,
    config_file: Path | None,
) -> None:
    """Write settings to a file, by questions; or show those in force.

    The file is accel_fn.yaml in this folder, which `accel-fn launch` finds from here and from
    any folder below. `--show` reads what launch would read: variables ACCEL_FN_*, the nearest
    accel_fn.yaml or [tool.accel_fn] in pyproject.toml, and config.yaml in ~/.config/accel_fn.
    With --config it reads that file instead of the nearest one, also one that accelerate wrote.
    """
    if show:
        _refuse("--show", {"--default": default, "--output": output, "--force": force})
        _show(config_file, as_json=as_json)
    else:
        _refuse("writing a file", {"--json": as_json, "--config": config_file})
        with interruptible():
            _write(output, ask=not default, force=force)


def _refuse(job: str, options: dict[str, object]) -> None:
    given = [name for name, value in options.items() if value]
    if given:
        raise click.UsageError(f"{', '.join(given)} cannot be combined with {job}")


def _show(config_file: Path | None, *, as_json: bool) -> None:
    """Print the settings in force, as JSON or as a table.

    The table shows defaults in dim text. For a setting without a value, it shows the value that a
    launch would use.
    """
    resolved = resolve_settings({}, config_file)
    values, sources = asdict(resolved.settings), resolved.sources
    if as_json:
        print_json(
            {name: {"value": value, "source": sources[name]} for name, value in values.items()}
        )
        return
    with one_line_errors():
        open_values = _effective(resolved)
    rows: list[list[Cell]] = []
    for name, value in values.items():
        style = "" if resolved.is_given(name) else "dim"
        shown = open_values[name] if value is None else _as_in_file(value)
        rows.append([(cell, style) for cell in (name, shown, sources[name])])
    print_table(["setting", "value", "source"], rows)


def _effective(resolved: Resolved) -> dict[str, str]:
    """Return the values that a launch from this folder would use for settings without a value."""
    machines, settings = place(resolved, os.environ), resolved.settings
    has_devices = not settings.cpu and detect().num_devices
    threads = threads_variable(settings, machines, read_processors(), os.environ)
    return {
        "num_machines": str(machines.num_machines),
        "machine_rank": "by the rendezvous"
        if machines.machine_rank is None
        else str(machines.machine_rank),
        "main_process_ip": machines.host,
        "main_process_port": str(machines.port or "a free one"),
        "gpu_ids": "all" if has_devices else "none",
        "mixed_precision": "no",
        "num_microbatches": "1",
        "wrap": "ddp",
        "rdzv_backend": machines.backend,
        "timeout_s": "600",
        "mesh": "dp=-1",
        "log_dir": "none",
        "threads_per_process": str(threads.value),
    }


def _as_in_file(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _write(output: Path | None, *, ask: bool, force: bool) -> None:
    """Ask the questions, or take the defaults, and write the file."""
    from accel_fn.launcher.settings_files import render

    path = output or Path(SETTINGS_FILE)
    if path.exists() and not force:
        raise click.ClickException(f"{path} exists; --force overwrites it, --output names another")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise click.ClickException(f"{path} must be in a folder that is there and can be written")
    if ask and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError(
            "config asks questions and must run in a terminal; --default asks nothing"
        )
    machine = detect()
    if ask:
        click.echo(
            f"This machine has {machine.devices} and {machine.num_cores} CPU cores.\n{_ASKED}"
        )
    try:
        asked = partial(_prompt, machine) if ask else lambda *given: given[-1]
        text = render(choose_settings(asked, machine))
    except click.Abort:
        click.echo()
        raise click.exceptions.Exit(_INTERRUPTED) from None
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from None
    click.echo(f"Wrote {path}. `accel-fn config --show` prints what is in force.")
    click.echo("\n".join(f"  {line}" for line in text.splitlines() if line and line[0] != "#"))
    named = f"--config {shlex.quote(str(output))} " if output else ""
    click.echo(f"Next: accel-fn launch {named}train.py")


def choose_settings(ask: Ask, machine: Machine) -> dict[str, Any]:
    """Return checked answers by setting; skip questions that the machine or earlier answers decide."""
    answers: dict[str, Any] = {}

    def put(name: str, question: str, default: object) -> Any:
        answers[name] = ask(answers, name, question, default)
        return answers[name]

    default, _ = default_processes(_checked({}), machine)
    num_local = put("num_processes", "How many processes", default)
    if num_devices := machine.num_devices:
        question = "Train on the CPU, not on accelerators (yes, no)"
        on_cpu = put("cpu", question, num_local > num_devices)
        if not on_cpu and machine.kind == "CUDA" and num_local < num_devices:
            put("gpu_ids", "Which accelerators, such as 0,1", "all")
    put("mixed_precision", "Mixed precision (no, fp16, bf16, fp8)", "no")
    put("num_microbatches", "In how many micro-batches each rank computes its part", 1)
    if num_local > 1:
        put("wrap", _WRAP, "ddp")
    # The answer is the number on this machine. The setting, the number on all machines, is set
    # below.
    del answers["num_processes"]
    num_machines = put("num_machines", "How many machines, each with as many processes", 1)
    if num_machines > 1:
        put("machine_rank", "Which of them is this one, from 0", 0)
        put("main_process_ip", "Address of machine 0", None)
        put("main_process_port", "A free port on machine 0", 29500)
        if num_local == 1:
            put("wrap", _WRAP, "ddp")
    answers["num_processes"] = num_local * num_machines
    _checked(answers)
    return answers


def _checked(answers: Mapping[str, object], machine: Machine | None = None) -> Settings:
    """Make settings of answers, and check them; with a machine, also check that they fit its accelerators."""
    where = dict.fromkeys(answers, "config")
    settings = check_settings(answers, where)
    if machine is not None:
        check_machine(settings, where, os.environ, machine)
    return settings


def _prompt(
    machine: Machine, answers: Mapping[str, object], name: str, question: str, default: object
) -> object:
    """Prompt until the answer fits its rule, the earlier answers and the accelerators."""
    chooses_devices = name in ("cpu", "gpu_ids")

    def check(text: object) -> object:
        try:
            found = _checked({**answers, name: text}, machine if chooses_devices else None)
        except SettingsError as error:
            raise click.UsageError(str(error)) from None
        return getattr(found, name)

    if isinstance(default, bool):
        default = "yes" if default else "no"
    return click.prompt(question, default=default, value_proc=check)
