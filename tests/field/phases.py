"""Kinds of runs in phases: parameters that are unfrozen, other groups, rates by what was seen."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
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


def masked(case: Case) -> DataLoader:
    """Rows of which each has a number of items that count, at least one of a batch."""
    x, y = samples(case)
    counts = torch.randint(0, 4, (len(x),), generator=case.generator())
    counts[:: case.batch_size] = 2
    return DataLoader(TensorDataset(x, y, counts), batch_size=case.batch_size)


def mean_of_items(model, batch):
    x, y, counts = batch
    losses = F.mse_loss(model(x), y, reduction="none")[:, 0]
    return (losses * counts).sum() / counts.sum().clamp(min=1)


def num_items(batch) -> int:
    return int(batch[2].sum())


@kind("equal")
def rate_by_tokens(case: Case):
    """A rate falls with the number of tokens, or of rows, that were seen; the run is stopped."""
    loader = masked(case)
    attribute = ("items", "samples")[case.seed % 2]

    def by_hand():
        model = network()
        optimizer = sgd(model)
        seen = 0
        for batch in [*loader] * 2:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + seen / 10)
            update(model, mean_of_items(model, batch), optimizer)
            seen += num_items(batch) if attribute == "items" else len(batch[0])
        return {**figures(model), "seen": torch.tensor(float(seen))}

    def run(state, folder, stops_after):
        model = network()
        by_seen = af.schedule(lambda state: 1 / (1 + getattr(state, attribute) / 10))
        plan = af.Plan(mean_of_items, model, sgd(model), weight_fn=num_items)
        state, step = af.build(af.compose(recipe(case), by_seen)(plan), state)
        batches = af.shard_loader(loader, state)
        state = af.resume(step, state, folder, extras={"data": batches})
        for epoch in batches.epochs(2, since=state):
            for batch in epoch:
                state, _ = step(state, batch)
                if state.step == stops_after:
                    af.save(step, state, folder, extras={"data": batches})
                    return None
        return {**figures(model), "seen": torch.tensor(float(getattr(state, attribute)))}

    stops_after = 1 + case.seed % len(loader)
    return by_hand, lambda state: stopped_and_resumed(state, run, stops_after)


@kind("equal")
def count_that_the_loop_keeps(case: Case):
    """A rate is a function of a count of tokens that the loop keeps as an extra."""
    loader = masked(case)

    def by_hand():
        model = network()
        optimizer = sgd(model)
        seen = {"tokens": 0}
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda update: 1 / (1 + seen["tokens"] / 10)
        )
        for batch in [*loader] * 2:
            update(model, mean_of_items(model, batch), optimizer)
            scheduler.step()
            seen["tokens"] += num_items(batch)
        return figures(model)

    def run(state, folder, stops_after):
        model = network()
        seen = {"tokens": 0}
        by_tokens = af.schedule(lambda update: 1 / (1 + seen["tokens"] / 10))
        plan = af.Plan(mean_of_items, model, sgd(model), weight_fn=num_items)
        state, step = af.build(af.compose(recipe(case), by_tokens)(plan), state)
        batches = af.shard_loader(loader, state)
        extras = {"data": batches, "seen": seen}
        state = af.resume(step, state, folder, extras=extras)
        for epoch in batches.epochs(2, since=state):
            for batch in epoch:
                state, report = step(state, batch)
                seen["tokens"] += report.weight
                if state.step == stops_after:
                    af.save(step, state, folder, extras=extras)
                    return None
        return figures(model)

    stops_after = 1 + case.seed % len(loader)
    return by_hand, lambda state: stopped_and_resumed(state, run, stops_after)


RATES = (0.1, 0.05)
"""Of the second layer, which trains from the start, and of the first one."""


def frozen_network() -> nn.Sequential:
    model = network()
    model[0].requires_grad_(False)
    return model


def head_alone(model: nn.Sequential) -> torch.optim.Adam:
    return torch.optim.Adam(model[2].parameters(), lr=RATES[0])


def head_and_body(model: nn.Sequential) -> torch.optim.Adam:
    layers = zip((model[2], model[0]), RATES, strict=True)
    return torch.optim.Adam([{"params": each.parameters(), "lr": lr} for each, lr in layers])


def falling(update: int) -> float:
    return 0.9**update


def schedule_of(case: Case, optimizer: torch.optim.Optimizer) -> af.Transform:
    kinds = torch.optim.lr_scheduler
    by = (
        lambda: falling,
        lambda: kinds.LambdaLR(optimizer, falling),
        lambda: kinds.ExponentialLR(optimizer, 0.9),
    )[case.seed % 3]
    return af.schedule(by())


def in_phases(case: Case) -> af.Transform:
    scaled = af.with_amp("fp16", init_scale=4.0, growth_interval=2)
    return af.compose(recipe(case), scaled, af.ema(0.9), af.clip(0.5))


def two_phases_by_hand(loader: DataLoader, switch: int) -> dict[str, Tensor]:
    """Train the head, from some update on all layers; and an average of the parameters."""
    model = frozen_network()
    optimizer = head_alone(model)
    means = None
    for number, batch in enumerate([*loader] * 2):
        if number == switch:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters())})
        for group, lr in zip(optimizer.param_groups, RATES, strict=False):
            group["lr"] = lr * falling(number)
        optimizer.zero_grad()
        mse(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        now = figures(model)
        if means is None:
            means = now
        means = {name: each.lerp(now[name], 0.1) for name, each in means.items()}
    scale = 4.0 * 2 ** (2 * len(loader) // 2)
    return {
        **now,
        **{f"mean {name}": each for name, each in means.items()},
        "scale": scale_of(scale),
    }


def scale_of(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def phase_figures(state, step) -> dict[str, Tensor]:
    found = figures(step.plan.model)
    with af.averaged(step):
        means = figures(step.plan.model)
    scale = scale_of(float(state.scaler.scale))
    return {**found, **{f"mean {name}": each for name, each in means.items()}, "scale": scale}


@kind("equal")
def unfreezing(case: Case):
    """The body of a network is unfrozen in the middle of a run, in the same optimizer or in a new one."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)
    switch = 1 + case.seed % len(loader)

    def run(state):
        model = frozen_network()
        optimizer = head_alone(model)
        plan = af.compose(in_phases(case), schedule_of(case, optimizer))
        state, step = af.build(plan(af.Plan(mse, model, optimizer)), state)
        batches = af.shard_loader(loader, state)
        for epoch in batches.epochs(2, since=state):
            for batch in epoch:
                if state.step == switch:
                    if case.strategy == "wrap_fsdp" and state.world_size > 1:
                        # What fully_shard holds cannot be wrapped again: another model of the same names.
                        values = figures(model)
                        model = frozen_network()
                        model.load_state_dict(values)
                        optimizer = head_and_body(model)
                    elif case.seed % 2:
                        optimizer = head_and_body(model)
                    else:
                        body = list(model[0].parameters())
                        optimizer.add_param_group({"params": body, "lr": RATES[1]})
                    model[0].requires_grad_(True)
                    plan = af.compose(in_phases(case), schedule_of(case, optimizer))
                    state, step = af.build(plan(af.Plan(mse, model, optimizer)), state, after=step)
                state, _ = step(state, batch)
        return phase_figures(state, step)

    return lambda: two_phases_by_hand(loader, switch), run


@kind("refused", 'match="names"')
def other_groups_at_resume(case: Case):
    """A run is resumed with more parameters in other groups of the optimizer."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)
    switch = 1 + case.seed % len(loader)

    def run(state, folder, stops_after, match):
        model = frozen_network()
        if stops_after is None:
            model[0].requires_grad_(True)
        optimizer = (head_and_body if stops_after is None else head_alone)(model)
        plan = af.compose(in_phases(case), schedule_of(case, optimizer))
        state, step = af.build(plan(af.Plan(mse, model, optimizer)), state)
        batches = af.shard_loader(loader, state)
        state = af.resume(step, state, folder, extras={"data": batches}, match=match)
        for epoch in batches.epochs(2, since=state):
            for batch in epoch:
                state, _ = step(state, batch)
                if state.step == stops_after:
                    af.save(step, state, folder, extras={"data": batches})
                    return None
        return phase_figures(state, step)

    def twice(state, match):
        return stopped_and_resumed(state, lambda *leg: run(*leg, match), switch)

    return (
        lambda: two_phases_by_hand(loader, switch),
        lambda state: twice(state, "program"),
        lambda state: twice(state, "names"),
    )
