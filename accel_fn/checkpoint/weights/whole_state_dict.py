"""whole_state_dict: the state of a model on the host of the main rank, however it is sharded."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from accel_fn.checkpoint.tied_weights import split_tied
from accel_fn.core.collectives import all_or_none
from accel_fn.core.dtensor import whole
from accel_fn.core.plan import unwrapped
from accel_fn.core.state import DistState, check_state
from accel_fn.core.zero import gathered
from accel_fn.errors import ArgumentTypeError, message


def whole_state_dict(model: nn.Module, state: DistState) -> dict[str, Any]:
    """Copy the whole `state_dict` of a model to the host of the main rank. Every rank calls it.

    For uploads, conversions and checks of your own; `save_model` writes the weights to files. Keys
    are those of the model as it was before it was wrapped or compiled.

    Args:
        model: the plan's model, under any strategy. (Under `local_sgd`, and of what
            a strategy of yours splits into plain tensors, the main rank's own.)
        state: of this rank.

    Returns:
        On the main rank, copies of all tensors on the host: later steps do not change them. Tied
        tensors are one tensor. On the other ranks, an empty dict.

    Raises:
        TypeError: `model` is no `torch.nn.Module`.
        RuntimeError: another rank failed, for example out of memory.

    Cost: one gather of each sharded tensor, one after another, and a copy of the model in the memory of
    the main rank; in a world of several, four small collectives.

    >>> import accel_fn as af
    >>> whole = af.checkpoint.whole_state_dict(model, af.DistState())
    >>> {name: list(value.shape) for name, value in whole.items()}
    {'weight': [1, 4], 'bias': [1]}
    """
    check_state("whole_state_dict", state)
    with gathered(model):
        return _copied(model, state)


def _copied(model: nn.Module, state: DistState) -> dict[str, Any]:
    saved = all_or_none(lambda: _read(model), state, "whole_state_dict")
    tensors = {name: each for name, each in saved.items() if isinstance(each, Tensor)}
    firsts, tied = split_tied(tensors, unwrapped(model))
    failures: list[Exception] = []
    for name, tensor in firsts.items():
        gathered = whole(tensor)
        try:
            saved[name] = gathered.to("cpu", copy=True) if state.is_main else None
        # Not raised at once: other ranks wait in the next gather.
        except Exception as error:
            failures.append(error)
    all_or_none(lambda: _raise_first(failures), state, "whole_state_dict")
    saved |= {name: saved[first] for name, first in tied.items()}
    return saved if state.is_main else {}


def _read(model: nn.Module) -> dict[str, Any]:
    if not isinstance(model, nn.Module):
        rule, got = "be a torch.nn.Module", type(model).__name__
        raise ArgumentTypeError(message("whole_state_dict", "model", rule, got))
    return dict(unwrapped(model).state_dict())


def _raise_first(failures: list[Exception]) -> None:
    for failure in failures:
        raise failure
