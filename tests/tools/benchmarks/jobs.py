"""Jobs around an update (schedule, average, freeze, ...), by hand and as a transform."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, time

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import accel_fn as af
from tests.tools.benchmarks.loops import (
    OURS,
    Loop,
    Update,
    by_hand,
    by_hand_tuned_ddp,
    with_accel_fn,
)
from tests.tools.benchmarks.tasks import MIDDLE, TINY, Batch, Scenario, Task, Way, loss_fn

DECAY, EVERY = 0.99, 8
LOG = "log_to(every=1)"


def falling(num_updates: int) -> float:
    """Return a factor of the learning rate that falls."""
    return 1 / (1 + num_updates / 1000)


def scheduled(task: Task) -> Update:
    update, scheduler = by_hand(task), LambdaLR(task.optimizer, falling)

    def and_schedule(index: int) -> None:
        update(index)
        scheduler.step()

    return and_schedule


def averaged(task: Task, *, uniformly: bool = False) -> Update:
    update = by_hand(task)
    average_fn = get_swa_multi_avg_fn() if uniformly else get_ema_multi_avg_fn(DECAY)
    average = AveragedModel(task.model, multi_avg_fn=average_fn)

    def and_average(index: int) -> None:
        update(index)
        average.update_parameters(task.model)

    return and_average


def part_frozen(task: Task) -> Update:
    next(task.model.children()).requires_grad_(requires_grad=False)
    return by_hand(task)


def where_finite(task: Task) -> Update:
    parameters, optimizer = list(task.model.parameters()), task.optimizer

    def update(index: int) -> None:
        loss_fn(task.model, task.batches[index]).backward()  # type: ignore[no-untyped-call]
        if torch.isfinite(nn.utils.get_total_norm([each.grad for each in parameters])):
            optimizer.step()
        optimizer.zero_grad()

    return update


def recompute(task: Task, *, offload: bool = False) -> Update:
    def forward(model: nn.Module, batch: Batch) -> torch.Tensor:
        values, targets = batch
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                with save_on_cpu() if offload else nullcontext():
                    values = checkpoint(layer, values, use_reentrant=False)
            else:
                values = layer(values)
        return nn.functional.cross_entropy(values, targets)

    return trained_by(task, forward)


def compiled_loss(task: Task) -> Update:
    return trained_by(task, torch.compile(loss_fn))


def compiled_blocks(task: Task) -> Update:
    for name, layer in list(task.model.named_children()):
        if isinstance(layer, nn.Linear):
            # `layer.compile()` does not compile classes of torch itself.
            setattr(task.model, name, torch.compile(layer))
    return by_hand(task)


def trained_by(task: Task, forward: Callable[[nn.Module, Batch], torch.Tensor]) -> Update:
    def update(index: int) -> None:
        forward(task.model, task.batches[index]).backward()  # type: ignore[no-untyped-call]
        task.optimizer.step()
        task.optimizer.zero_grad()

    return update


def sharded(task: Task) -> Update:
    for layer in task.model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(task.model)
    task.optimizer.param_groups[0]["params"] = list(task.model.parameters())
    return by_hand(task)


def split(task: Task) -> Update:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(task.model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    # The fused optimizer and the norm take no plain tensors beside DTensors.
    distribute_module(
        task.model[-1],  # type: ignore[index]
        mesh,
        None,
        lambda _, inputs, mesh: (DTensor.from_local(inputs[0], mesh, run_check=False),),  # type: ignore[arg-type]
        lambda _, output, mesh: output.to_local(),  # type: ignore[arg-type, attr-defined]
    )
    task.optimizer.param_groups[0]["params"] = list(task.model.parameters())
    return by_hand(task)


def apart(task: Task) -> Update:
    update, num_updates = by_hand(task), 0

    def and_average(index: int) -> None:
        nonlocal num_updates
        update(index)
        num_updates += 1
        if num_updates % EVERY == 0:
            for parameter in task.model.parameters():
                state = task.optimizer.state[parameter]
                for each in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"]):
                    dist.all_reduce(each.div_(dist.get_world_size()))

    return and_average


def ours(
    *added: Callable[[], af.Transform],
    owner: Callable[[], af.Transform] = af.wrap_ddp,
    mesh: Mapping[str, int] | None = None,
) -> Loop:
    """Use these transforms, made anew for each training."""

    def loop(task: Task) -> Update:
        return with_accel_fn(task, *[make() for make in added], owner=owner(), mesh=mesh)

    return loop


_FOLDER = TemporaryDirectory()
_NUMBERS = count()


def new_log() -> Path:
    """Return a file of its own for each training."""
    return Path(_FOLDER.name) / f"{next(_NUMBERS)}.jsonl"


def logged(task: Task) -> Update:
    file, last, step = new_log().open("w"), perf_counter(), 0

    def update(index: int) -> None:
        nonlocal last, step
        batch = task.batches[index]
        loss = loss_fn(task.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        task.optimizer.step()
        task.optimizer.zero_grad()
        now, before, step = perf_counter(), last, step + 1
        last = now
        line = {
            "step": step,
            "time": time(),
            "loss": loss.item(),
            "learning_rate": task.optimizer.param_groups[0]["lr"],
            "samples_per_second": len(batch[0]) / (now - before),
        }
        file.write(f"{json.dumps(line)}\n")
        file.flush()

    return update


JOBS: dict[str, tuple[Loop, Loop]] = {
    "schedule": (scheduled, ours(partial(af.schedule, falling))),
    "ema": (averaged, ours(partial(af.ema, DECAY))),
    "swa": (partial(averaged, uniformly=True), ours(af.swa)),
    "freeze": (part_frozen, ours(partial(af.freeze, "0"))),
    "skip_nonfinite": (where_finite, ours(af.skip_nonfinite)),
    "skip_spikes": (where_finite, ours(af.skip_spikes)),
    "checkpoint_activations": (
        recompute,
        ours(partial(af.checkpoint_activations, blocks=nn.Linear)),
    ),
    "checkpoint_activations(offload=True)": (
        partial(recompute, offload=True),
        ours(partial(af.checkpoint_activations, blocks=nn.Linear, offload=True)),
    ),
    'compiled("loss")': (compiled_loss, ours(partial(af.compiled, scope="loss"))),
    'compiled("blocks")': (compiled_blocks, ours(partial(af.compiled, scope="blocks"))),
    'accumulate("auto")': (by_hand, ours(partial(af.accumulate, "auto"))),
    LOG: (by_hand, ours(lambda: af.log_to(new_log(), every=1))),
}
JOBS_OF_TWO: dict[str, tuple[Loop, Loop]] = {
    "wrap_fsdp": (sharded, ours(owner=partial(af.wrap_fsdp, blocks=nn.Linear))),
    "wrap_tp": (
        split,
        ours(owner=partial(af.wrap_tp, {"0": "colwise", "2": "rowwise"}), mesh={"dp": 1, "tp": 2}),
    ),
    f"local_sgd({EVERY})": (apart, ours(owner=partial(af.local_sgd, EVERY))),
    f"check_replicas({EVERY})": (by_hand_tuned_ddp, ours(partial(af.check_replicas, EVERY))),
}
SCENARIOS = [Scenario(size, True, Way(job, job=job)) for size in (TINY, MIDDLE) for job in JOBS]
SCENARIOS_OF_TWO = [
    Scenario(MIDDLE, True, way, world_size=2)
    for way in (
        Way("wrap_fsdp", target=1.05, job="wrap_fsdp"),
        Way("wrap_tp", target=1.05, job="wrap_tp", same_data=True),
        Way("wrap_tp, clipping", target=1.05, max_norm=1.0, job="wrap_tp", same_data=True),
        *[Way(job, job=job) for job in JOBS_OF_TWO if not job.startswith("wrap_")],
    )
]


def loops_of(job: str) -> dict[str, Loop | None]:
    """Return the loops by name, the base of all ratios first."""
    hand, transform = {**JOBS, **JOBS_OF_TWO}[job]
    if job == LOG:
        return {"by hand, no log": hand, "by hand, log": logged, OURS: transform}
    return {"by hand": hand, OURS: transform}
