"""One update of the same training, written by hand and with each library as its guide shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib.util import find_spec

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accel_fn as af
from tests.tools.benchmarks.tasks import Batch, Task, loss_fn

Update = Callable[[int], None]
"""A function that trains on batch number i."""
Loop = Callable[[Task], Update]


def by_hand(task: Task, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> Update:
    way, optimizer, microbatches = task.scenario.way, task.optimizer, task.microbatches
    parameters = list(task.model.parameters())
    model = wrap(task.model)
    no_sync = getattr(model, "no_sync", nullcontext)
    num_parts = way.num_microbatches

    def backward(batch: Batch) -> None:
        if way.bf16:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_fn(model, batch)
        else:
            loss = loss_fn(model, batch)
        if num_parts > 1:
            loss = loss / num_parts
        loss.backward()  # type: ignore[no-untyped-call]

    def update(index: int) -> None:
        *first, last = microbatches[index]
        for batch in first:
            with no_sync():
                backward(batch)
        backward(last)
        if way.max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, way.max_norm)
        optimizer.step()
        optimizer.zero_grad()

    return update


def by_hand_ddp(task: Task) -> Update:
    return by_hand(task, DistributedDataParallel)


def by_hand_tuned_ddp(task: Task) -> Update:
    def wrap(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(
            model, bucket_cap_mb=100, gradient_as_bucket_view=True, broadcast_buffers=False
        )

    return by_hand(task, wrap)


def with_accelerate(task: Task) -> Update:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    way, microbatches = task.scenario.way, task.microbatches
    # one process runs many scenarios, and accelerate keeps state
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=way.num_microbatches,
        mixed_precision="bf16" if way.bf16 else "no",
    )
    model, optimizer = accelerator.prepare(task.model, task.optimizer)

    def update(index: int) -> None:
        [batch] = microbatches[index]
        accelerator.backward(loss_fn(model, batch))
        if way.max_norm is not None:
            accelerator.clip_grad_norm_(model.parameters(), way.max_norm)
        optimizer.step()
        optimizer.zero_grad()

    def update_in_parts(index: int) -> None:
        for batch in microbatches[index]:
            with accelerator.accumulate(model):
                accelerator.backward(loss_fn(model, batch))
                optimizer.step()
                optimizer.zero_grad()

    return update if way.num_microbatches == 1 else update_in_parts


def with_fabric(task: Task) -> Update:
    from lightning.fabric import Fabric

    way, microbatches = task.scenario.way, task.microbatches
    fabric = Fabric(
        accelerator="cpu",
        devices=task.scenario.world_size,
        strategy="ddp" if task.scenario.world_size > 1 else "auto",
        precision="bf16-mixed" if way.bf16 else "32-true",
    )
    fabric.launch()
    model, optimizer = fabric.setup(task.model, task.optimizer)
    num_parts = way.num_microbatches

    def update(index: int) -> None:
        [batch] = microbatches[index]
        fabric.backward(loss_fn(model, batch))
        if way.max_norm is not None:
            fabric.clip_gradients(model, optimizer, max_norm=way.max_norm)
        optimizer.step()
        optimizer.zero_grad()

    def update_in_parts(index: int) -> None:
        for number, batch in enumerate(microbatches[index], start=1):
            with fabric.no_backward_sync(model, enabled=number < num_parts):
                fabric.backward(loss_fn(model, batch) / num_parts)
        optimizer.step()
        optimizer.zero_grad()

    return update if num_parts == 1 else update_in_parts


def with_accel_fn(
    task: Task,
    *added: af.Transform,
    owner: af.Transform | None = None,
    mesh: Mapping[str, int] | None = None,
) -> Update:
    way, batches = task.scenario.way, task.batches
    transforms = [af.place(), *added]
    if task.scenario.world_size > 1:
        transforms.append(owner or af.wrap_ddp())
    if way.bf16:
        transforms.append(af.with_amp("bf16"))
    if way.num_microbatches > 1:
        transforms.append(af.accumulate(way.num_microbatches))
    if way.max_norm is not None:
        transforms.append(af.clip(way.max_norm))
    plan = af.compose(*transforms)(af.Plan(loss_fn, task.model, task.optimizer))
    state, step = af.build(plan, af.init(device="cpu", mesh=mesh))

    def update(index: int) -> None:
        nonlocal state
        state, _ = step(state, batches[index])

    return update


def with_accel_fn_compiled(task: Task) -> Update:
    return with_accel_fn(task, af.compiled(scope="step"))


def with_accel_fn_reproducible(task: Task) -> Update:
    """Use the virtual ranks as micro-batches: four on each of two ranks."""
    plan = af.compose(af.place(), af.reproducible(num_virtual_ranks=8))(
        af.Plan(loss_fn, task.model, task.optimizer)
    )
    state, step = af.build(plan, af.init(device="cpu"))

    def update(index: int) -> None:
        nonlocal state
        state, _ = step(state, task.batches[index])

    return update


PEERS = {
    "accelerate": ("accelerate", with_accelerate),
    "Fabric": ("lightning", with_fabric),
}
OURS = "accel_fn"
COMPILED = "accel_fn compiled"
REPRODUCIBLE = "accel_fn reproducible"


def loops(world_size: int) -> dict[str, Loop | None]:
    """Return the loops by name, the base of all ratios first; None for a library that is not
    installed."""
    peers = {name: loop if find_spec(package) else None for name, (package, loop) in PEERS.items()}
    hand: dict[str, Loop | None] = {"by hand": by_hand}
    if world_size > 1:
        hand = {"by hand, DDP tuned": by_hand_tuned_ddp, "by hand, DDP": by_hand_ddp}
    ours: dict[str, Loop | None] = {COMPILED: with_accel_fn_compiled, OURS: with_accel_fn}
    if world_size > 1:
        del ours[COMPILED]
        ours[REPRODUCIBLE] = with_accel_fn_reproducible
    return {**hand, **peers, **ours}
