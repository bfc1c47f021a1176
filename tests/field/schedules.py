"""Kinds of schedules: what a learning rate counts, and what becomes of it in a run that resumes."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from tests.field.catalogue import kind
from tests.field.program import (
    Case,
    figures,
    mse,
    network,
    recipe,
    samples,
    sgd,
    stopped_and_resumed,
    train_on,
    update,
)


@kind("equal")
def by_epoch(case: Case):
    """A schedule counts epochs; the run is stopped, often after an epoch's last batch."""
    x, y = samples(case)
    x[-1] /= case.seed % 3  # infinite in one of three programs: the update is skipped
    loader = DataLoader(TensorDataset(x, y), batch_size=case.batch_size)

    def scheduler_of(optimizer):
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.1)

    def by_hand():
        model = network()
        optimizer = sgd(model)
        scheduler = scheduler_of(optimizer)
        for _ in range(4):
            for batch in loader:
                if batch[0].isfinite().all():
                    update(model, mse(model, batch), optimizer)
            scheduler.step()
        return figures(model)

    def run(state, folder, stops_after):
        model = network()
        optimizer = sgd(model)
        batches = af.shard_loader(loader, state)
        by_epoch = af.schedule(scheduler_of(optimizer), every=batches)
        change = af.compose(recipe(case), af.skip_nonfinite(), by_epoch)
        plan = change(af.Plan(mse, model, optimizer))
        return train_on(state, folder, plan, batches, 4, stops_after)

    stops_after = len(loader) + (case.seed % 2) * case.k
    return by_hand, lambda state: stopped_and_resumed(state, run, stops_after)


@kind("refused", 'schedule="program"')
def more_epochs(case: Case):
    """A run is resumed with more epochs, and its schedule is made for as many."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)
    short, long = 2 * len(loader), 4 * len(loader)

    kinds = torch.optim.lr_scheduler
    make = (
        lambda optimizer, length: kinds.OneCycleLR(optimizer, 0.2, total_steps=length + 1),
        kinds.CosineAnnealingLR,
        kinds.PolynomialLR,
    )[case.seed % 3]

    def by_hand():
        model = network()
        optimizer = sgd(model)
        for number, batch in enumerate([*loader] * 4):
            other = torch.optim.SGD([torch.ones(1)], lr=0.1)
            scheduler = make(other, short if number < short else long)
            for _ in range(number):
                other.step()
                scheduler.step()
            for name in ("lr", "momentum"):
                optimizer.param_groups[0][name] = other.param_groups[0][name]
            update(model, mse(model, batch), optimizer)
        return figures(model)

    def run(state, folder, stops_after, choice):
        model = network()
        optimizer = sgd(model)
        length = long if stops_after is None else short
        plan = af.compose(recipe(case), af.schedule(make(optimizer, length)))
        state, step = af.build(plan(af.Plan(mse, model, optimizer)), state)
        batches = af.shard_loader(loader, state)
        state = af.resume(step, state, folder, extras={"data": batches}, schedule=choice)
        for epoch in batches.epochs(4 if stops_after is None else 2, since=state):
            for batch in epoch:
                state, _ = step(state, batch)
        af.save(step, state, folder, extras={"data": batches})
        return figures(model)

    def twice(state, choice):
        return stopped_and_resumed(state, lambda *leg: run(*leg, choice), short)

    return by_hand, lambda state: twice(state, None), lambda state: twice(state, "program")


@kind("equal")
def longer_function(case: Case):
    """A run is resumed with more epochs; a function of their number is its schedule."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)
    short, long = 2 * len(loader), 4 * len(loader)

    def by_hand():
        model = network()
        optimizer = sgd(model)
        for number, batch in enumerate([*loader] * 4):
            optimizer.param_groups[0]["lr"] = 0.1 * (
                1 - number / (short if number < short else long)
            )
            update(model, mse(model, batch), optimizer)
        return figures(model)

    def run(state, folder, stops_after):
        model = network()
        length = long if stops_after is None else short
        linear = af.schedule(lambda num_updates: 1 - num_updates / length)
        plan = af.compose(recipe(case), linear)
        state, step = af.build(plan(af.Plan(mse, model, sgd(model))), state)
        batches = af.shard_loader(loader, state)
        state = af.resume(step, state, folder, extras={"data": batches})
        for epoch in batches.epochs(4 if stops_after is None else 2, since=state):
            for batch in epoch:
                state, _ = step(state, batch)
        af.save(step, state, folder, extras={"data": batches})
        return figures(model)

    return by_hand, lambda state: stopped_and_resumed(state, run, short)


@kind("warned", r"leave scheduler.step\(\) out of the loop")
def scheduler_stepped_twice(case: Case):
    """The loop steps the scheduler that `schedule` advances, as it did before."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)

    def scheduler_of(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    def by_hand():
        model = network()
        optimizer = sgd(model)
        scheduler = scheduler_of(optimizer)
        for batch in [*loader] * 2:
            update(model, mse(model, batch), optimizer)
            scheduler.step()
        return figures(model)

    def run(state, *, steps_too=True):
        model = network()
        optimizer = sgd(model)
        scheduler = scheduler_of(optimizer)
        plan = af.compose(recipe(case), af.schedule(scheduler))(af.Plan(mse, model, optimizer))
        state, step = af.build(plan, state)
        batches = af.shard_loader(loader, state)
        for epoch in batches.epochs(2, since=state):
            for batch in epoch:
                state, _ = step(state, batch)
                if steps_too:
                    scheduler.step()
        return figures(model)

    return by_hand, run, lambda state: run(state, steps_too=False)
