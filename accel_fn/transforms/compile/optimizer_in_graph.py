"""Run an optimizer's update inside a compiled graph; refuse optimizers for which that fails."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from accel_fn.core.torch_compile import compile_function, reason_of
from accel_fn.errors import LossError, PlanError

Memory = dict[str, Any]
Group = dict[str, Any]

_IN_A_GRAPH = {"foreach": False, "fused": False, "capturable": True}
"""The options that select the implementation in plain operations, which a compiler needs."""


class Captured:
    """Runs the update of `optimizer.step` inside a graph, with given gradients.

    torch's compiler treats an `Optimizer` specially, and needs gradients that exist before the
    graph begins. So the optimizer's methods run on another object, which the graph makes from the
    optimizer's state. The new state is then written back.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[Tensor], device: torch.device
    ) -> None:
        self._optimizer = optimizer
        self._kind = methods_of(optimizer)
        groups = optimizer.param_groups
        numbers = {each: number for number, each in enumerate(parameters)}
        self._members = [[numbers[p] for p in group["params"] if p in numbers] for group in groups]
        self._parameters = parameters
        # On a CPU, compute counts and rates in float64, as the host would. In a graph for an
        # accelerator, the compiler computes them inside each loop over elements, where float64 is
        # slow.
        doubles = (torch.float64, torch.complex128)
        self._is_wide = device.type == "cpu" or any(each.dtype in doubles for each in parameters)
        dtype = torch.float64 if self._is_wide else torch.float32
        self.rates = torch.zeros(len(groups), dtype=dtype, device=device)
        """Learning rates of the groups, as a tensor: each new number would need another graph."""
        self._seen: list[Group] = [{} for _ in groups]
        self._settings: list[Group] = [{} for _ in groups]
        self._around: AbstractContextManager[Any] = nullcontext()
        """The context in which the optimizer's step runs."""

    def settings(self) -> list[Group]:
        """Return the current hyperparameters of the groups, except learning rates that are numbers.

        An unchanged dict stays the same object, which guards check quickly.
        """
        for index, group in enumerate(self._optimizer.param_groups):
            if group != self._seen[index]:
                self._follow(index, group)
        return self._settings

    def _follow(self, index: int, group: Group) -> None:
        settings, seen = self._settings[index], self._seen[index]
        for name, value in group.items():
            if name in seen and seen[name] is value:
                continue
            moves = name in seen and seen[name] != value
            seen[name] = value
            if name == "lr" and isinstance(value, float | int):
                self.rates[index] = value
                # If the rate was a tensor before, it is still among the settings: remove it there.
                settings.pop(name, None)
            elif name != "params":
                if moves:
                    # From now on, pass numbers that change as inputs of the graph. As a constant,
                    # each new value of a number would need another graph.
                    self._around = Factored()
                settings[name] = _IN_A_GRAPH.get(name, value)

    def memory(self) -> list[Memory]:
        """Return the optimizer's current state for each parameter."""
        state = self._optimizer.state
        return [state.get(each, {}) for each in self._parameters]

    def settle(self) -> None:
        """Mark the optimizer's state as staying at its address, which CUDA graphs require."""
        for held in self.memory():
            for value in held.values():
                if isinstance(value, Tensor) and value.is_cuda:
                    torch._dynamo.mark_static_address(value)

    def update(
        self,
        groups: Sequence[Group],
        rates: Tensor,
        memory: Sequence[Memory],
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        ok: Tensor | None,
    ) -> None:
        """Update parameters and state as the optimizer's step does, unless `ok` is False."""
        running = self._kind()
        reached = []
        running.state, running.param_groups = {}, []
        for group, rate, numbers in zip(groups, rates, self._members, strict=True):
            members = []
            for number in numbers:
                parameter, gradient = parameters[number], gradients[number]
                if gradient is not None:
                    parameter.grad = gradient
                    held = {
                        name: _working_copy(value, is_wide=self._is_wide)
                        for name, value in memory[number].items()
                    }
                    running.state[parameter] = held
                    members.append(parameter)
                    reached.append((parameter, parameter.clone(), held, memory[number]))
            running.param_groups.append({"lr": rate, **group, "params": members})
        with self._around:
            running.step()
        for parameter, old, held, remembered in reached:
            parameter.grad = None
            if ok is not None:
                parameter.copy_(torch.where(ok, parameter, old))
            for name, value in held.items():
                if isinstance(value, Tensor):
                    if name not in remembered:
                        raise LossError(
                            "loss_fn reaches a parameter that it did not at first, or a setting of the "
                            "optimizer, such as a momentum that was 0, needs state that it did not"
                        )
                    kept = remembered[name]
                    kept.copy_(value if ok is None else torch.where(ok, value, kept))


