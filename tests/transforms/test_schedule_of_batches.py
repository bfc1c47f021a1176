"""schedule(every=): windows, several updates a batch, other schedules, and what is refused."""

from dataclasses import replace

import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import accel_fn as af
from accel_fn.testing import simulate
from accel_fn.testing.internals import place_of_rate
from tests.laws.law10_schedule_of_batches import loader_of, sgd
from tests.support import strategies as ours


def rates_of(step, state, batches):
    """Return the rate of each update."""
    rates = []
    for batch in batches:
        rates.append(step.plan.optimizer.param_groups[0]["lr"])
        state, _ = step(state, batch)
    return rates


def halved(optimizer):
    return schedulers.ExponentialLR(optimizer, 0.5)


def test_a_window_of_batches_counts_as_one_batch():
    """The last window of an epoch has fewer batches."""
    loader = af.group_batches(af.shard_loader(loader_of(30), af.DistState()), 2)
    model = ours.regression_model()
    plan = af.Plan(ours.mse, model, sgd(model.parameters()))
    recipe = af.compose(
        af.accumulate(2, split=None), af.schedule(halved(plan.optimizer), every=loader)
    )
    state, step = af.build(recipe(plan), af.DistState())
    batches = [batch for epoch in loader.epochs(2) for batch in epoch]
    assert rates_of(step, state, batches) == [0.1] * 3 + [0.05] * 3


@pytest.mark.parametrize(
    ("kind", "whole"), [("one optimizer", True), ("two optimizers", False)], ids=str
)
def test_several_updates_of_one_batch_have_the_rate_of_the_batches_before_it(kind, whole):
    """Also those of a plan whose own steps never advance, as a critic's."""
    batch = (torch.ones(2, 3).double(), torch.ones(2, 1).double())
    rates = {"critic": [], "generator": []}

    def built(state, name):
        model = ours.regression_model()
        optimizers = {"one": sgd(model[0].parameters()), "two": sgd(model[2].parameters())}
        one, fn = optimizers["one"], lambda number: 0.5**number
        if kind == "one optimizer":
            optimizers = one = sgd(model.parameters())

        def note(state, grads):
            rates[name].append(one.param_groups[0]["lr"])
            return grads

        plan = replace(af.Plan(ours.mse, model, optimizers), gradients=(note,))
        return af.build(af.schedule(fn, every=2)(plan), state)

    state, critic = built(af.DistState(), "critic")
    state, generator = built(state, "generator")
    for _ in range(4):
        for _ in range(3):
            if whole:
                state, _ = critic(state, batch, advance=False)
            else:
                state, _ = critic.update(*critic.grads(state, batch), advance=False)
        state, _ = generator(state, batch)
    assert rates == {"critic": [0.1] * 6 + [0.05] * 6, "generator": [0.1] * 2 + [0.05] * 2}


def test_a_schedule_that_is_built_in_the_middle_of_a_run_counts_from_there():
    plan = ours.plan(optimizer=sgd)
    recipe = af.schedule(halved(plan.optimizer), every=2)
    state, step = af.build(recipe(plan), replace(af.DistState(), step=7))
    batch = (torch.ones(2, 3).double(), torch.ones(2, 1).double())
    assert rates_of(step, state, [batch] * 4) == [0.1, 0.05, 0.05, 0.025]


def test_a_plateau_is_seen_in_the_last_update_of_every_so_many_batches():
    plan = ours.plan(optimizer=sgd)
    scheduler = schedulers.ReduceLROnPlateau(plan.optimizer, factor=0.5, patience=0)
    metrics = iter([9.0, 1.0, 0.0, 1.0, 0.0, 0.5, 0.0])
    recipe = af.schedule(scheduler, every=2, metric=lambda report: next(metrics))
    state, step = af.build(recipe(plan), af.DistState())
    batch = (torch.ones(2, 3).double(), torch.ones(2, 1).double())
    assert rates_of(step, state, [batch] * 7) == [0.1] * 4 + [0.05] * 3


SCALED = af.DistState(device="meta", scaler=af.extend.LossScale.start(8.0))


@pytest.mark.parametrize("order", [(None, 2), (2, None)], ids=["updates first", "batches first"])
def test_rates_stay_on_the_host_where_another_schedule_counts_batches(order):
    """The device chooses between two rates of an update, not between those of a batch too."""
    plan = ours.plan(optimizer=lambda p: torch.optim.AdamW(p, lr=0.05, fused=True))
    for group in plan.optimizer.param_groups:
        group["params"] = [torch.nn.Parameter(p.detach().to("meta")) for p in group["params"]]
    recipe = af.compose(*[af.schedule(halved(plan.optimizer), every=every) for every in order])
    plan = recipe(plan)
    for number in range(2):
        made = plan.after_update[number](SCALED, plan)
        rest = [*plan.after_update]
        rest[number] = made
        plan = replace(plan, after_update=tuple(rest))
    kinds = {None: "host", 2: "batches"}
    assert [*map(place_of_rate, plan.after_update)] == [kinds[every] for every in order]


def test_a_run_that_counts_other_batches_is_refused(tmp_path):
    def built(every):
        plan = ours.plan(optimizer=sgd)
        recipe = af.schedule(halved(plan.optimizer), every=every)
        return af.build(recipe(plan), af.DistState())

    af.save(*reversed(built(2)), tmp_path)
    text = (
        r"\['schedule\(ExponentialLR, every=2\)'\] saved, \['schedule\(ExponentialLR.*3\)'\] here"
    )
    with pytest.raises(RuntimeError, match=text):
        af.load(*reversed(built(3)), tmp_path)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def refused(every, text, error):
    with pytest.raises(error, match=text):
        af.schedule(lambda n: 1.0, every=every)


def test_the_name_of_a_unit_is_refused_with_the_repair():
    text = r"schedule: every must be an integer >= 1, got 'epoch'; for every epoch, .* every=loader"
    refused("epoch", text, TypeError)


def test_a_loader_that_is_not_sharded_is_refused():
    refused(loader_of(12), "got 'DataLoader'; .* the loader that shard_loader returned", TypeError)


@pytest.mark.parametrize("every", [0, -1])
def test_a_number_of_batches_is_at_least_one(every):
    refused(every, f"every must be an integer >= 1, got {every}", ValueError)


def test_a_loader_without_a_length_is_refused_on_every_rank():
    """Nor are two epochs of a batch sampler of the user's alike, whatever its length is."""
    lists = DataLoader(TensorDataset(torch.arange(4)), batch_sampler=[[0, 1], [2, 3]])
    loaders = {"Endless": DataLoader(Endless(), batch_size=4), "TensorDataset": lists}

    def run(state):
        for name, loader in loaders.items():
            text = (
                f"have a length that all of its epochs have, got 'a loader of {name}'; give every=n"
            )
            refused(af.shard_loader(loader, state), text, TypeError)

    simulate(run, world_size=2)
