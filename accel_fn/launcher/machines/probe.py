"""Print torch's build and devices; run as a script, since a broken torch may crash it."""

from __future__ import annotations

import json
from typing import Any


def main() -> None:
    """Print JSON."""
    import torch

    print(json.dumps(probe(torch)))


def probe(torch: Any) -> dict[str, Any]:
    """Build, threads, communication and devices."""
    distributed = torch.distributed
    available = distributed.is_available()
    return {
        "version": torch.__version__,
        "debug": torch.version.debug,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": _nccl(torch),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "backends": [
            name
            for name in ("gloo", "nccl", "mpi", "ucc", "xccl")
            if available and getattr(distributed, f"is_{name}_available", bool)()
        ],
        "devices": _devices(torch),
    }


def _nccl(torch: Any) -> str | None:
    if torch.version.cuda is None or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _devices(torch: Any) -> list[dict[str, Any]]:
    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator().type
    return [
        {"device": f"{kind}:{index}", **_properties(getattr(torch, kind), index)}
        for index in range(torch.accelerator.device_count())
    ]


def _properties(module: Any, index: int) -> dict[str, Any]:
    """Name, memory and capability, if this kind of device has them."""
    if not hasattr(module, "get_device_properties"):
        return {}
    found = module.get_device_properties(index)
    properties = {
        "name": getattr(found, "name", None),
        "memory": getattr(found, "total_memory", None),
    }
    if hasattr(found, "major"):
        properties["capability"] = f"{found.major}.{found.minor}"
    return {name: value for name, value in properties.items() if value is not None}


if __name__ == "__main__":
    main()
