"""Training steps out of small pure transforms: one script on a CPU, on many GPUs, on many machines.

Names load on first use, so `import accel_fn` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_fn._batch import num_samples as num_samples
    from accel_fn._collectives import barrier as barrier
    from accel_fn._collectives import broadcast as broadcast
    from accel_fn._collectives import on_main as on_main
    from accel_fn._errors import AccelError as AccelError
    from accel_fn._estimating import MemoryEstimate as MemoryEstimate
    from accel_fn._estimating import estimate_memory as estimate_memory
    from accel_fn._evaluating import evaluate as evaluate
    from accel_fn._explain import explain as explain
    from accel_fn._gathering import gather as gather
    from accel_fn._grads import Grads as Grads
    from accel_fn._launch_options import LaunchOptions as LaunchOptions
    from accel_fn._launch_options import launch_options as launch_options
    from accel_fn._plan import Kept as Kept
    from accel_fn._plan import Plan as Plan
    from accel_fn._plan import Report as Report
    from accel_fn._plan import Transform as Transform
    from accel_fn._plan import compose as compose
    from accel_fn._reducing import reduce_mean as reduce_mean
    from accel_fn._reducing import reduce_sum as reduce_sum
    from accel_fn._state import DistState as DistState
    from accel_fn._state import LossScale as LossScale
    from accel_fn._step import Step as Step
    from accel_fn._step import build as build
    from accel_fn._weights import num_labels as num_labels
    from accel_fn._world import distributed as distributed
    from accel_fn._world import init as init
    from accel_fn._wrapping import wrap as wrap
    from accel_fn.checkpoint._accelerate import load_accelerate as load_accelerate
    from accel_fn.checkpoint._listing import Checkpoint as Checkpoint
    from accel_fn.checkpoint._listing import latest as latest
    from accel_fn.checkpoint._listing import list_checkpoints as list_checkpoints
    from accel_fn.checkpoint._loading import load as load
    from accel_fn.checkpoint._saving import save as save
    from accel_fn.checkpoint._weights import load_model as load_model
    from accel_fn.checkpoint._weights import save_model as save_model
    from accel_fn.data._planning import plan_batches as plan_batches
    from accel_fn.data._prefetch import prefetch as prefetch
    from accel_fn.data._seeding import sample_seed as sample_seed
    from accel_fn.data._seeding import seed_samples as seed_samples
    from accel_fn.data._sharding import shard_loader as shard_loader
    from accel_fn.data._window import window as window
    from accel_fn.launching._calling import launch as launch
    from accel_fn.transforms._accumulation import accumulate as accumulate
    from accel_fn.transforms._amp import with_amp as with_amp
    from accel_fn.transforms._averaging import average as average
    from accel_fn.transforms._averaging import averaged as averaged
    from accel_fn.transforms._checkpointing import checkpointed as checkpointed
    from accel_fn.transforms._clipping import clip as clip
    from accel_fn.transforms._clipping import clip_value as clip_value
    from accel_fn.transforms._compilation import compiled as compiled
    from accel_fn.transforms._ddp import wrap_ddp as wrap_ddp
    from accel_fn.transforms._freezing import freeze as freeze
    from accel_fn.transforms._fsdp import wrap_fsdp as wrap_fsdp
    from accel_fn.transforms._local_sgd import local_sgd as local_sgd
    from accel_fn.transforms._placement import place as place
    from accel_fn.transforms._preemption import Preemption as Preemption
    from accel_fn.transforms._replication import check_replicas as check_replicas
    from accel_fn.transforms._reproducing import reproducible as reproducible
    from accel_fn.transforms._schedule import schedule as schedule
    from accel_fn.transforms._skipping import skip_nonfinite as skip_nonfinite
    from accel_fn.transforms._skipping import skip_spikes as skip_spikes

_MODULES = {
    "_batch": ["num_samples"],
    "_collectives": ["barrier", "broadcast", "on_main"],
    "_errors": ["AccelError"],
    "_estimating": ["MemoryEstimate", "estimate_memory"],
    "_evaluating": ["evaluate"],
    "_explain": ["explain"],
    "_gathering": ["gather"],
    "_grads": ["Grads"],
    "_launch_options": ["LaunchOptions", "launch_options"],
    "_plan": ["Kept", "Plan", "Report", "Transform", "compose"],
    "_reducing": ["reduce_mean", "reduce_sum"],
    "_state": ["DistState", "LossScale"],
    "_step": ["Step", "build"],
    "_weights": ["num_labels"],
    "_world": ["distributed", "init"],
    "_wrapping": ["wrap"],
    "checkpoint._accelerate": ["load_accelerate"],
    "checkpoint._listing": ["Checkpoint", "latest", "list_checkpoints"],
    "checkpoint._loading": ["load"],
    "checkpoint._saving": ["save"],
    "checkpoint._weights": ["load_model", "save_model"],
    "data._planning": ["plan_batches"],
    "data._prefetch": ["prefetch"],
    "data._seeding": ["sample_seed", "seed_samples"],
    "data._sharding": ["shard_loader"],
    "data._window": ["window"],
    "launching._calling": ["launch"],
    "transforms._accumulation": ["accumulate"],
    "transforms._amp": ["with_amp"],
    "transforms._averaging": ["average", "averaged"],
    "transforms._checkpointing": ["checkpointed"],
    "transforms._clipping": ["clip", "clip_value"],
    "transforms._compilation": ["compiled"],
    "transforms._ddp": ["wrap_ddp"],
    "transforms._freezing": ["freeze"],
    "transforms._fsdp": ["wrap_fsdp"],
    "transforms._local_sgd": ["local_sgd"],
    "transforms._placement": ["place"],
    "transforms._preemption": ["Preemption"],
    "transforms._replication": ["check_replicas"],
    "transforms._reproducing": ["reproducible"],
    "transforms._schedule": ["schedule"],
    "transforms._skipping": ["skip_nonfinite", "skip_spikes"],
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
_SUBPACKAGES = ("checkpoint", "cli", "data", "launching", "testing", "transforms")

__version__ = "0.1.0"
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBPACKAGES, "__version__"})
