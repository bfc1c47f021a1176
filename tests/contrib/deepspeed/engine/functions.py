"""What works beside wrap_deepspeed, and what it refuses, on two ranks."""

from __future__ import annotations

import os
import warnings
from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from tests.contrib.deepspeed.engine.cases import (
    OPTIMIZERS,
    add_at,
    batches,
    by_hand,
    count,
    distance,
    loss_fn,
    make_model,
    relative,
    rows_of,
    train,
    whole,
    zero,
)


def cases(folder):
    found = {}
    for stage in range(4):
        add = partial(add_at, found, stage)
        add("forward", forward)
        add("evaluate", evaluates)
        add("predict", predicts)
        add("explain", explains)
        add("schedule", schedules)
        add("bf16", in_bf16)
        add("activations", checkpoints_activations)
        add("frozen", frozen)
        add("weightless", weightless)
        add("no weight", no_weight)
        add("terms", terms)
        add("sum", sums)
        add("unreached", unreached)
        add("nothing", reaches_nothing)
        add("evaluation", fails_in_evaluation)
        add("penalty", penalty)
        add("tied", tied)
        add("groups", groups, folder=folder)
        add("grads", refused, of=lambda state, step, part: step.grads(state, part))
        add("update", refused, of=lambda state, step, part: step.update(state, af.Grads(()), None))
        add("failed", failed)
        if stage:
            add("offload", offloaded)
            add("experts", experts)
            add("two engines", two_engines)
            add("in use", in_use)
            add(
                "accelerate",
                refused,
                of=lambda state, step, part: af.checkpoint.load_accelerate(step, state, "."),
            )
    for stage in range(3):
        found[f"average {stage}"] = lambda state, stage=stage: averages(state, stage)
        found[f"replicas {stage}"] = lambda state, stage=stage: replicas(state, stage)
    found["launch"] = launched
    found["lock"] = lock
    return found


def built(state, stage, *transforms, model=None):
    model = make_model() if model is None else model
    recipe = af.compose(zero(stage), *transforms)
    optimizer = OPTIMIZERS["sgd"]([each for each in model.parameters() if each.requires_grad])
    state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer, count)), state)
    return state, step, model


def forward(state, *, stage):
    _, step, _ = built(state, stage)
    batch = batches(1)[0]
    return relative(
        [step.forward(state, rows_of(batch, state, 11)).item()],
        [loss_fn(make_model(), batch).item()],
    )


def evaluates(state, *, stage):
    _, step, _ = built(state, stage)
    every = batches(3)
    # Rank 1 has one batch less, which at stage 3 is one forward less.
    mine = [rows_of(each, state, 11) for each in every]
    mine[-1] = every[-1] if state.rank == 0 else None
    found = af.evaluate(step, state, [each for each in mine if each is not None])
    weights = [count(each) for each in every]
    losses = [loss_fn(make_model(), each).item() for each in every]
    mean = sum(w * each for w, each in zip(weights, losses, strict=True)) / sum(weights)
    return relative([found["loss"]], [mean])


def predicts(state, *, stage):
    """Rows of a loader whose last batch is one sample, so that rank 1 has none of it."""
    _, step, _ = built(state, stage)
    inputs = batches(1)[0][0][:7]
    loader = af.shard_loader(DataLoader(TensorDataset(inputs), batch_size=3), state)
    found = af.predict(step, state, loader, lambda model, batch: model(batch[0]))
    return distance([found], [make_model()(inputs).detach()])


def explains(state, *, stage):
    *_, step = train(state, af.wrap_deepspeed(stage=stage), "sgd", "even", num=1)
    return af.explain(step, state)


def schedules(state, *, stage):
    """Rates 0.1, 0.01, 0.001, as by hand."""

    def transform(plan):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(plan.optimizer, 0.1)
        return af.compose(af.schedule(scheduler), zero(stage))(plan)

    def alone(plan):
        return af.schedule(torch.optim.lr_scheduler.ExponentialLR(plan.optimizer, 0.1))(plan)

    ours, *_ = train(state, transform, "momentum", "uneven")
    return distance(ours, train(af.DistState(), alone, "momentum")[0])


