"""The random generators of a process: Python's, NumPy's, torch's for host and device."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Any, cast

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from accel_fn.base.state import DistState, check_state, step_name
from accel_fn.errors import check_flag

GENERATORS = threading.RLock()
"""Held while they are seeded and restored: simulated ranks are threads that share them."""


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of all of them, in plain data and tensors."""
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
    """Are these two states of all generators the same?"""
    pairs = zip(tree_leaves(state), tree_leaves(other), strict=True)
    return all(
        torch.equal(each, its) if isinstance(each, torch.Tensor) else each == its
        for each, its in pairs
    )


def restore_random(state: dict[str, Any], device: torch.device) -> None:
    """Restore the states of all of them."""
    version, key, gauss_next = state["python"]
    random.setstate((version, tuple(np.asarray(key).tolist()), gauss_next))
    name, keys, *numbers = state["numpy"]
    # NumPy takes True for 1, and a number that is not finite; it refuses None.
    numbers = [each if type(each) in (int, float) and isfinite(each) else None for each in numbers]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *numbers))
    torch.set_rng_state(state["torch"])
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


@contextmanager
def exclusive_random(device: torch.device) -> Iterator[None]:
    """Restore all of them at the end of the context; no other simulated rank enters it meanwhile."""
    with GENERATORS, restored_random(device):
        yield


@contextmanager
def restored_random(device: torch.device) -> Iterator[None]:
    """Restore all of them at the end of the context, in which ranks may wait for each other."""
    state = random_state(device)
    try:
        yield
    finally:
        restore_random(state, device)


def derive_random(state: DistState) -> None:
    """Seed all of them from (seed, rank, position): for a rank that the saved run did not have."""
    _seed(f"accel_fn {state.seed} {state.data.rank} {_position(state)}", state.device)


def seed_all(state: DistState, *, per_rank: bool = True) -> None:
    """Seed Python's, NumPy's and torch's generators, on the host and the device.

    The seeds come from `state.seed`, the rank's place in `state.data`, `state.step` and `state.call`.
    With one seed on all ranks (`torch.manual_seed(0)`), each rank would draw the same dropout masks for
    different rows. Call it before `resume`: a checkpoint holds the generators of every rank, so a
    resumed run draws what the run would have drawn.

    Args:
        state: of this rank.
        per_rank: False: the same seed on every rank, for draws that ranks share, such as the order of
            your own data or the parameters of a model without `wrap_ddp` or `wrap_fsdp`. (With
            these, all ranks start from the parameters of rank 0.)

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
    """Seed all of them from (seed, position, slot): for a part of the batch, whichever rank has it."""
    _seed(f"accel_fn {state.seed} {_position(state)} slot {slot}", state.device)


def generator_of(state: DistState, name: str) -> torch.Generator:
    """Make a generator on the host, seeded from (seed, position, name): the same on every rank."""
    number = _number(f"accel_fn draw {state.seed} {_position(state)} {name}")
    return torch.Generator().manual_seed(number % 2**63)


def _position(state: DistState) -> str:
    """Name the position of a run in its data, and the step on that batch."""
    return step_name(state.step, state.call)


def _number(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


def _seed(key: str, device: torch.device) -> None:
    number = _number(key)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number % 2**63)
    if device.type != "cpu":
        with torch.accelerator.device_index(device.index):  # `manual_seed` seeds the current one
            torch.get_device_module(device).manual_seed(number % 2**63)
