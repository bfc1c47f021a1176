"""The questions of `accel-fn config`, and the file that the answers make."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from accel_fn.errors import SettingsError
from accel_fn.launcher.machines.detect import Machine, detect
from accel_fn.launcher.settings.settings import Settings, check_settings
from accel_fn.launcher.settings.sources import FILE, default_processes
from accel_fn.launcher.settings.write_yaml import render

Ask = Callable[[Mapping[str, object], str, str, object], object]
"""(answers so far, setting, question, default) -> answer."""

_INTERRUPTED = 130
"""What a shell says of a program that Ctrl-C ended."""


def write(output: Path | None, *, ask: bool, force: bool) -> None:
    """Ask, or take the defaults, and write the file."""
    path = output or Path(FILE)
    _check_target(path, force=force)
    if ask and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError(
            "config asks questions and must run in a terminal; --default asks nothing"
        )
    machine = detect()
    if ask:
        click.echo(f"This machine has {machine.devices} and {machine.num_cores} CPU cores.")
    try:
        settings = answered(_ask if ask else _take_default, machine)
    except click.Abort:
        click.echo()
        raise click.exceptions.Exit(_INTERRUPTED) from None
    _save(path, render(settings), force=force)
    click.echo(f"Wrote {path}. `accel-fn config --show` prints what is in force.")


def answered(ask: Ask, machine: Machine) -> Settings:
    """Settings out of the answers; a question whose answer is settled already is not asked."""
    answers: dict[str, object] = {}

    def put(name: str, question: str, default: object) -> object:
        answers[name] = ask(answers, name, question, default)
        return answers[name]

    if put("num_machines", "How many machines (this one included)", 1) != 1:
        put("machine_rank", "Which of them is this one, from 0", 0)
        put("main_process_ip", "Address of machine 0", None)
        put("main_process_port", "A free port on machine 0", 29500)
    cpu = put("cpu", "Train on the CPU, whatever accelerators there are", False)
    if not cpu and machine.num_devices > 1 and machine.kind == "CUDA":
        put("gpu_ids", "Which accelerators, such as 0,1", "all")
    detected, _ = default_processes(check_settings(answers, _where(answers)), machine)
    count = put("num_processes", "How many processes, over all machines", detected)
    put("mixed_precision", "Mixed precision (no, fp16, bf16)", "no")
    if count != 1:
        put("wrap", "Replicas of the model on all ranks, or shards (ddp, fsdp)", "ddp")
    put("num_microbatches", "In how many micro-batches each rank computes its part", 1)
    return check_settings(answers, _where(answers))


def _where(answers: Mapping[str, object]) -> dict[str, str]:
    return dict.fromkeys(answers, "config")


def _ask(answers: Mapping[str, object], name: str, question: str, default: object) -> object:
    """Ask until the answer fits its rule and the answers before."""

    def check(text: object) -> object:
        trial = {**answers, name: text}
        try:
            return getattr(check_settings(trial, _where(trial)), name)
        except SettingsError as error:
            raise click.UsageError(str(error)) from None

    if isinstance(default, bool):
        return click.confirm(question, default=default)
    return click.prompt(question, default=default, value_proc=check)


def _take_default(
    answers: Mapping[str, object], name: str, question: str, default: object
) -> object:
    return default


def _check_target(path: Path, *, force: bool) -> None:
    """What cannot be written is refused before the questions."""
    if path.exists() and not force:
        raise click.ClickException(f"{path} exists; --force overwrites it, --output names another")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise click.ClickException(f"{path} must be in a folder that is there and can be written")


def _save(path: Path, text: str, *, force: bool) -> None:
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from None