def in_bf16(state, *, stage):
    """Far from float32, and as near to one process as bf16 is."""
    amp = af.with_amp("bf16")
    ours, losses, *_ = train(state, af.compose(amp, zero(stage)), "sgd", "uneven")
    alone, losses_alone, *_ = train(af.DistState(), amp, "sgd")
    _, losses_wide = by_hand("sgd")
    return {
        "one process": max(distance(ours, alone), relative(losses, losses_alone)),
        "float32": relative(losses, losses_wide),
    }


def checkpoints_activations(state, *, stage):
    recipe = af.compose(
        zero(stage),
        af.checkpoint_activations(blocks=nn.Linear),
        af.accumulate(2),
    )
    ours, *_ = train(state, recipe, "sgd", "uneven")
    return distance(ours, by_hand("sgd")[0])


def frozen(state, *, stage):
    """A frozen layer stays, and the others train as by hand."""

    def model():
        made = make_model()
        made[2].requires_grad_(False)
        return made

    first = model()
    ours, *_ = train(state, zero(stage), "sgd", "uneven", model=first)
    other = model()
    alone, *_ = train(af.DistState(), af.compose(), "sgd", model=other)
    return distance(ours, alone)


def weightless(state, *, stage):
    """Row 3 alone has a mean over nothing, NaN: it is a micro-batch of rank 0."""
    recipe = af.compose(zero(stage), af.accumulate(16))
    ours, losses, *_ = train(state, recipe, "sgd", "uneven")
    hand, losses_by_hand = by_hand("sgd")
    return max(distance(ours, hand), relative(losses, losses_by_hand))


def no_weight(state, *, stage):
    """No rank has a label that counts: nothing moves, or stage 3 refuses."""
    state, step, model = built(state, stage)
    before = whole(model)
    try:
        step(state, None)
    except ValueError as error:
        return str(error)
    return distance(whole(model), before)


def terms(state, *, stage):
    """Two means over different items, one of which rank 1 has none of, and a metric."""

    def two(model, batch):
        x, y, mask = batch
        error = (model(x) - y).square()
        first = {"labels": (error * mask).sum() / mask.sum(), "rows": error.abs().mean()}
        return first, {"error": (error.sum().detach(), float(error.numel()))}

    def plan(transform, model):
        weights = {"labels": count, "rows": lambda batch: len(batch[0])}
        made = af.Plan(two, model, OPTIMIZERS["momentum"](model.parameters()), weights)
        return transform(made)

    ends = []
    recipe = af.compose(zero(stage), af.accumulate(3))
    for transform, run, cut in ((recipe, state, 11), (af.compose(), af.DistState(), None)):
        model = make_model()
        run, step = af.build(plan(transform, model), run)
        values = []
        for batch in batches(3):
            batch[2][11:] = 0
            run, report = step(run, batch if cut is None else rows_of(batch, run, cut))
            values += [report.loss.item(), report.metrics["error"].item()]
        ends.append((whole(model), values))
    (ours, losses), (alone, losses_alone) = ends
    return max(distance(ours, alone), relative(losses, losses_alone))


def sums(state, *, stage):
    """A loss that is a sum over the items."""

    def total(model, batch):
        x, y, mask = batch
        return ((model(x) - y).square() * mask).sum() / 100

    ends = []
    for transform, run in ((zero(stage), state), (af.compose(), af.DistState())):
        model = make_model()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        plan = af.Plan(total, model, optimizer, count, reduction="sum")
        run, step = af.build(transform(plan), run)
        for batch in batches(3):
            run, _ = step(run, batch if run.world_size == 1 else rows_of(batch, run, 11))
        ends.append(whole(model))
    return distance(*ends)


def unreached(state, *, stage):
    """A parameter that no loss reaches, while rank 1 has no rows: the others train as by hand."""
    model = nn.ModuleDict({"used": make_model(), "spare": nn.Linear(6, 3)})

    def loss(model, batch):
        return loss_fn(model["used"], batch)

    plan = af.Plan(loss, model, OPTIMIZERS["sgd"](model.parameters()), count)
    state, step = af.build(zero(stage)(plan), state)
    for batch in batches(4):
        state, _ = step(state, rows_of(batch, state, 16))
    return distance(whole(model["used"]), by_hand("sgd")[0])


