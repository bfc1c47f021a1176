"""The communication backends of this torch, and which one a device uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_fn.errors import ArgumentError, WorldError, message

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def check_backend(function: str, backend: str | None) -> None:
    """Refuse a backend that this torch does not have; several are written by device, as in torch."""
    if backend is None:
        return
    named = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    there = [name for name in named if dist.is_backend_available(name)]
    if not {part.split(":")[-1].lower() for part in str(backend).split(",")} <= {*there}:
        rule = f"be None or of those that this torch has ({', '.join(there)})"
        raise ArgumentError(message(function, "backend", rule, backend))


def default_backend(device: torch.device, backend: str | None) -> str:
    """Return the backends by device: one for `device`, and Gloo for the host."""
    if device.type == "cpu" or (backend is not None and ":" in backend):
        return backend or "gloo"
    if backend is None and not has_backend(device):
        raise WorldError(
            "init: device must be one that has a backend for several ranks, got "
            f"{device.type!r} in a world of several; pass device='cpu', or the backend that has one"
        )
    return f"cpu:gloo,{device.type}:{backend or dist.get_default_backend_for_device(device)}"


def has_backend(device: torch.device) -> bool:
    """Is there a backend for such devices? For MPS torch names Gloo, which does not support it."""
    name = dist.Backend.default_device_backend_map.get(device.type, "")
    return device.type in dist.Backend.backend_capability.get(name, ())


def device_backend(group: ProcessGroup) -> Any:
    """Return the backend whose collectives an accelerator queues; None where Gloo runs all of them."""
    devices = [each for each in group._device_types if each.type != "cpu"]
    backends = [group._get_backend(each) for each in devices]
    own = next((each for each in backends if each.name() != dist.Backend.GLOO), None)
    return getattr(own, "wrapped_pg", own)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it


def nccl_of(group: ProcessGroup) -> Any:
    """Return the NCCL backend of a group; None where no device uses it."""
    backend = device_backend(group)
    return backend if backend is not None and backend.name() == dist.Backend.NCCL else None


def num_collectives(group: ProcessGroup) -> int | None:
    """The number of collectives of a group so far, over its backends; None if one does not count, as MPI."""
    backends: list[Any] = [group._get_backend(device) for device in group._device_types]
    try:
        return sum(int(each._get_sequence_number_for_group()) for each in backends)
    except RuntimeError:
        return None


def current_world() -> tuple[int, int] | None:
    """Return rank and world size if this process is in a world already."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