def _working_copy(value: Any, *, is_wide: bool) -> Any:
    """Copy a value; widen a count or a rate to the precision that the host would use."""
    if not isinstance(value, Tensor):
        return value
    widens = is_wide and not value.ndim and value.dtype == torch.float32
    return value.double() if widens else value.clone()


def methods_of(optimizer: Optimizer) -> Any:
    """Make a class with an optimizer's methods that the compiler does not treat as an optimizer."""
    own: dict[str, Any] = {}
    for each in reversed(type(optimizer).__mro__[:-1]):
        own |= {name: _bare(v) for name, v in vars(each).items() if not name.startswith("__")}
    own |= {name: v for name, v in vars(optimizer).items() if name not in own}
    checks = [name for name in own if name.endswith("_graph_capture_health_check")]
    return type(type(optimizer).__name__, (), {**own, **dict.fromkeys(checks, _nothing)})


def _bare(member: Any) -> Any:
    """Return a method without decorators, such as profilers, no_grad and compiler stops."""
    return inspect.unwrap(member) if isinstance(member, FunctionType) else member


def _nothing(self: Any) -> None:
    pass


def gradients_of(
    loss: Tensor, seed: Tensor | None, parameters: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Compute gradients in one operation of a graph; None for parameters that the loss does not reach."""
    gradients = torch.autograd.grad(loss, parameters, seed, allow_unused=True)
    if all(each is None for each in gradients):
        raise LossError(
            "step: loss_fn must reach the model's parameters by the model given to it, got no gradient"
        )
    return gradients


def keeps_tensors(optimizer: Optimizer, device: torch.device) -> bool:
    """Return whether an optimizer keeps tensors; refuse an optimizer that no graph can hold."""
    if device.type != "cpu" and any(map(_counts_on_host, optimizer.param_groups)):
        options = [each for each in ("capturable", "fused") if each in optimizer.param_groups[0]]
        repair = f"make it with {' or '.join(f'{each}=True' for each in options)}"
        raise _misfit(optimizer, "it counts on the host", repair)
    try:
        trial = _trial(optimizer, device)
        trial.step()
        first = _plain(trial)
        trial.step()
        if first != _plain(trial):
            raise TypeError("it counts in Python's numbers, or in tensors outside of its state")
        _check_own_state(_trial(optimizer, device, num_parameters=2))
        _compare(trial, device)
    except Exception as error:
        empty = f"it looks for {error} in its state before the first update has made any"
        reason = empty if isinstance(error, KeyError) else reason_of(error)
        raise _misfit(optimizer, reason, "use one of torch.optim, such as AdamW") from error
    (memory,) = trial.state.values() or ({},)
    return any(isinstance(value, Tensor) for value in memory.values())


def _misfit(optimizer: Optimizer, reason: str, repair: str) -> PlanError:
    return PlanError(
        'build: compiled(scope="step") must have an optimizer that fits into a graph, got '
        f'{type(optimizer).__name__}: {reason}; {repair}, or use scope="loss"'
    )


def _check_own_state(trial: Optimizer) -> None:
    """Refuse an optimizer that stores, under one parameter, state that belongs to all of them."""
    trial.step()
    of_each = [trial.state[p].keys() for p in trial.param_groups[0]["params"]]
    if any(names != of_each[0] for names in of_each):
        raise TypeError("it keeps state of all parameters with one of them")


def _trial(optimizer: Optimizer, device: torch.device, num_parameters: int = 1) -> Optimizer:
    """Copy an optimizer, but with small matrices as its parameters, for a trial."""
    if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        raise TypeError("it runs another optimizer")
    group = optimizer.param_groups[0]
    start = torch.eye(2, dtype=group["params"][0].dtype, device=device)
    parameters = [torch.nn.Parameter(start.clone()) for _ in range(num_parameters)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    trial: Optimizer = object.__new__(type(optimizer))
    own = {name: v for name, v in vars(optimizer).items() if not callable(v)}
    vars(trial).update(_copied(own))
    trial.state = defaultdict(dict)
    trial.param_groups = [{**_copied(group), "params": parameters}]
    return trial


def _copied(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the settings and their tensors, since a trial may write to them."""
    return {name: v.clone() if isinstance(v, Tensor) else v for name, v in settings.items()}


def _counts_on_host(group: Group) -> bool:
    return "capturable" in group and not (group["capturable"] or group.get("fused"))


def _plain(trial: Optimizer) -> list[str]:
    """Return the values of an optimizer as text, to compare them; leave out the tensors of its state."""
    state = [
        {name: v for name, v in each.items() if not isinstance(v, Tensor)}
        for each in trial.state.values()
    ]
    left_out = ("state", "param_groups", "params")
    return [
        f"{name}={value!r}"
        for each in [vars(trial), *trial.param_groups, *state]
        for name, value in each.items()
        if name not in left_out
    ]


def _compare(trial: Optimizer, device: torch.device) -> None:
    """From one start, compare the captured update of a trial with the step of the optimizer itself."""
    (parameter,) = trial.param_groups[0]["params"]
    gradient = parameter.grad
    captured = Captured(trial, [parameter], device)

    def update(groups: Sequence[Group], rates: Tensor, memory: Sequence[Memory]) -> None:
        captured.update(groups, rates, memory, [parameter], [gradient], None)

    changed = [parameter, *(v for v in trial.state[parameter].values() if isinstance(v, Tensor))]
    start = [each.detach().clone() for each in changed]
    ends = []
    compiled = compile_function(update, backend="eager", fullgraph=True)
    for run in (
        lambda: compiled(captured.settings(), captured.rates, captured.memory()),
        trial.step,
    ):
        with torch.no_grad():
            for tensor, value in zip(changed, start, strict=True):
                tensor.copy_(value)
            parameter.grad = gradient
            run()
        ends.append([each.detach().clone() for each in changed])
    for ours, theirs in zip(*ends, strict=True):
        if not torch.allclose(ours, theirs, rtol=1e-3):
            raise TypeError("in a graph it computes something else")


class Factored(TorchFunctionMode):
    """A mode that computes operations with a scalar option, such as `alpha`, by products of tensors.

    A compiler can make a number an input of a graph if tensors are multiplied by it. If the number
    is, for example, the weight of `lerp_`, it is a constant of the graph, and each new value needs
    another graph.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first, *others = args
        if func in (Tensor.add, Tensor.add_) and "alpha" in kwargs:
            return func(first, others[0] * kwargs["alpha"])
        if func is Tensor.addcmul_ and "value" in kwargs:
            return first.add_(others[0] * others[1] * kwargs["value"])
        if func is Tensor.addcdiv_ and "value" in kwargs:
            return first.add_(others[0] / others[1] * kwargs["value"])
        if func is Tensor.lerp_ and not isinstance(others[1], Tensor):
            return first.add_((others[0] - first) * others[1])
        if func is Tensor.__rpow__ and not isinstance(others[0], Tensor):
            return (torch.zeros_like(first) + others[0]) ** first
        return func(*args, **kwargs)
