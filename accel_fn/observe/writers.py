"""as_writer: a function of step and values for each kind of run that people log to."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from accel_fn.errors import ArgumentTypeError, message

Write = Callable[[int, Mapping[str, float]], None]


def as_writer(given: Any) -> Write:
    """Return what writes the values of a step to a run, or the given function itself.

    Paths are not for it. Runs are known by the names of their types, so no library is imported.
    Call it on the main rank alone, which has the run.
    """
    check_writer(given)
    kind = _kind_of(given)
    if kind is None:
        write: Write = given
        return write
    make_write, _ = kind
    return make_write(given)


def check_writer(given: object) -> None:
    """Refuse what is neither a run of these libraries nor a function."""
    # A class is callable, too: SummaryWriter in place of SummaryWriter().
    if _kind_of(given) is None and (not callable(given) or isinstance(given, type)):
        rule = (
            "be a path that ends in .jsonl or .csv, a run of tensorboard, tensorboardX, wandb, mlflow, "
            "trackio, aim or swanlab, or a function (step, values)"
        )
        raise ArgumentTypeError(message("log_to", "writers", rule, given))


def write_settings(given: object, plan: str, launch: Mapping[str, object]) -> None:
    """Write the text of a plan and the settings of its launch to a run; a function has no place for them.

    Call it before the first values, with which trackio stores them. A resumed run overwrites them.
    """
    kind = _kind_of(given)
    if kind is not None:
        _, write = kind
        write(given, plan, launch)


def _tensorboard(writer: Any) -> Write:
    # Its thread is a daemon: the last events would be lost with the process.
    atexit.register(writer.close)

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return write


def _tensorboard_settings(writer: Any, plan: str, launch: Mapping[str, object]) -> None:
    lines = [*plan.splitlines(), *(f"{name}: {value}" for name, value in launch.items())]
    # The text is Markdown, in which indented lines stay as they are.
    writer.add_text("accel_fn", "\n".join(f"    {line}" for line in lines), 0)


def _with_log(run: Any) -> Write:
    return lambda step, values: run.log(dict(values), step=step)


def _wandb_settings(run: Any, plan: str, launch: Mapping[str, object]) -> None:
    run.config.update({"accel_fn": {"plan": plan, **launch}}, allow_val_change=True)


def _config_settings(run: Any, plan: str, launch: Mapping[str, object]) -> None:
    run.config.update({"accel_fn": {"plan": plan, **launch}})


def _mlflow(given: Any) -> Write:
    # Looked up once: after the end of the active run, `mlflow` would start another one.
    run_id = _mlflow_run(given).info.run_id
    log_metrics = sys.modules["mlflow"].log_metrics
    return lambda step, values: log_metrics(dict(values), step=step, run_id=run_id)


def _mlflow_settings(given: Any, plan: str, launch: Mapping[str, object]) -> None:
    run, client = _mlflow_run(given), sys.modules["mlflow"].MlflowClient()
    # As tags: a parameter of a run cannot change, and a resumed run may have another world size.
    for name, value in {"plan": plan, **launch}.items():
        client.set_tag(run.info.run_id, f"accel_fn.{name}", str(value))


def _mlflow_run(given: Any) -> Any:
    is_module = isinstance(given, ModuleType)
    return given.active_run() or given.start_run() if is_module else given


def _aim(run: Any) -> Write:
    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            run.track(value, name=name, step=step)

    return write


def _aim_settings(run: Any, plan: str, launch: Mapping[str, object]) -> None:
    run["accel_fn"] = {"plan": plan, **launch}


_Kind = tuple[Callable[[Any], Write], Callable[[Any, str, Mapping[str, object]], None]]
_TENSORBOARD: _Kind = (_tensorboard, _tensorboard_settings)
_WANDB: _Kind = (_with_log, _wandb_settings)
_MLFLOW: _Kind = (_mlflow, _mlflow_settings)
_CONFIGURED: _Kind = (_with_log, _config_settings)

_KINDS: dict[str, _Kind] = {
    "torch.SummaryWriter": _TENSORBOARD,
    "tensorboardX.SummaryWriter": _TENSORBOARD,
    "wandb.Run": _WANDB,
    "wandb": _WANDB,
    "mlflow.Run": _MLFLOW,
    "mlflow": _MLFLOW,
    "trackio.Run": _CONFIGURED,
    "trackio": _CONFIGURED,
    "swanlab.Run": _CONFIGURED,
    "swanlab.SwanLabRun": _CONFIGURED,  # before 0.8
    "swanlab": _CONFIGURED,
    "aim.Run": (_aim, _aim_settings),
}
"""By library and class, or by a library whose module stands for the active run."""


def _kind_of(given: object) -> _Kind | None:
    """Find the kind of a run, of a user's subclass of one too, or of a module."""
    if isinstance(given, ModuleType):
        return _KINDS.get(given.__name__)
    names = (f"{each.__module__.split('.')[0]}.{each.__name__}" for each in type(given).__mro__)
    return next((_KINDS[name] for name in names if name in _KINDS), None)
