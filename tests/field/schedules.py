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
        plan = af.compose(recipe(case), af.skip_nonfinite(), by_epoch)
        state, step = af.build(state, plan(af.Plan(mse, model, optimizer)))
        state = af.resume(folder, state, step, extras={"data": batches})
        for epoch in batches.epochs(4, since=state):
            for batch in epoch:
                state, _ = step(state, batch)
                if state.step == stops_after:
                    af.save(folder, state, step, extras={"data": batches})
                    return None
        return figures(model)

    stops_after = len(loader) + (case.seed % 2) * case.k
    return by_hand, lambda state: stopped_and_resumed(state, run, stops_after)
