"""Seed and restore random generators; restore buffers, modes and forwards of modules."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from accel_fn.core import primitives
from accel_fn.core.collectives import agreed
from accel_fn.core.primitives import bytes_of
from accel_fn.core.state import DistState, check_state, step_name
from accel_fn.errors import check_equal, check_flag

GENERATORS = threading.RLock()
"""The lock for code that seeds generators and restores them later. Simulated ranks are threads,
which share the generators of their process."""


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators, as plain data and tensors."""
    name, keys, position, has_gauss, gauss = cast("Any", np.random.get_state(legacy=True))
    version, key, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "python": [version, torch.from_numpy(np.array(key)), gauss_next],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def is_same_random(state: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two states of all generators are equal."""
    pairs = zip(tree_leaves(state), tree_leaves(other), strict=True)
    return all(
        torch.equal(each, its) if isinstance(each, torch.Tensor) else each == its
        for each, its in pairs
    )


def restore_random(state: dict[str, Any], device: torch.device) -> None:
    """Restore the states of all generators."""
    version, key, gauss_next = state["python"]
    random.setstate((version, tuple(np.asarray(key).tolist()), gauss_next))
    name, keys, *numbers = state["numpy"]
    # Replace invalid numbers by None, so that NumPy raises: it would accept True, inf and nan.
    numbers = [each if type(each) in (int, float) and isfinite(each) else None for each in numbers]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *numbers))
    torch.set_rng_state(state["torch"])
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


def hold_random(device: torch.device) -> Callable[[], None]:
    """Return a function that restores all generators to their current states.

    Use it within a process: unlike the result of `random_state`, these states cannot be saved.
    """
    # Use the generators' native formats: `random_state` takes five times as long.
    python, numpy, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    module = None if device.type == "cpu" else torch.get_device_module(device)
    on_device = None if module is None else module.get_rng_state(device)

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(host)
        if module is not None:
            module.set_rng_state(on_device, device)

    return put_back


@contextmanager
def exclusive_random(device: torch.device) -> Iterator[None]:
    """Restore all generators at the end of the context. Simulated ranks enter it one at a time."""
    with GENERATORS, restored_random(device):
        yield


@contextmanager
def restored_random(device: torch.device) -> Iterator[None]:
    """Restore all generators at the end of the context. Ranks may wait for each other inside it."""
    put_back = hold_random(device)
    try:
        yield
    finally:
        put_back()


def derive_random(state: DistState) -> None:
    """Seed all generators from (seed, rank, position), for a rank that is new in a resumed run."""
    _seed(f"accel_fn {state.seed} {state.data.rank} {_position(state)}", state.device)


def seed_all(state: DistState, *, per_rank: bool = True) -> None:
    """Seed Python's, NumPy's and torch's generators, on the host and the device.

    The seeds come from `state.seed`, the rank's place in `state.data`, `state.step` and
    `state.call`. With one seed on all ranks (`torch.manual_seed(0)`), each rank would draw the same
    dropout masks for different rows. Call it before `resume`: a checkpoint holds the generators of
    every rank, so a resumed run draws the same numbers as an uninterrupted run.

    Args:
        state: this rank's state.
        per_rank: False gives the same seed to every rank, for draws that ranks share, such as the
            order of your own data or the parameters of a model without `wrap_ddp` or `wrap_fsdp`.
            (With these, all ranks start from the parameters of rank 0.)

    Raises:
        TypeError: `per_rank` is not True or False.

    Cost: some microseconds; no collective.

    >>> import torch, accel_fn as af
    >>> state = af.DistState(seed=7)
    >>> af.seed_all(state)
    >>> drawn = torch.rand(3)
    >>> af.seed_all(state)
    >>> bool((torch.rand(3) == drawn).all())
    True
    """
    check_state("seed_all", state)
    check_flag("seed_all", "per_rank", per_rank)
    place = state.data.rank if per_rank else "all"
    _seed(f"accel_fn seed_all {state.seed} {place} {_position(state)}", state.device)


def key_random(state: DistState, slot: int) -> None:
    """Seed all generators from (seed, position, slot), for a slice of the batch on whichever rank has it."""
    _seed(f"accel_fn {state.seed} {_position(state)} slot {slot}", state.device)


def seed_by_name(name: str, device: torch.device) -> None:
    """Seed all generators from a name only, for draws that are equal in all runs and ranks."""
    _seed(f"accel_fn init {name}", device)


def generator_of(state: DistState, name: str) -> torch.Generator:
    """Make a host generator, seeded from (seed, position, name): equal on every rank."""
    number = _number(f"accel_fn draw {state.seed} {_position(state)} {name}")
    return torch.Generator().manual_seed(number % 2**63)


def _position(state: DistState) -> str:
    """Return a run's position in its data, and the number of the step on that batch, as text."""
    return step_name(state.step, state.call)


def _number(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


def _seed(key: str, device: torch.device) -> None:
    number = _number(key)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number % 2**63)
    if device.type != "cpu":
        # `manual_seed` seeds the current device, so make this device the current one.
        with torch.accelerator.device_index(device.index):
            torch.get_device_module(device).manual_seed(number % 2**63)


class BufferCopy(NamedTuple):
    """A buffer, the dict that holds it in its module, its name in the model, and a copy of its value."""

    buffer: Tensor
    home: dict[str, Any]
    path: str
    value: Tensor

    def put_back(self) -> None:
        """Put the original tensor back into its module, with its earlier value."""
        with torch.no_grad():
            self.home[self.path.rpartition(".")[2]] = self.buffer.copy_(self.value)


def copied_buffers(
    modules: Iterable[tuple[str, nn.Module]], *, saved: bool = False
) -> list[BufferCopy]:
    """Copy the buffers of these modules; with `saved`, only those in the model's `state_dict`."""
    return [
        BufferCopy(buffer, module._buffers, f"{path}.{name}", buffer.detach().clone())
        for path, module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and not (saved and name in module._non_persistent_buffers_set)
    ]


@contextmanager
def spare_buffers(model: nn.Module) -> Iterator[None]:
    """Let forwards inside the context write to copies of the buffers, which are then dropped."""
    # Swap tensors instead of copying values back: a backward that has yet to run refuses buffers
    # that were written after its forward.
    homes = [(vars(module)["_buffers"], dict(module._buffers)) for module in model.modules()]
    try:
        for home, own in homes:
            home.update({n: each if each is None else each.clone() for n, each in own.items()})
        yield
    finally:
        for home, own in homes:
            home.update(own)


@contextmanager
def with_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the forwards of modules inside the context; hooks and attributes stay."""
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, own in before.items():
            vars(module).pop("forward")
            if own is not None:
                vars(module)["forward"] = own


def has_modes(optimizer: Any) -> bool:
    """Return whether an optimizer has methods `train` and `eval`."""
    methods = (getattr(optimizer, name, None) for name in ("train", "eval"))
    return all(map(callable, methods))


def in_train_mode(optimizers: Iterable[Any]) -> list[Any]:
    """Select the optimizers in train mode, among those with methods `train` and `eval`."""
    return [
        each
        for each in optimizers
        if has_modes(each) and all(group.get("train_mode", True) for group in each.param_groups)
    ]


@contextmanager
def in_eval_mode(optimizers: Iterable[Any]) -> Iterator[None]:
    """Switch optimizers that are in train mode to eval mode, and back at the end.

    Each switch rounds the parameters once. A resumed run switches as often as an uninterrupted run,
    so both save equal parameters.
    """
    training = in_train_mode(optimizers)
    try:
        for each in training:
            each.eval()
        yield
    finally:
        for each in training:
            each.train()


@contextmanager
def main_buffers(model: nn.Module, state: DistState, function: str) -> Iterator[None]:
    """Copy rank 0's saved buffers to every rank; at the end, restore each rank's own buffers.

    Cost: if the model has saved buffers, two small collectives and one broadcast of them.
    """
    own = copied_buffers(model.named_modules(), saved=True)
    if not own:
        yield
        return
    try:
        _receive(own, state, function)
        yield
    finally:
        for each in own:
            each.put_back()


def _receive(own: Sequence[BufferCopy], state: DistState, function: str) -> None:
    """Overwrite this rank's buffers with the values of rank 0."""
    sent: list[Tensor] = []

    def described() -> list[str]:
        sent.extend(bytes_of(each.value.contiguous()).to(state.device) for each in own)
        return [f"{each.path} {list(each.value.shape)} {each.value.dtype}" for each in own]

    every = agreed(described, state, function)
    common = set.intersection(*map(set, every))
    others = ["; ".join(each for each in specs if each not in common) or "none" for specs in every]
    check_equal(others, f"{function}: model must have the same buffers on all ranks")
    joined = torch.cat(sent)
    primitives.broadcast(joined, state, 0, function)
    parts = torch.split(joined, [each.numel() for each in sent])
    with torch.no_grad():
        for (buffer, *_), part in zip(own, parts, strict=True):
            # Clone the part: a view as a wider dtype must begin at a multiple of that dtype's size.
            buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))
