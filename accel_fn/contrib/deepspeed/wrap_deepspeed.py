"""wrap_deepspeed: train one model on all ranks with DeepSpeed's ZeRO."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.optim import Adafactor, Adagrad, Muon, Optimizer

from accel_fn import DistState, Plan
from accel_fn.contrib.deepspeed.engine import OneRank, ZeRO
from accel_fn.contrib.deepspeed.settings import (
    bound_of,
    check_agrees,
    device_of,
    offloads,
    read_settings,
)
from accel_fn.errors import ExtraError, PlanError, message
from accel_fn.extend import SlotFunction, Strategy, describe, fill, transform

if TYPE_CHECKING:
    from accel_fn import Transform

_REFUSED_SLOTS = (
    "shard_model",
    "compile_loss",
    "compile_step",
    "wrap_grad_fn",
    "accept",
    "gradients",
)
_NOT_FLAT = (Adafactor, Adagrad, Muon)
"""Optimizers that use a parameter's shape, or that DeepSpeed replaces by another optimizer."""


@transform
def wrap_deepspeed(
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    stage: Literal[0, 1, 2, 3] | None = None,
    offload: Literal["cpu", "nvme"] | None = None,
    nvme_path: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Transform:
    """Train one model on all ranks by DeepSpeed's ZeRO.

    Stage 0 keeps replicas. Stage 1 shards the optimizer's state, stage 2 gradients too, stage 3 also
    parameters. DeepSpeed's engine averages gradients, clips them by the bound of the plan's `clip`
    (the smallest one, if there are several) and runs the plan's optimizer on flat shards. Weights,
    micro-batches, autocast and schedules stay those of the step. The model starts from rank 0's parameters
    and buffers. In a world of one it is a no-op, and DeepSpeed is not imported, unless `offload` is given.

    The engine keeps the gradients. From stage 1 on, a parameter that the loss does not reach gets a
    gradient of zeros. A model has one engine: after a step that failed, make it again, and build.

    Law: W ranks give the result of one rank, for every W, uneven parts, any weights, an empty rank.
    Tests: `tests/contrib/deepspeed/engine/test_deepspeed.py`.

    Args:
        config: DeepSpeed's configuration: a mapping, or the path of its JSON file. For "auto" and
            for missing settings, the plan's value counts, or DeepSpeed's default. Three sizes of
            buckets with "auto" follow the hidden size in `model.config`, if it is there. Settings
            that differ from the plan are refused.
        stage: the stage of ZeRO. Default: the stage in `config`, else 2.
        offload: "cpu": keep optimizer state, and at stage 3 parameters, in host memory. "nvme", at stage 3:
            keep optimizer state in files, and parameters in host memory, or as `offload_param` in `config`.
        nvme_path: the folder of these files, which no other plan may use.
        **settings: more entries of DeepSpeed's configuration, such as `zero_optimization={...}`. With state
            in files `sub_group_size` is 1, and with parameters there `stage3_prefetch_bucket_size` is 0.

    Returns:
        A transform. The report's `grad_norm` is the engine's: at stage 0 with `clip` alone, else always.
        From stage 1 on, an update by gradients that are not finite is skipped.

    Raises:
        ValueError: `stage` is not 0, 1, 2 or 3, `offload` is not one of its values, or is "nvme"
            below stage 3 or without `nvme_path`, `config` is not a file with a JSON object, a
            setting is given twice with two values, misspelled or in the wrong section, or a batch
            size, a scheduler, a tracker or another parallelism is given. In `build`, on all ranks:
            a setting that differs from the plan; several optimizers, or one with train and eval modes, state,
            a group without trained parameters, or an update that needs the shapes of parameters; trained
            parameters that are not float32, or tables with sparse gradients; a loss scale, and functions in
            the slots `accept`, `gradients` (but `clip`), `wrap_grad_fn`, `compile_loss`, `compile_step` and
            `shard_model`; at stage 3 `ema`, `check_replicas`, `torch.compile` and parameters of no
            dimensions; ranks that are threads; a model of a
            former step; another device than DeepSpeed's; the lock of a build of DeepSpeed's C++ code; "nvme"
            without libaio; and parameters in files on a device without fp16. From a step: a loss that reaches
            no parameter, one of another engine, or not the same on all ranks (checked in some of
            the first batches), or parameters written after `build` (checked there, too); a backward
            beside the step; another step after one that failed; at stage 3 a batch without weight
            on all ranks. From `step.grads` and `step.update`; from stage 1 on, from `load_model`
            and `load_accelerate`, and from `load` if the optimizer has made another number of
            updates to some parameters of a group.
        TypeError: an argument is of the wrong type.
        ModuleNotFoundError: in `build`, on several ranks or with `offload`, without the extra `deepspeed`.

    Cost: DeepSpeed's: in each backward, or in the last one at stages 0 and 1, a reduction of the gradients;
        in the update a gather of parameters (stages 1 and 2); at stage 3 a gather of each module's parameters
        in each forward and backward. Beside them, two small collectives on the host and one of
        a number; from stage 1 on, one more, and as many micro-batches on every rank. The first
        start on a machine compiles C++ code, which takes minutes.

    Source: Rajbhandari et al. 2020, arXiv:1910.02054; Ren et al. 2021, arXiv:2101.06840.

    >>> import accel_fn as af
    >>> af.wrap_deepspeed(stage=2)(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=count_samples, strategy=[wrap_deepspeed(stage=2)])
    """
    found = read_settings(config, stage, offload, nvme_path, settings)
    return fill(strategy=DeepSpeedSlot(make_zero, settings=found, clips=()))


class DeepSpeedSlot(SlotFunction):
    """The slot function of wrap_deepspeed: it calls `make_zero` with its settings."""

    @property
    def traits(self) -> frozenset[str]:  # type: ignore[override]
        """Return the traits: from stage 1 on "may_skip", and at stage 3, whose forwards gather, "shards"."""
        shards = {"shards"} if self._stage == 3 else set()
        skips = {"may_skip"} if self._stage else set()
        return frozenset({"collectives_in_apply", *shards, *skips})

    @property
    def _stage(self) -> int:
        stage: int = self.keywords["settings"]["zero_optimization"]["stage"]
        return stage

    def num_parts(self, size: int) -> Mapping[str, int]:
        """Return the number of parts into which `size` ranks divide each kind of memory at this stage."""
        return dict.fromkeys(("optimizer", "gradients", "parameters")[: self._stage], size)

    def share(self, plan: Plan, meshes: Mapping[str, Any]) -> None:
        """For an estimate of memory, replace each group by one flat float32 shard, as the engine does."""
        if self._stage and "dp" in meshes:
            (optimizer,) = plan.optimizers.values()
            for group in optimizer.param_groups:
                size = sum(each.numel() for each in group["params"] if each.requires_grad)
                group["params"] = [nn.Parameter(torch.empty(-(-size // meshes["dp"].size())))]

    def claim(self, plan: Plan) -> Plan:
        """Move the transforms that clip by norm from the plan to this function, since the engine clips."""
        clips = tuple(plan.having("clips_norm"))
        rest = tuple(each for each in plan.gradients if each not in clips)
        strategy = tuple(self._with(clips) if each is self else each for each in plan.strategy)
        return replace(plan, gradients=rest, strategy=strategy)

    def _with(self, clips: tuple[Any, ...]) -> Self:
        other = type(self)(self.func, **{**self.keywords, "clips": clips})
        other.source, other.call = self.source, self.call
        return other

    def validate(self, state: DistState, plan: Plan) -> None:
        """Refuse a plan, settings or a machine with which the engine would fail or train differently."""
        for slot in _REFUSED_SLOTS:
            if getattr(plan, slot):
                calls = " and ".join(map(describe, getattr(plan, slot)))
                raise PlanError(
                    f"build: wrap_deepspeed must make the update itself, got {calls} in {slot}; "
                    "leave it out, or use wrap_fsdp"
                )
        replicas = plan.having("needs_equal_replicas") if self._stage == 3 else ()
        if replicas:
            raise PlanError(
                "build: wrap_deepspeed(stage=3) must not be combined with what needs whole parameters, got "
                f"{' and '.join(map(describe, replicas))}; leave it out, or use a lower stage"
            )
        _check_optimizer(plan, self._stage)
        _check_parameters(plan)
        if self._stage == 3 and any(hasattr(m, "_orig_mod") for m in plan.model.modules()):
            rule, repair = "be called without torch.compile", "leave it out, or use a lower stage"
            model = "wrap_deepspeed(stage=3)'s model"
            raise PlanError(message("build", model, rule, "torch.compile(...)", repair))
        scalars = [name for name, each in plan.model.named_parameters() if not each.dim()]
        if self._stage == 3 and scalars:
            rule = "be of one dimension or more"
            parameters = "wrap_deepspeed(stage=3)'s parameters"
            repair = "make them by torch.ones(1), for example, or use a lower stage"
            raise PlanError(message("build", parameters, rule, scalars[0], repair))
        check_agrees(self.keywords["settings"], plan, bound_of(self.keywords["clips"]))
        if state.world_size == 1 and not offloads(self.keywords["settings"]):
            return
        check_installed()
        _check_world(state)
        check_lock(state, offloads(self.keywords["settings"]))
        _check_files(self.keywords["settings"])


def _check_optimizer(plan: Plan, stage: int) -> None:
    if len(plan.optimizers) > 1:
        names = " and ".join(plan.optimizers)
        raise PlanError(
            f"build: wrap_deepspeed must have one optimizer, got {names}; use groups of one optimizer, or "
            "wrap_fsdp"
        )
    (optimizer,) = plan.optimizers.values()
    name = type(optimizer).__name__
    groups = optimizer.param_groups
    rules = {
        "have no train and eval modes; use another, or wrap_fsdp": not _has_modes(optimizer),
        "have a trained parameter in every group; leave out the group": all(
            any(each.requires_grad for each in group["params"]) for group in groups
        ),
        "update flat shards element by element; use AdamW, for example, or stage=0": not stage
        or not isinstance(optimizer, _NOT_FLAT),
        "have no state yet, since the engine starts a new one; make a new optimizer": not optimizer.state
        or not stage,
    }
    for text, holds in rules.items():
        if not holds:
            rule, repair = text.split("; ")
            raise PlanError(message("build", "wrap_deepspeed's optimizer", rule, name, repair))


def _has_modes(optimizer: Optimizer) -> bool:
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def _check_parameters(plan: Plan) -> None:
    modules = plan.model.named_modules()
    tables = {name: m for name, m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    for name in [name for name, table in tables.items() if table.sparse]:
        rule, repair = "have dense gradients", "use sparse=False, or wrap_ddp"
        raise PlanError(message("build", "wrap_deepspeed's model", rule, name, repair))
    for name, parameter in plan.model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise PlanError(
                "build: wrap_deepspeed's model must train float32 parameters, got "
                f"{str(parameter.dtype).removeprefix('torch.')} {name}; use model.float(), and "
                'with_amp("bf16")'
            )


def check_installed() -> None:
    """Raise an error that names the extra if DeepSpeed is not installed."""
    try:
        import deepspeed  # noqa: F401
    except ModuleNotFoundError as error:
        raise ExtraError(
            f"wrap_deepspeed: {error.name} must be installed; in a clone of accel_fn: "
            'pip install ".[deepspeed]"',
            name=error.name,
        ) from None


def _check_world(state: DistState) -> None:
    """Refuse ranks and devices that DeepSpeed does not support."""
    from deepspeed.accelerator import get_accelerator

    is_there = torch.distributed.is_initialized()
    num = torch.distributed.get_world_size() if is_there else 1
    if num != state.world_size:
        raise PlanError(
            "build: wrap_deepspeed must have all ranks of torch's default process group, which are "
            f"{num}, got {state.world_size}; use accel-fn launch, not threads"
        )
    kind = get_accelerator().device_name()
    if kind != state.device.type:
        raise PlanError(
            f"build: wrap_deepspeed must train on DeepSpeed's device, {kind}, got {state.device.type}; set "
            f"DS_ACCELERATOR={state.device.type}"
        )


def check_lock(state: DistState, devices: Collection[str] = ()) -> None:
    """Refuse to start if a build of C++ code holds a lock: if the build was killed, DeepSpeed would hang."""
    from torch.utils.cpp_extension import _get_build_directory

    needed = [
        *(["deepspeed_shm_comm"] if state.device.type == "cpu" else []),
        *(["pin_memory", "async_io"] if "nvme" in devices else []),
    ]
    for name in needed:
        lock = Path(_get_build_directory(name, verbose=False)) / "lock"
        if lock.exists():
            raise PlanError(
                f"build: wrap_deepspeed must find no lock of a build of DeepSpeed's C++ code, got {lock}; if "
                "no other program is building it, delete that file, or else wait for it"
            )


def _check_files(settings: Mapping[str, Any]) -> None:
    """Refuse to offload to files on a machine where DeepSpeed cannot do so."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if "nvme" not in offloads(settings):
        return
    if not installed_ops.get("async_io") and not AsyncIOBuilder().is_compatible():
        raise PlanError(
            'build: wrap_deepspeed(offload="nvme") must have libaio, got none that links; install '
            "libaio-dev, or set CFLAGS and LDFLAGS to where it is"
        )
    parameters = device_of(settings["zero_optimization"], "offload_param")
    if parameters == "nvme" and not get_accelerator().is_fp16_supported():
        raise PlanError(
            'build: wrap_deepspeed\'s offload_param.device must be "cpu" on a device without fp16, where '
            "DeepSpeed's files hold bfloat16, got 'nvme'; leave out offload_param"
        )


def make_zero(
    state: DistState,
    module: nn.Module,
    plan: Plan,
    *,
    settings: Mapping[str, Any],
    clips: tuple[Any, ...],
) -> Strategy:
    """Make the strategy: DeepSpeed's engine, or `OneRank` in a world of one without offloading."""
    if state.scaler is not None:
        raise PlanError(
            "build: wrap_deepspeed must be used without a loss scale, since the engine has the gradients, "
            'got with_amp("fp16"); use "bf16"'
        )
    if state.world_size == 1 and not offloads(settings):
        return OneRank(state, module, plan, clips=clips)
    import deepspeed

    # DeepSpeed needs a process group even for one rank.
    if not torch.distributed.is_initialized():
        backend = None if state.device.type != "cpu" else "gloo"
        torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(dist_init_required=False)
    return ZeRO(state, module, plan, settings=settings, clips=clips)
