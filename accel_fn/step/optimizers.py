"""The optimizers of a plan: one, or several by name."""

from __future__ import annotations

from collections.abc import Mapping

from torch.optim import Optimizer

from accel_fn.errors import ArgumentError, ArgumentTypeError, message


def check_optimizers(given: object) -> None:
    """Refuse what is neither an optimizer nor several of them by name."""
    named = given if isinstance(given, Mapping) else {"optimizer": given}
    rule = "be a torch.optim.Optimizer, or a mapping of names to such"
    if not named:
        raise ArgumentError(message("Plan", "optimizer", rule, given))
    for name, each in named.items():
        if not isinstance(each, Optimizer):
            repair = _optimizer_repair(each)
            # Several optimizers print themselves on many lines.
            got = type(each).__name__ if repair else each
            raise ArgumentTypeError(message("Plan", "optimizer", rule, got, repair))
        if not isinstance(name, str) or not name or {*"/@"} & {*name}:
            rule = 'be named by strings without "/" and "@"'
            raise ArgumentError(message("Plan", "optimizer", rule, name))
        if name in ("model", "transforms", "frozen"):
            rule = (
                'not be named "model", "transforms" or "frozen", as other parts of a checkpoint are'
            )
            raise ArgumentError(message("Plan", "optimizer", rule, name))
    if len({id(each) for each in named.values()}) < len(named):
        rule = "hold each optimizer once"
        raise ArgumentError(message("Plan", "optimizer", rule, sorted(named)))


def _optimizer_repair(given: object) -> str:
    if isinstance(given, list | tuple):
        return 'name them: {"matrices": muon, "rest": adamw}'
    if hasattr(given, "step") and hasattr(given, "param_groups"):
        return "make your wrapper a subclass of torch.optim.Optimizer, or give what it wraps"
    return ""


def describe_optimizer(given: Optimizer | Mapping[str, Optimizer]) -> str:
    """The class of an optimizer, or of each by name."""
    if isinstance(given, Optimizer):
        return type(given).__name__
    return f"{{{', '.join(f'{name}: {type(each).__name__}' for name, each in given.items())}}}"
