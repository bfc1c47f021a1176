"""Kinds of losses: what they are a mean over, and what they hold beside the model."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from tests.field.catalogue import kind
from tests.field.program import (
    Case,
    figures,
    labels,
    mse,
    network,
    recipe,
    samples,
    sgd,
    train,
    train_by_hand,
    two_loops,
)

NOT_A_MEAN = "neither a mean nor a sum"
WHOLE = {"k": (1,), "world_size": (2, 3)}
"""A loss with collectives is of the whole batch, so nothing is accumulated."""


@kind("equal")
def terms(case: Case):
    """Each term has a denominator of its own, which is 0 in some parts and in some batches."""
    x, y = samples(case)
    classes = labels(case)
    classes[case.batch_size // 3 :: 2] = -100
    has_box = x[:, 0] > 0.8

    loader = DataLoader(TensorDataset(x, classes, y, has_box), batch_size=case.batch_size)

    def terms(model, batch):
        out = model(batch[0])
        boxes = (out[:, 3:] - batch[2]).abs()[batch[3]]
        return {"cls": F.cross_entropy(out[:, :3], batch[1]), "box": 2 * boxes.mean()}

    def by_hand(model, batch):
        found = terms(model, batch)
        return found["cls"] + (found["box"] if batch[3].any() else 0)

    counted = {"cls": af.num_labels(1), "box": lambda batch: batch[3].sum()}
    return (
        lambda: train_by_hand(network(4), by_hand, loader),
        lambda state: train(
            state, case, network(4), terms, af.shard_loader(loader, state), weight_fn=counted
        ),
    )


@kind("equal", **WHOLE)
def gathered(case: Case):
    """The same loss against the rows of all ranks."""
    x, _ = samples(case)
    loader = DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=case.batch_size)

    def by_hand(model, batch):
        first, second = (F.normalize(model(view)) for view in batch)
        return F.cross_entropy(first @ second.T, torch.arange(len(first)))

    def run(state):
        def loss_fn(model, batch):
            first, second = (F.normalize(model(view)) for view in batch)
            start = sum(af.gather([len(first)], state)[: state.rank])
            return F.cross_entropy(
                first @ af.gather(second, state).T, start + torch.arange(len(first))
            )

        return train(state, case, network(3), loss_fn, af.shard_loader(loader, state))

    return lambda: train_by_hand(network(3), by_hand, loader), run


@kind("equal", world_size=(1,), k=(1,))
def noise(case: Case):
    """The loss draws noise from the global generator, which the check of the loss gives back."""
    batches = [samples(case)] * 3

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0] + torch.randn_like(batch[0])), batch[1])

    def seeded():
        model = network()
        torch.manual_seed(case.seed)
        return model

    return (
        lambda: train_by_hand(seeded(), loss_fn, batches),
        lambda state: train(state, case, seeded(), loss_fn, batches),
    )


@kind("refused", "ModuleDict")
def parameters_in_the_optimizer(case: Case):
    """The loss has a temperature, which the plan's optimizer holds beside the model's parameters."""
    x, _ = samples(case)
    loader = DataLoader(TensorDataset(x, labels(case)), batch_size=case.batch_size)

    def whole():
        scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        return nn.ModuleDict({"net": network(3), "scale": nn.ParameterDict({"log": scale})})

    def loss_fn(model, batch):
        return F.cross_entropy(model["net"](batch[0]) * model["scale"]["log"].exp(), batch[1])

    def in_the_optimizer(state):
        model = whole()

        def closure(net, batch):
            return loss_fn({"net": net, "scale": model["scale"]}, batch)

        plan = recipe(case)(af.Plan(closure, model["net"], sgd(model)))
        state, step = af.build(state, plan)
        for batch in af.shard_loader(loader, state):
            state, _ = step(state, batch)
        return figures(model)

    return (
        lambda: train_by_hand(whole(), loss_fn, loader),
        in_the_optimizer,
        lambda state: train(state, case, whole(), loss_fn, af.shard_loader(loader, state)),
    )


@kind("equal")
def frozen_teacher(case: Case):
    """The loss compares with a teacher in a closure."""
    x, _ = samples(case)
    teacher = copy.deepcopy(network(3)).requires_grad_(False)
    loader = DataLoader(TensorDataset(x), batch_size=case.batch_size)

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0]).log_softmax(1), 2 * teacher(batch[0]))

    return two_loops(case, lambda: network(3), loss_fn, loader)


@kind("equal", strategy=("wrap_ddp",))
def slope(case: Case):
    """A physics-informed loss, which takes derivatives with respect to its inputs."""
    x, _ = samples(case)
    loader = DataLoader(TensorDataset(x), batch_size=case.batch_size)

    def loss_fn(model, batch):
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope - x).square().mean() + model(x).square().mean()

    return two_loops(case, network, loss_fn, loader)


@kind("equal", strategy=("wrap_ddp",))
def penalty(case: Case):
    """A mean and a penalty on the weights."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)

    def loss_fn(model, batch):
        return mse(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())

    return two_loops(case, network, loss_fn, loader)


@kind("equal")
def label_smoothing(case: Case):
    """cross_entropy with label smoothing, and labels that are left out."""
    x, _ = samples(case)
    y = labels(case)
    y[::3] = -100
    loader = DataLoader(TensorDataset(x, y), batch_size=case.batch_size)

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)

    counted = af.num_labels(1)
    return two_loops(case, lambda: network(3), loss_fn, loader, weight_fn=counted)


@kind("refused", "reduction='sum'", k=(2, 3))
def sums(case: Case):
    """A sum over the samples, divided by a constant."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0]), batch[1], reduction="sum") / case.batch_size

    _, repaired = two_loops(case, network, loss_fn, loader, reduction="sum")
    return *two_loops(case, network, loss_fn, loader), repaired


@kind("equal", k=(1,))
def two_sources(case: Case):
    """Semi-supervised: each batch has labelled rows, and twice as many without labels."""
    x, y = samples(case)
    batches = [(x, y, torch.cat([x.flip(1), 2 * x]).roll(shift, 0)) for shift in range(3)]

    def terms(model, batch):
        x, y, others = batch
        with torch.no_grad():
            guess = model(others)
        noisy = model(others + 0.1)
        return {"labelled": F.mse_loss(model(x), y), "others": (noisy - guess).abs().mean()}

    def by_hand(model, batch):
        return sum(terms(model, batch).values())

    counted = {"labelled": lambda batch: len(batch[0]), "others": lambda batch: len(batch[2])}

    def run(state):
        parts = ((*af.part((x, y), state), af.part(others, state)) for x, y, others in batches)
        return train(state, case, network(), terms, parts, weight_fn=counted)

    return lambda: train_by_hand(network(), by_hand, batches), run