def reaches_nothing(state, *, stage):
    """A loss of a copy of the model."""
    model, other = make_model(), nn.Linear(6, 3)

    def loss(model, batch):
        return loss_fn(other, batch)

    plan = af.Plan(loss, model, OPTIMIZERS["sgd"](model.parameters()), count)
    state, step = af.build(zero(stage)(plan), state, check_loss=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of tensors outside of the model
        try:
            step(state, rows_of(batches(1)[0], state, 8))
        except ValueError as error:
            return str(error)
    return "nothing is refused"


def same(state, stage, make, loss, optimizer="momentum"):
    """How far two ranks are from one, for a model and a loss."""
    ends = []
    for transform, run in ((zero(stage), state), (af.compose(), af.DistState())):
        model = make()
        made = OPTIMIZERS[optimizer](model.parameters())
        run, step = af.build(transform(af.Plan(loss, model, made, count)), run)
        for batch in batches(3):
            run, _ = step(run, batch if run.world_size == 1 else rows_of(batch, run, 11))
        ends.append(whole(model))
    return distance(*ends)


def penalty(state, *, stage):
    """A loss with the gradient of its input in it."""

    def loss(model, batch):
        x, y, mask = batch
        x = x.clone().requires_grad_()
        error = ((model(x) - y).square() * mask).sum() / mask.sum()
        (gradient,) = torch.autograd.grad(error * mask.sum(), x, create_graph=True)
        return error + gradient.square().sum() / mask.sum()

    try:
        return same(state, stage, make_model, loss)
    except RuntimeError as error:
        return error.__notes__


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.full((3,), float(os.environ["RANK"])))

    def forward(self, x):
        return self.last(self.second(self.first(x).tanh()).tanh()) + self.shift


def tied(state, *, stage):
    """Two layers share a weight; a buffer is that of rank 0."""
    return same(state, stage, Tied, loss_fn)


def groups(state, *, stage, folder):
    """Groups with settings of their own, over a save and a load."""
    place = folder / f"groups{stage}"

    def built(run, transform):
        model = make_model()
        pairs = [
            {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 0.03},
        ]
        optimizer = torch.optim.AdamW(pairs, 0.01)
        return *af.build(transform(af.Plan(loss_fn, model, optimizer, count)), run), model

    run, step, _ = built(state, zero(stage))
    for batch in batches(3):
        run, _ = step(run, rows_of(batch, run, 11))
    af.save(step, run, place)
    run, step, model = built(state, zero(stage))
    run = af.load(step, run, place)
    alone, other, model_alone = built(af.DistState(), af.compose())
    for batch in batches(5):
        alone, _ = other(alone, batch)
    for batch in batches(5)[3:]:
        run, _ = step(run, rows_of(batch, run, 11))
    return distance(whole(model), whole(model_alone))


class Training(nn.Sequential):
    """A model that cannot be evaluated."""

    def forward(self, x):
        hidden = self[0](x)
        if not self.training:
            raise RuntimeError("not in evaluation mode")
        for layer in self[1:]:
            hidden = layer(hidden)
        return hidden


def fails_in_evaluation(state, *, stage):
    """The comparison of losses fails in the middle of a forward, and training goes on."""
    model = Training(*make_model())
    ours, *_ = train(state, zero(stage), "sgd", "uneven", model=model)
    return distance(ours, by_hand("sgd")[0])


def experts(state, *, stage):
    """Each rank's rows reach another expert."""
    model = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def loss(model, batch):
        return loss_fn(model[state.rank], batch)

    plan = af.Plan(loss, model, OPTIMIZERS["sgd"](model.parameters()), count)
    built, step = af.build(zero(stage)(plan), state, check_loss=False)
    try:
        step(built, rows_of(batches(1)[0], built, 8))
    except ValueError as error:
        return str(error)
    return "nothing is refused"


