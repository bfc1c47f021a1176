"""A user's program for type checkers: lines that end in `# E` must be errors, all others none."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss_fn(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    loss: Tensor = nn.functional.mse_loss(module(inputs), targets)
    return loss


recipe = af.compose(af.place(), af.wrap_ddp(), af.accumulate(4), af.clip(1.0))
state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), af.init())
dataset = TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
loader = DataLoader(dataset, batch_size=4)
batch = (torch.randn(8, 4), torch.randn(8, 1))
state, report = step(state, batch)
sharded: af.ShardedLoader[tuple[Tensor, Tensor]] = af.shard_loader(loader, state)
for epoch in sharded.epochs(2):
    for inputs, targets in epoch:
        first: Tensor = inputs[targets > 0]
for shown in af.progress(sharded.epochs(2), state):
    for pair in af.prefetch(shown, state):
        first = pair[0]
        shown.show(report, accuracy=0.5)
for pair in af.progress(af.progress(next(sharded.epochs(2)), state), state):
    first = pair[0]
for anything in af.shard_loader(loader, state):
    print(anything["a batch without an annotation is Any"])
loss: Tensor = report.loss
weight: float = af.reduce_sum(2.0, state)
try:
    af.save(step, state, "runs/a")
except af.errors.CheckpointWriteError as error:
    number: int | None = error.errno
except (af.errors.OutOfMemoryError, af.AccelError):
    pass
pairs: af.Plan[tuple[Tensor, Tensor]] = af.Plan(loss_fn, model, optimizer)
clipped: af.Plan[tuple[Tensor, Tensor]] = af.compose(af.clip(1.0), af.ema(0.9))(pairs)
typed: af.Step[tuple[Tensor, Tensor]] = af.build(clipped, state)[1]
evaluated: Tensor = typed.forward(state, batch)


def without_weight(plan: af.Plan) -> af.Plan:
    return dataclasses.replace(plan, weight_fn=lambda batch: 1)


kept = af.build(af.compose(without_weight, af.clip(1.0))(pairs), state)[1]
state, report = kept(state, batch)


def any_loss(module: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = module(batch["inputs"]).mean()
    return loss


untyped = af.build(af.Plan(any_loss, model, optimizer), state)[1]
state, report = untyped(state, {"inputs": torch.randn(8, 4)})
inferred = af.build(af.Plan(lambda module, batch: module(batch).mean(), model, optimizer), state)[1]
state, report = inferred(state, torch.randn(8, 4))
found = af.testing.simulate(lambda each: each.rank, world_size=2)
ranks: list[int] = found

print(af.nonexistent)  # E
print(af.errors.NonexistentError)  # E
af.clip("1.0")  # E
af.clip()  # E
af.accumulate(2.5)  # E
af.accumulate("automatic")  # E
af.build(state=af.Plan(loss_fn, model, optimizer))  # E
af.Plan(loss_fn, model)  # E
af.shard_loader(loader, state, batch="every")  # E
af.with_amp(16)  # E
print(report.lost)  # E
state.rank = 1  # E
names: list[str] = found  # E
for epoch in sharded.epochs(2):
    for pair in epoch:
        print(pair.missing)  # E
        text: str = pair  # E
other: af.ShardedLoader[str] = sharded  # E
shown.show(0.5)  # E
af.progress(loader, state).show(accuracy="high")  # E
step(state, "nonsense")  # E
typed(state, "nonsense")  # E
typed.forward(state, {"inputs": batch})  # E
typed.grads(state, None)  # E
kept(state, "nonsense")  # E
strings: af.Step[str] = typed  # E
texts: af.Plan[str] = clipped  # E

af.launch(print, 3, kwargs={"sep": ""})
af.launch(print, 3, sep="")  # E
