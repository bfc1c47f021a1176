"""An optimizer's update as a part of a compiler's graph, and which optimizers can be one."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accel_fn._compiling import compile_function
from accel_fn._errors import LossError, PlanError

Memory = Mapping[Tensor, dict[str, Any]]
Group = dict[str, Any]

_IMPLEMENTATIONS = ("foreach", "fused")
"""Options that choose one: the compiler is one of its own."""


class Captured:
    """`optimizer.step` over gradients that are given, inside of a graph.

    torch's compiler has a way of its own with an `Optimizer`, which needs gradients
    that are there before the graph begins. So the methods of its class are run on an
    object that is none, made anew in the graph from what the optimizer remembers, and
    what it then remembers is written back.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.kind = methods_of(type(optimizer))
        held = ("state", "param_groups")
        self.attributes = {
            name: value
            for name, value in vars(optimizer).items()
            if name not in held and not name.endswith("hooks") and not callable(value)
        }
        self.optimizer = optimizer
        dtype = torch.float32 if device.type == "mps" else torch.float64
        groups = optimizer.param_groups
        self._rates = [torch.zeros((), dtype=dtype, device=device) for _ in groups]
        self._given = [float("nan")] * len(groups)

    def settings(self) -> list[Group]:
        """The hyperparameters of the groups as they are now, learning rates as tensors."""
        return [self._of(index, group) for index, group in enumerate(self.optimizer.param_groups)]

    def _of(self, index: int, group: Group) -> Group:
        settings = group.copy()
        for name in _IMPLEMENTATIONS:
            if name in settings:
                settings[name] = False
        rate = group.get("lr")
        if isinstance(rate, float | int):
            if rate != self._given[index]:
                self._rates[index].fill_(rate)
                self._given[index] = rate
            settings["lr"] = self._rates[index]
        return settings

    def update(
        self,
        groups: Sequence[Group],
        memory: Memory,
        gradients: Mapping[Tensor, Tensor],
        ok: Tensor | None,
    ) -> None:
        """Parameters and memory as after the optimizer's step; as they were where `ok` is False."""
        running = self.kind()
        for name, value in self.attributes.items():
            setattr(running, name, value)
        running.state = {
            each: {name: _widened(value) for name, value in memory[each].items()}
            for each in gradients
        }
        running.param_groups = [
            {**group, "params": [each for each in group["params"] if each in gradients]}
            for group in groups
        ]
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        old = {} if ok is None else {each: each.clone() for each in gradients}
        running.step()
        for parameter, held in running.state.items():
            parameter.grad = None
            if ok is not None:
                parameter.copy_(torch.where(ok, parameter, old[parameter]))
            for name, value in held.items():
                kept = memory[parameter][name]
                if isinstance(value, Tensor):
                    kept.copy_(value if ok is None else torch.where(ok, value, kept))


def _widened(value: Any) -> Any:
    """A copy; of a count or a rate in the precision in which the host would compute with it."""
    if not isinstance(value, Tensor):
        return value
    return value.double() if not value.ndim and value.dtype == torch.float32 else value.clone()


def methods_of(kind: type[Optimizer]) -> Any:
    """A class with the methods of an optimizer's, that is none to the compiler."""
    own: dict[str, Any] = {}
    for each in reversed(kind.__mro__[:-1]):
        own |= {name: _bare(v) for name, v in vars(each).items() if not name.startswith("__")}
    checks = [name for name in own if name.endswith("_graph_capture_health_check")]
    return type(kind.__name__, (), {**own, **dict.fromkeys(checks, _nothing)})


def _bare(member: Any) -> Any:
    """A method without its decorators: profilers, hooks, no_grad, and what keeps the compiler out."""
    return inspect.unwrap(member) if isinstance(member, FunctionType) else member


def _nothing(self: Any) -> None:
    pass


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def gradients_of(
    loss: Tensor, seed: Tensor | None, parameters: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Gradients of a loss, as one operation of a graph; None for parameters that it does not reach."""
    gradients = torch.autograd.grad(loss, parameters, seed, allow_unused=True)
    if all(each is None for each in gradients):
        raise LossError(
            "step: loss_fn must reach the model's parameters by the model given to it, got no gradient"
        )
    return gradients


def keeps_tensors(optimizer: Optimizer, device: torch.device) -> bool:
    """Try an optimizer on a matrix of its own: does it remember tensors between two updates?

    Raises:
        PlanError: it cannot be a part of a graph.
    """
    try:
        trial = _trial(optimizer, device)
        trial.step()
        first = _plain(trial)
        trial.step()
        if first != _plain(trial):
            raise TypeError("it counts in Python's numbers")  # noqa: TRY301
        _compare(trial, device)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise PlanError(
            f'build: compiled(scope="step") must have an optimizer that fits into a graph, got '
            f"{type(optimizer).__name__}: {reason}; use one of torch.optim, such as AdamW, or "
            'scope="loss"'
        ) from error
    (memory,) = trial.state.values() or ({},)
    return any(isinstance(value, Tensor) for value in memory.values())


def _trial(optimizer: Optimizer, device: torch.device) -> Optimizer:
    """An optimizer like this one, of a small matrix."""
    if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        raise TypeError("it runs another optimizer")
    group = optimizer.param_groups[0]
    parameter = torch.nn.Parameter(torch.eye(2, dtype=group["params"][0].dtype, device=device))
    parameter.grad = torch.ones_like(parameter)
    trial: Optimizer = object.__new__(type(optimizer))
    vars(trial).update({name: v for name, v in vars(optimizer).items() if not callable(v)})
    trial.state = defaultdict(dict)
    trial.param_groups = [{**group, "params": [parameter]}]
    return trial


def _plain(trial: Optimizer) -> list[str]:
    """All that an optimizer holds beside tensors, to be compared."""
    held = [vars(trial), *trial.param_groups, *trial.state.values()]
    left_out = ("state", "param_groups", "params")
    return [
        f"{name}={value!r}"
        for each in held
        for name, value in each.items()
        if name not in left_out and not isinstance(value, Tensor)
    ]


def _compare(trial: Optimizer, device: torch.device) -> None:
    """Hold the captured update of a trial against its step, from the same start."""
    (parameter,) = trial.param_groups[0]["params"]
    gradient = parameter.grad
    captured = Captured(trial, device)

    def update(groups: Sequence[Group], memory: Memory) -> None:
        captured.update(groups, memory, {parameter: gradient}, None)

    changed = [parameter, *(v for v in trial.state[parameter].values() if isinstance(v, Tensor))]
    start = [each.detach().clone() for each in changed]
    ends = []
    compiled = compile_function(update, backend="eager", fullgraph=True)
    for run in (lambda: compiled(captured.settings(), trial.state), trial.step):
        with torch.no_grad():
            for tensor, value in zip(changed, start, strict=True):
                tensor.copy_(value)
            parameter.grad = gradient
            run()
        ends.append([each.detach().clone() for each in changed])
    for ours, theirs in zip(*ends, strict=True):
        if not torch.allclose(ours, theirs, rtol=1e-3):
            raise TypeError("in a graph it computes something else")