def two_engines(state, *, stage):
    """The loss of one half of a GAN reaches the other half, which has an engine too."""
    judge, maker = nn.Linear(3, 1), make_model()

    def judged(judge, batch):
        return judge(batch[1]).square().mean()

    def made(maker, batch):
        return judge(maker(batch[0])).square().mean()

    part = rows_of(batches(1)[0], state, 8)
    plans = [
        af.Plan(loss, model, OPTIMIZERS["sgd"](model.parameters()))
        for loss, model in ((judged, judge), (made, maker))
    ]
    state, first = af.build(zero(stage)(plans[0]), state, check_loss=False)
    state, second = af.build(zero(stage)(plans[1]), state, check_loss=False)
    state, _ = first(state, part)
    judge.requires_grad_(False)
    state, _ = second(state, part)
    judge.requires_grad_(True)
    state, _ = first(state, part)
    try:
        second(state, part)
    except ValueError as error:
        return str(error)
    return "nothing is refused"


def in_use(state, *, stage):
    """A second step for a model, by another strategy."""
    state, _, model = built(state, stage)
    plan = af.Plan(loss_fn, model, OPTIMIZERS["sgd"](model.parameters()), count)
    try:
        af.build(af.wrap_ddp()(plan), state)
    except ValueError as error:
        return str(error)
    return "nothing is refused"


def refused(state, *, stage, of):
    state, step, _ = built(state, stage)
    try:
        of(state, step, rows_of(batches(1)[0], state, 8))
    except ValueError as error:
        return str(error)
    return "nothing is refused"


def failed(state, *, stage):
    """A second step after one whose loss has raised."""
    state, step, _ = built(state, stage)
    x, y, mask = rows_of(batches(1)[0], state, 8)
    for width in (2, 6):
        try:
            step(state, (x[:, :width], y, mask))
        except (RuntimeError, ValueError) as error:
            found = str(error)
    return found


def offloaded(state, *, stage):
    recipe = af.compose(
        af.wrap_deepspeed(stage=stage, offload="cpu"), af.clip(0.5), af.accumulate(2)
    )
    ours, _, norms, *_ = train(state, recipe, "momentum", "uneven")
    alone, _, norms_alone, *_ = train(af.DistState(), af.clip(0.5), "momentum")
    return max(distance(ours, alone), relative(norms, norms_alone))


def averages(state, stage):
    recipe = af.compose(af.ema(0.9), zero(stage))
    *_, state, step = train(state, recipe, "sgd", "uneven")
    *_, alone = train(af.DistState(), af.ema(0.9), "sgd")
    means = []
    for each in (step, alone):
        with af.averaged(each):
            means.append([p.detach().clone() for p in each.plan.model.parameters()])
    # Steps go on after it, from the parameters as they were.
    for each, run in ((step, state), (alone, af.DistState())):
        batch = batches(5)[4]
        each(run, batch if run.world_size == 1 else rows_of(batch, run, 11))
    ends = (whole(each.plan.model) for each in (step, alone))
    return max(distance(*means), distance(*ends))


def replicas(state, stage):
    """A parameter that one rank changes is named."""
    state, step, model = built(state, stage, af.check_replicas(every=1))
    part = rows_of(batches(1)[0], state, 8)
    state, _ = step(state, part)
    if state.rank == 1:
        model[0].bias.data[0] += 1.0
    try:
        step(state, part)
    except RuntimeError as error:
        return str(error)
    return "nothing is found"


def launched(state):
    """wrap() of a launch with --wrap deepspeed."""
    ours, _, _, state, step = train(state, af.wrap_as_launched(), "momentum", "uneven")
    return [af.explain(step, state), distance(ours, by_hand("momentum")[0])]


def lock(state):
    """A build that was killed leaves a lock, which is found on all ranks."""
    from pathlib import Path

    from torch.utils.cpp_extension import _get_build_directory

    file = Path(_get_build_directory("deepspeed_shm_comm", verbose=False)) / "lock"
    af.on_main(file.touch, state)
    try:
        built(state, 1)
    except ValueError as error:
        return str(error)
    finally:
        af.barrier(state)
        af.on_main(file.unlink, state)
    return "nothing is refused"
