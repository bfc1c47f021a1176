"""Kinds of evaluations and predictions: over what, and by which function."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

import accel_fn as af
from tests.field.catalogue import kind
from tests.field.program import (
    Case,
    labels,
    mse,
    network,
    predictions,
    recipe,
    rows_of,
    samples,
    sgd,
    train_by_hand,
)


@kind("equal")
def evaluated_by_another_loss(case: Case):
    """The loss of the validation has no label smoothing, and is a mean over labels too."""
    x, _ = samples(case)
    y = labels(case)
    y[: case.num_samples // 3] = -100

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)

    def sharp(model, batch):
        logits = model(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        return loss, {"right": ((logits.argmax(1) == batch[1]).sum(), (batch[1] >= 0).sum())}

    loader = DataLoader(TensorDataset(x, y), batch_size=case.batch_size)

    def by_hand():
        loss, metrics = sharp(network(3), (x, y))
        right, count = metrics["right"]
        return {"loss": loss.detach(), "right": right.double() / count}

    def run(state):
        model = network(3)
        plan = recipe(case)(af.Plan(loss_fn, model, sgd(model), weight_fn=af.count_labels(1)))
        state, step = af.build(plan, state)
        found = af.evaluate(step, state, af.shard_loader(loader, state), sharp)
        return {name: torch.tensor(found[name], dtype=torch.float64) for name in ("loss", "right")}

    return by_hand, run


@kind("equal")
def evaluated_parts(case: Case):
    """Batches that come from no loader are cut by `part` and evaluated; the last has one row."""
    x, y = samples(case)
    sizes = [case.batch_size, case.num_samples - case.batch_size - 1, 1]
    batches = [*zip(x.split(sizes), y.split(sizes), strict=True)]

    def run(state):
        model = network()
        state, step = af.build(recipe(case)(af.Plan(mse, model, sgd(model))), state)
        found = af.evaluate(step, state, (af.shard_batch(batch, state) for batch in batches))
        return {"loss": torch.tensor(found["loss"], dtype=torch.float64)}

    return lambda: {"loss": mse(network(), (x, y)).detach()}, run


@kind("equal")
def evaluated_files(case: Case):
    """Each rank evaluates files of its own; some have more than others, or none."""
    files = [*DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)]

    def error(model, batch):
        return {"error": (model(batch[0]) - batch[1]).abs().squeeze(1)}

    def by_hand():
        return {"error": error(network(), samples(case))["error"].mean().detach()}

    def run(state):
        model = network()
        state, step = af.build(recipe(case)(af.Plan(mse, model, sgd(model))), state)
        mine = files[state.rank :: state.world_size]
        found = af.evaluate(step, state, mine, error)
        return {"error": torch.tensor(found["error"], dtype=torch.float64)}

    return by_hand, run


@kind("equal")
def predicted(case: Case):
    """A model is trained on shuffled data, and predicts a row for each sample of the data set."""
    data = TensorDataset(*samples(case))
    loader = DataLoader(data, batch_size=case.batch_size, shuffle=True)

    def by_hand():
        model = network()
        train_by_hand(model, mse, af.shard_loader(loader, af.DistState(world_size=1)))
        return rows_of(predictions(model, samples(case)))

    def run(state):
        model = network()
        state, step = af.build(recipe(case)(af.Plan(mse, model, sgd(model))), state)
        batches = af.shard_loader(loader, state)
        for batch in batches:
            state, _ = step(state, batch)
        return rows_of(af.predict(step, state, batches, predictions))

    return by_hand, run


@kind("equal")
def predicted_parts(case: Case):
    """Rows of batches that `part` has cut come in the order of the batches."""
    x, y = samples(case)
    sizes = [case.batch_size, 1, case.num_samples - case.batch_size - 1]
    batches = [*zip(x.split(sizes), y.split(sizes), strict=True)]

    def run(state):
        model = network()
        state, step = af.build(recipe(case)(af.Plan(mse, model, sgd(model))), state)
        mine = (af.shard_batch(batch, state) for batch in batches)
        return rows_of(af.predict(step, state, mine, predictions))

    return lambda: rows_of(predictions(network(), (x, y))), run


@kind("refused", "iter\\(loader\\)")
def predicted_without_some(case: Case):
    """A collate_fn leaves samples out, so a row has no number; they may be read without numbers."""
    x, y = samples(case)
    rows = [*zip(x, y, strict=True)]

    def readable(items):
        kept = [each for each in items if each[1] > y.min()]
        return default_collate(kept) if kept else None

    loader = DataLoader(rows, batch_size=case.batch_size, collate_fn=readable)

    def run(state, read):
        model = network()
        state, step = af.build(recipe(case)(af.Plan(mse, model, sgd(model))), state)
        batches = read(af.shard_loader(loader, state))
        return rows_of(af.predict(step, state, batches, predictions))

    kept = default_collate([each for each in rows if each[1] > y.min()])
    return (
        lambda: rows_of(predictions(network(), kept)),
        lambda state: run(state, lambda loader: loader),
        lambda state: run(state, iter),
    )
