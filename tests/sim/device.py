"""The simulated accelerator `sim`, in this process from the import on; records its host's waits.

It has two devices, whose kernels are the CPU's. device.cpp states what it makes wrong on purpose.
"""

from __future__ import annotations

import contextlib
import importlib.util
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import accel_fn
from tests.sim import build

if build.compiler() is None:
    pytest.skip("the simulated device needs a C++ compiler", allow_module_level=True)

_PACKAGE = str(Path(accel_fn.__file__).parent)


@dataclass(frozen=True)
class Seen:
    """What the device reports: a wait of the host, or a hazard, and the file that caused it."""

    kind: str
    """sync, copy or event: the host waits. staged: it may. hazard: memory is reused too early."""
    what: str
    until: int
    """Of an event: how many kernels had been queued as it was recorded."""
    place: str
    """The innermost file of accel_fn on the stack, without its folder; else the innermost of any."""


def _load() -> Any:
    spec = importlib.util.spec_from_file_location(build.NAME, build.build())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


native = _load()
NUM_DEVICES = native.num_devices()
_listeners: list[list[Seen]] = []
_mode = "default"


def _listen(kind: str, what: str, until: int) -> None:
    frames = traceback.extract_stack()[:-1]
    ours = [frame for frame in frames if frame.filename.startswith(_PACKAGE)]
    place = Path(ours[-1].filename if ours else frames[-1].filename if frames else "").name
    for seen in _listeners:
        seen.append(Seen(kind, what, until, place))
    if _mode == "error" and kind in ("sync", "copy"):
        raise RuntimeError(f"the host waits for the device: {what}")


native.listen(_listen)


@contextlib.contextmanager
def recorded() -> Iterator[list[Seen]]:
    """Record what the device reports while the context is open."""
    seen: list[Seen] = []
    _listeners.append(seen)
    try:
        yield seen
    finally:
        _listeners.remove(seen)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _set_sync_debug_mode(mode: str) -> None:
    global _mode
    _mode = mode


def _manual_seed(seed: int) -> None:
    native.default_generator(torch.accelerator.current_device_index()).manual_seed(seed)


def _manual_seed_all(seed: int) -> None:
    for device in range(NUM_DEVICES):
        native.default_generator(device).manual_seed(seed)


def _limit_memory(fraction: float, device: Any = None) -> None:
    index = torch.accelerator.current_device_index() if device is None else _index(device)
    native.limit_memory(index, int(fraction * native.memory))


def _sleep(cycles: int) -> None:
    native.sleep(torch.accelerator.current_device_index(), cycles)  # of a clock of 1 GHz


def _torch_module() -> types.ModuleType:
    """Make `torch.sim`, what torch and accel_fn look for under a device's name."""
    module = types.ModuleType("torch.sim")
    module.__dict__.update(
        Event=torch.Event,
        Stream=torch.Stream,
        _is_in_bad_fork=lambda: False,
        _sleep=_sleep,
        current_device=torch.accelerator.current_device_index,
        current_stream=torch.accelerator.current_stream,
        default_generators=[native.default_generator(index) for index in range(NUM_DEVICES)],
        device=lambda device: torch.accelerator.device_index(_index(device)),
        device_count=lambda: NUM_DEVICES,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        get_device_properties=lambda device=None: types.SimpleNamespace(total_memory=native.memory),
        get_rng_state=lambda device="sim": native.default_generator(_index(device)).get_state(),
        is_available=lambda: True,
        is_initialized=lambda: True,
        manual_seed=_manual_seed,
        manual_seed_all=_manual_seed_all,
        memory_reserved=torch.accelerator.memory_reserved,
        set_per_process_memory_fraction=_limit_memory,
        set_device=torch.accelerator.set_device_index,
        set_rng_state=lambda state, device="sim": native.default_generator(
            _index(device)
        ).set_state(state),
        set_sync_debug_mode=_set_sync_debug_mode,
        stream=lambda stream: contextlib.nullcontext() if stream is None else stream,
        synchronize=torch.accelerator.synchronize,
    )
    return module


def _collectives(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return native.collectives(dist.ProcessGroupGloo(store, rank, size, timeout))


torch.utils.rename_privateuse1_backend("sim")
torch._register_device_module("sim", _torch_module())
torch.utils.generate_methods_for_privateuse1_backend()
# Else `Module.to` makes new parameters: torch takes the memory of devices that it does not know for
# something else than theirs.
torch.__future__.set_swap_module_params_on_conversion(True)
dist.Backend.register_backend("simccl", _collectives, devices=["sim"])
