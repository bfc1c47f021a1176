"""Explaining a plan that is given by name."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from accel_fn.base.state import DistState
from accel_fn.cli.output import errors_in_a_line, print_json
from accel_fn.cli.resolve import resolve_or_fail
from accel_fn.errors import ArgumentError, ArgumentTypeError, message
from accel_fn.launcher.processes.environment import settings_variables
from accel_fn.launcher.settings.settings import Settings
from accel_fn.launcher.targets import call_target, load_target
from accel_fn.observe.explain import explain, phases
from accel_fn.step.plan import Plan


def explain_target(
    target: str,
    num_processes: int | None,
    device: str | None,
    config: Path | None = None,
    *,
    as_json: bool,
) -> None:
    """Print the step of the plan that `target` names, as it would be if it were launched from here.

    This process gets the variables that such a launch would give its ranks: the plan reads them.
    """
    settings = resolve_or_fail({}, config=config).settings
    _become_a_rank(settings)
    num_processes = num_processes or settings.num_processes or 1
    with errors_in_a_line():
        state = DistState(world_size=num_processes, device=_device(device))
        plan = _load_plan(target)
    if as_json:
        told = {"num_processes": num_processes, "device": str(state.device)}
        print_json({**told, "phases": phases(plan, state)})
    else:
        explain(plan, state)


def _become_a_rank(settings: Settings) -> None:
    said = {each.name: each.value for each in settings_variables(settings)}
    os.environ.update({name: value for name, value in said.items() if value is not None})


def _device(asked: str | None) -> torch.device:
    """Any device may be asked for: nothing runs."""
    asked = asked or os.environ.get("ACCEL_FN_DEVICE") or None
    if asked is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if found is None else found
    try:
        return torch.device(asked)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ArgumentError(message("explain", "device", "be torch's", asked, reason)) from None


def _load_plan(target: str) -> Plan:
    found = load_target(target, "explain")
    if not isinstance(found, Plan) and callable(found):
        found = call_target(found, target, "explain")
    if not isinstance(found, Plan):
        rule = "name a Plan, or a function that gives one"
        got = f"{target} ({type(found).__name__})"
        raise ArgumentTypeError(message("explain", "target", rule, got))
    return found
