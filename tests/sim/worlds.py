"""A run of several ranks: data, training, evaluation, saving and loading on any devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from tests.sim.device import native, recorded
from tests.sim.programs import OPTIMIZERS, Net, loss_fn, make_batches, make_model, waits_in, whole

LossFn = Callable[[nn.Module, Any], Any]
STRATEGIES = {
    "ddp": lambda: af.wrap_ddp(),
    "fsdp": lambda: af.wrap_fsdp(),
    "fsdp(offload)": lambda: af.wrap_fsdp(offload=True),
    "reproducible": lambda: af.reproducible(4),
    "none": lambda: af.compose(),
}
PRECISIONS = {
    "float64": lambda: af.compose(),
    "fp16": lambda: af.with_amp("fp16", init_scale=2.0**10),
    "bf16": lambda: af.with_amp("bf16"),
}


def make_loader(state: af.DistState, dtype: torch.dtype, strategy: str) -> Any:
    """Load four batches, the last shorter; two ranks share them unequally, if their slices may."""
    size, batch_size = (28, 8) if strategy == "reproducible" else (35, 9)
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(size, 4, generator=draw, dtype=dtype),
        torch.randn(size, 1, generator=draw, dtype=dtype),
    )
    pinned = state.device.type != "cpu"
    given = DataLoader(data, batch_size=batch_size, shuffle=True, pin_memory=pinned)
    return af.shard_loader(given, state)


def train(
    state: af.DistState, strategy: str, precision: str, optimizer: str, folder: Path
) -> dict[str, Any]:
    """Train for two epochs, evaluate, save, make one more step, and load what was saved."""
    dtype = torch.float64 if precision == "float64" else torch.float32
    model = make_model(dtype)
    plan = af.Plan(loss_fn, model, OPTIMIZERS[optimizer](model.parameters()))
    recipe = af.compose(
        af.place(),
        STRATEGIES[strategy](),
        PRECISIONS[precision](),
        af.accumulate(2) if strategy != "reproducible" else af.compose(),
        af.clip(1.0),
        af.skip_nonfinite(),
        af.schedule(lambda number: 0.9**number),
    )
    state, step = af.build(recipe(plan), state)
    loader = make_loader(state, dtype, strategy)
    losses, places, hazards = [], set[str](), []
    for epoch in af.prefetch(loader, state).epochs(2):
        for batch in epoch:
            before = native.num_kernels()
            with recorded() as seen:
                state, report = step(state, batch)
            if epoch.index:  # in the first one, ranks compare what they do
                places |= {*waits_in(seen, since=before)}
            hazards += [each.what for each in seen if each.kind == "hazard"]
            losses.append(report.loss)
    evaluated = float(af.evaluate(step, state, loader)["loss"])
    saved = parameters(model)
    af.save(step, state, folder, extras={"data": loader})
    state, _ = step(state, batch)
    changed = parameters(model)
    af.load(step, state, folder, extras={"data": loader})
    return {
        "device": str(state.device),
        "rank": state.rank,
        "losses": [float(loss) for loss in losses],
        "evaluated": evaluated,
        "parameters": saved,
        "changed": changed != saved,
        "loaded": parameters(model) == saved,
        "waits": sorted(places),
        "hazards": hazards,
    }


def repelled(state: af.DistState) -> LossFn:
    """Make a loss whose rows depend on the rows of all ranks."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        outputs = model(batch[0])
        return (outputs - af.gather(outputs, state).T).square().mean() + outputs.square().mean()

    return loss_fn


def centred(state: af.DistState) -> LossFn:
    """Make a loss in which rank 1's mean is subtracted on all ranks."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        outputs = model(batch[0])
        return F.mse_loss(outputs - af.broadcast(outputs.mean(0), state, source=1), batch[1])

    return loss_fn


def filling(state: af.DistState) -> LossFn:
    """Make a loss that takes 1 MiB a row, of which rank 1's device has room for two rows."""
    if state.device.type == "sim" and state.rank == 1:
        taken = torch.accelerator.memory_allocated()
        torch.sim.set_per_process_memory_fraction((taken + 3 * 2**20) / native.memory)

    def full(model: nn.Module, batch: Any) -> Any:
        torch.empty(len(batch[0]), 2**20, dtype=torch.uint8, device=batch[0].device)
        return loss_fn(model, batch)

    return full


RECIPES = {
    "local_sgd": lambda: af.local_sgd(2),
    "auto": lambda: af.compose(af.wrap_ddp(), af.accumulate("auto"), af.check_replicas(2)),
    "checkpoint": lambda: af.compose(af.wrap_fsdp(), af.checkpoint_activations()),
    "unused": lambda: af.compose(
        af.wrap_ddp(find_unused_parameters=True), af.freeze("first", until=3)
    ),
    "gather, ddp": lambda: af.wrap_ddp(),
    "gather, fsdp": lambda: af.wrap_fsdp(),
    "broadcast": lambda: af.wrap_ddp(),
    "full": lambda: af.compose(af.wrap_ddp(), af.accumulate("auto")),
}
LOSSES = {
    "gather, ddp": repelled,
    "gather, fsdp": repelled,
    "broadcast": centred,
    "full": filling,
}


def train_parts(state: af.DistState, recipe: str) -> dict[str, Any]:
    """Train on this rank's rows of each batch."""
    model = make_model()
    make_loss = LOSSES.get(recipe, lambda state: loss_fn)
    plan = af.Plan(make_loss(state), model, OPTIMIZERS["foreach"](model.parameters()))
    plan = af.compose(af.place(), RECIPES[recipe](), af.clip(0.5))(plan)
    # A mean of one rank's rows depends on which rows it has: such a loss is refused where it is checked.
    state, step = af.build(plan, state, check_loss=make_loss is not centred)
    losses = []
    for batch in make_batches():
        part = tuple(each[state.rank :: state.world_size] for each in batch)
        state, report = step(state, part)
        losses.append(float(report.loss))
    return {
        "rank": state.rank,
        "losses": losses,
        "parameters": parameters(model),
        "num_microbatches": report.extras.get("num_microbatches", 1),
    }


def parameters(model: Net) -> dict[str, list[float]]:
    return {name: whole(each).flatten().tolist() for name, each in model.named_parameters()}
