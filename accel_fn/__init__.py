"""Training steps out of small pure transforms: one script on a CPU, on many GPUs, on many machines.

Names load on first use, so `import accel_fn` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_fn import errors as errors
    from accel_fn import testing as testing
    from accel_fn.base.batch import num_samples as num_samples
    from accel_fn.base.batch import to_device as to_device
    from accel_fn.base.launch_options import LaunchOptions as LaunchOptions
    from accel_fn.base.launch_options import launch_options as launch_options
    from accel_fn.base.rng import seed_all as seed_all
    from accel_fn.base.samples import samples as samples
    from accel_fn.base.state import DistState as DistState
    from accel_fn.base.state import LossScale as LossScale
    from accel_fn.base.weights import num_labels as num_labels
    from accel_fn.checkpoint.from_accelerate import load_accelerate as load_accelerate
    from accel_fn.checkpoint.listing import Checkpoint as Checkpoint
    from accel_fn.checkpoint.listing import latest as latest
    from accel_fn.checkpoint.listing import list_checkpoints as list_checkpoints
    from accel_fn.checkpoint.load import load as load
    from accel_fn.checkpoint.resume import resume as resume
    from accel_fn.checkpoint.save import save as save
    from accel_fn.checkpoint.weights.save_load_model import load_model as load_model
    from accel_fn.checkpoint.weights.save_load_model import save_model as save_model
    from accel_fn.checkpoint.weights.whole_state_dict import whole_state_dict as whole_state_dict
    from accel_fn.comm.collectives import any_rank as any_rank
    from accel_fn.comm.collectives import barrier as barrier
    from accel_fn.comm.collectives import broadcast as broadcast
    from accel_fn.comm.gather import gather as gather
    from accel_fn.comm.main_rank import main_first as main_first
    from accel_fn.comm.main_rank import on_main as on_main
    from accel_fn.comm.main_rank import on_main_only as on_main_only
    from accel_fn.comm.main_rank import print_on_main as print_on_main
    from accel_fn.comm.reduce import reduce_max as reduce_max
    from accel_fn.comm.reduce import reduce_mean as reduce_mean
    from accel_fn.comm.reduce import reduce_min as reduce_min
    from accel_fn.comm.reduce import reduce_sum as reduce_sum
    from accel_fn.comm.world import distributed as distributed
    from accel_fn.comm.world import init as init
    from accel_fn.data.draw import draw as draw
    from accel_fn.data.loader import Epoch as Epoch
    from accel_fn.data.loader import ShardedLoader as ShardedLoader
    from accel_fn.data.part import part as part
    from accel_fn.data.plan_batches import plan_batches as plan_batches
    from accel_fn.data.prefetch import prefetch as prefetch
    from accel_fn.data.seed_samples import sample_seed as sample_seed
    from accel_fn.data.seed_samples import seed_samples as seed_samples
    from accel_fn.data.shard_loader import shard_loader as shard_loader
    from accel_fn.data.window import window as window
    from accel_fn.errors import AccelError as AccelError
    from accel_fn.launcher.function.launch import launch as launch
    from accel_fn.observe.estimate_memory import MemoryEstimate as MemoryEstimate
    from accel_fn.observe.estimate_memory import estimate_memory as estimate_memory
    from accel_fn.observe.evaluate import evaluate as evaluate
    from accel_fn.observe.explain import explain as explain
    from accel_fn.observe.log_to import log_to as log_to
    from accel_fn.observe.log_to import log_values as log_values
    from accel_fn.observe.predict import predict as predict
    from accel_fn.observe.profile import profile as profile
    from accel_fn.observe.progress import progress as progress
    from accel_fn.step.autocast import autocast as autocast
    from accel_fn.step.build import build as build
    from accel_fn.step.grads import Grads as Grads
    from accel_fn.step.plan import GradFn as GradFn
    from accel_fn.step.plan import Plan as Plan
    from accel_fn.step.plan import SlotFunction as SlotFunction
    from accel_fn.step.plan import Stateful as Stateful
    from accel_fn.step.report import Report as Report
    from accel_fn.step.step import Step as Step
    from accel_fn.step.strategy import Strategy as Strategy
    from accel_fn.step.transform import Transform as Transform
    from accel_fn.step.transform import compose as compose
    from accel_fn.transforms.accumulate.accumulate import accumulate as accumulate
    from accel_fn.transforms.activation_checkpointing import (
        checkpoint_activations as checkpoint_activations,
    )
    from accel_fn.transforms.amp.amp import compute_dtype as compute_dtype
    from accel_fn.transforms.amp.amp import with_amp as with_amp
    from accel_fn.transforms.average import average as average
    from accel_fn.transforms.average import use_average as use_average
    from accel_fn.transforms.check_replicas import check_replicas as check_replicas
    from accel_fn.transforms.clip import clip as clip
    from accel_fn.transforms.clip import clip_value as clip_value
    from accel_fn.transforms.compile.compiled import compiled as compiled
    from accel_fn.transforms.ddp.ddp import wrap_ddp as wrap_ddp
    from accel_fn.transforms.freeze import freeze as freeze
    from accel_fn.transforms.fsdp.fsdp import wrap_fsdp as wrap_fsdp
    from accel_fn.transforms.local_sgd.local_sgd import local_sgd as local_sgd
    from accel_fn.transforms.place import place as place
    from accel_fn.transforms.preemption import Preemption as Preemption
    from accel_fn.transforms.reproducible.reproducible import reproducible as reproducible
    from accel_fn.transforms.schedule.schedule import schedule as schedule
    from accel_fn.transforms.skip import skip_nonfinite as skip_nonfinite
    from accel_fn.transforms.skip import skip_spikes as skip_spikes
    from accel_fn.transforms.when import when as when
    from accel_fn.transforms.wrap import wrap as wrap

_MODULES = {
    "base.batch": ["num_samples", "to_device"],
    "base.rng": ["seed_all"],
    "comm.collectives": ["any_rank", "barrier", "broadcast"],
    "comm.main_rank": ["main_first", "on_main", "on_main_only", "print_on_main"],
    "errors": ["AccelError"],
    "observe.estimate_memory": ["MemoryEstimate", "estimate_memory"],
    "observe.evaluate": ["evaluate"],
    "observe.explain": ["explain"],
    "observe.log_to": ["log_to", "log_values"],
    "observe.predict": ["predict"],
    "observe.progress": ["progress"],
    "observe.profile": ["profile"],
    "comm.gather": ["gather"],
    "step.grads": ["Grads"],
    "base.launch_options": ["LaunchOptions", "launch_options"],
    "step.autocast": ["autocast"],
    "step.build": ["build"],
    "step.plan": ["GradFn", "Plan", "SlotFunction", "Stateful"],
    "step.report": ["Report"],
    "step.strategy": ["Strategy"],
    "step.transform": ["Transform", "compose"],
    "comm.reduce": ["reduce_max", "reduce_mean", "reduce_min", "reduce_sum"],
    "base.samples": ["samples"],
    "base.state": ["DistState", "LossScale"],
    "step.step": ["Step"],
    "base.weights": ["num_labels"],
    "comm.world": ["distributed", "init"],
    "transforms.wrap": ["wrap"],
    "checkpoint.from_accelerate": ["load_accelerate"],
    "checkpoint.listing": ["Checkpoint", "latest", "list_checkpoints"],
    "checkpoint.load": ["load"],
    "checkpoint.resume": ["resume"],
    "checkpoint.save": ["save"],
    "checkpoint.weights.save_load_model": ["load_model", "save_model"],
    "checkpoint.weights.whole_state_dict": ["whole_state_dict"],
    "data.draw": ["draw"],
    "data.loader": ["Epoch", "ShardedLoader"],
    "data.part": ["part"],
    "data.plan_batches": ["plan_batches"],
    "data.prefetch": ["prefetch"],
    "data.seed_samples": ["sample_seed", "seed_samples"],
    "data.shard_loader": ["shard_loader"],
    "data.window": ["window"],
    "launcher.function.launch": ["launch"],
    "transforms.accumulate.accumulate": ["accumulate"],
    "transforms.amp.amp": ["compute_dtype", "with_amp"],
    "transforms.average": ["average", "use_average"],
    "transforms.activation_checkpointing": ["checkpoint_activations"],
    "transforms.clip": ["clip", "clip_value"],
    "transforms.compile.compiled": ["compiled"],
    "transforms.ddp.ddp": ["wrap_ddp"],
    "transforms.freeze": ["freeze"],
    "transforms.fsdp.fsdp": ["wrap_fsdp"],
    "transforms.local_sgd.local_sgd": ["local_sgd"],
    "transforms.place": ["place"],
    "transforms.preemption": ["Preemption"],
    "transforms.check_replicas": ["check_replicas"],
    "transforms.reproducible.reproducible": ["reproducible"],
    "transforms.schedule.schedule": ["schedule"],
    "transforms.skip": ["skip_nonfinite", "skip_spikes"],
    "transforms.when": ["when"],
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
_PUBLIC_MODULES = ("errors", "testing")

__version__ = "0.1.0"
__all__ = sorted(_HOMES)


if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name in _PUBLIC_MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_PUBLIC_MODULES, "__version__"})
