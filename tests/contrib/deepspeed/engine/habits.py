"""What people do beside a step, or with their models, on two ranks."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import accel_fn as af
from tests.contrib.deepspeed.engine.cases import (
    OPTIMIZERS,
    add_at,
    batches,
    count,
    distance,
    loss_fn,
    make_model,
    rows_of,
    whole,
    zero,
)


def cases(folder):
    found = {}
    for stage in range(4):
        add = partial(add_at, found, stage)
        add("untrained", untrained)
        add("layout", layout)
        add("freezes", acts, act=freezes)
        if stage:
            add("not finite", not_finite)
            add("reads optimizer", acts, act=lambda state, model, each, _: each.state_dict())
            add("writes optimizer", acts, act=writes_optimizer)
            add("writes model", acts, act=lambda state, model, *_: model.load_state_dict({}))
            add("clamps", acts, act=clamps, strategy=af.wrap_deepspeed(stage=stage))
        if stage in (1, 2):
            add("scalar", scalar, folder=folder)
        if stage >= 2:
            add("backward", acts, act=backward)
    found["reads shards"] = lambda state: acts(
        state, stage=3, act=lambda state, model, *_: model.state_dict()
    )
    found["gathered"] = lambda state: acts(state, stage=3, act=clamps_gathered)
    found["penalty of shards"] = penalty
    found["another reference"] = another_reference
    found["zero.Init"] = born_sharded
    return found


def built(run, transform, model, parameters=None, loss=loss_fn):
    optimizer = OPTIMIZERS["momentum"](model.parameters() if parameters is None else parameters)
    plan = transform(af.Plan(loss, model, optimizer, count))
    return *af.build(plan, run, check_loss=False), optimizer


def same(state, stage, make, trained=None, others=()):
    """How far two ranks are from one."""
    ends = []
    for run, strategy in ((state, [zero(stage)]), (af.DistState(), [])):
        model = make()
        parameters = None if trained is None else trained(model)
        run, step, _ = built(run, af.compose(*strategy, *others), model, parameters)
        for batch in batches(3):
            run, _ = step(run, batch if run.world_size == 1 else rows_of(batch, run, 11))
        ends.append(whole(model))
    return distance(*ends)


def untrained(state, *, stage):
    """Layers that require a gradient, and are in no optimizer, do not count in the norm."""
    return same(state, stage, make_model, lambda model: model[4].parameters(), [af.clip(0.1)])


class Image(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 2), nn.Tanh(), nn.Conv2d(4, 3, (1, 2)))
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.layers(x.view(-1, 1, 2, 3)).flatten(1)


def layout(state, *, stage):
    """Parameters of channels last."""
    return same(state, stage, Image)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = make_model(), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.inner(x) * self.scale


def scalar(state, *, stage, folder):
    """A parameter of no dimensions, over a save and a load."""
    place, every = folder / f"scalar{stage}", batches(4)
    run, step, _ = built(state, zero(stage), Scaled())
    for batch in every[:2]:
        run, _ = step(run, rows_of(batch, run, 11))
    af.save(step, run, place)
    model = Scaled()
    run, step, _ = built(state, zero(stage), model)
    run = af.load(step, run, place)
    for batch in every[2:]:
        run, _ = step(run, rows_of(batch, run, 11))
    hand = Scaled()
    alone, other, _ = built(af.DistState(), af.compose(), hand)
    for batch in every:
        alone, _ = other(alone, batch)
    return distance(whole(model), whole(hand))


def acts(state, *, stage, act, strategy=None):
    """A step, something beside it, and a step: what is refused."""
    model = make_model()
    run, step, optimizer = built(state, strategy or zero(stage), model)
    part = rows_of(batches(1)[0], state, 8)
    run, _ = step(run, part)
    try:
        act(state, model, optimizer, part)
        step(run, part)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing is refused"


def freezes(state, model, *_):
    model[0].requires_grad_(False)


def writes_optimizer(state, model, optimizer, _):
    optimizer.load_state_dict(OPTIMIZERS["momentum"](model.parameters()).state_dict())


def clamps(state, model, *_):
    """On one rank, so that one shard alone differs."""
    if state.rank == 1:
        for each in model.parameters():
            each.data.clamp_(-0.01, 0.01)


def clamps_gathered(state, model, *_):
    import deepspeed

    with deepspeed.zero.GatheredParameters([*model.parameters()], modifier_rank=0):
        for each in model.parameters():
            each.data.clamp_(-0.01, 0.01)


def backward(state, model, _, part):
    loss_fn(model, part).backward()


def not_finite(state, *, stage):
    """A batch of infinite gradients changes nothing, which the report shows; the schedule waits."""

    def transform(plan):
        halved = torch.optim.lr_scheduler.ExponentialLR(plan.optimizer, 0.5)
        return af.compose(zero(stage), af.clip(1.0), af.schedule(halved))(plan)

    model = make_model()
    run, step, optimizer = built(state, transform, model)
    x, y, mask = rows_of(batches(1)[0], state, 8)
    run, first = step(run, (x, y, mask))
    before = whole(model)
    run, second = step(run, (x, y * torch.inf, mask))
    applied = [first.applied.item(), second.applied.item()]
    return [*applied, optimizer.param_groups[0]["lr"], distance(whole(model), before)]


def penalty(state):
    """A penalty over model.parameters(), which are empty."""

    def loss(model, batch):
        return loss_fn(model, batch) + sum(each.square().sum() for each in model.parameters())

    run, step, _ = built(state, zero(3), make_model(), loss=loss)
    try:
        step(run, rows_of(batches(1)[0], state, 8))
    except ValueError as error:
        return str(error)
    return "nothing is refused"


class Borrowing(nn.Module):
    """Keeps the weight of a layer in a list."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.borrowed = [self.layer.weight]

    def forward(self, x):
        return self.layer(x) + x @ self.borrowed[0].T


def another_reference(state):
    run, step, _ = built(state, zero(3), Borrowing())
    try:
        step(run, rows_of(batches(1)[0], state, 8))
    except RuntimeError as error:
        return error.__notes__
    return "nothing is refused"


def born_sharded(state):
    """A model made as DeepSpeed's own documentation has it."""
    import deepspeed

    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = make_model()
    try:
        built(state, zero(3), model)
    except ValueError as error:
        return str(error)
    return "nothing is refused"
