"""Kinds of programs that depend on how a batch is cut, though their losses may not show it."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

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
    train,
    train_by_hand,
    update,
)


@kind("warned", "reduce_mean")
def divided_by_itself(case: Case):
    """The loss is always 1, and its gradient a ratio of means."""
    batch = samples(case)

    def loss_fn(model, batch):
        loss = mse(model, batch)
        return loss / loss.detach()

    def over_ranks(state):
        def loss_fn(model, batch):
            loss = mse(model, batch)
            return loss / af.reduce_mean(loss.detach(), state, weight=len(batch[0]))

        return train(
            state,
            replace(case, k=1),
            network(),
            loss_fn,
            (af.shard_batch(batch, state) for _ in range(3)),
        )

    return (
        lambda: train_by_hand(network(), loss_fn, [batch] * 3),
        lambda state: train(
            state, case, network(), loss_fn, (af.shard_batch(batch, state) for _ in range(3))
        ),
        over_ranks,
    )


@kind("warned", "gather the rows")
def term_of_training_alone(case: Case):
    """A mixture of experts balances its experts over the batch, in training mode alone."""
    x, y = samples(case)

    class Mixture(nn.Module):
        def __init__(self, state=None):
            super().__init__()
            torch.manual_seed(0)
            self.router, self.balance, self.state = nn.Linear(4, 3).double(), 0.0, state
            self.experts = nn.ModuleList([nn.Linear(4, 1).double() for _ in range(3)])

        def forward(self, x):
            shares = self.router(x).softmax(1)
            chosen = F.one_hot(shares.argmax(1), 3).double()
            means = chosen.mean(0), shares.mean(0)
            if self.state is not None:
                means = af.reduce_mean(means, self.state, weight=len(x))
            self.balance = (means[0] * means[1]).sum() if self.training else 0.0
            return sum(each(x) * shares[:, i : i + 1] for i, each in enumerate(self.experts))

    def loss_fn(model, batch):
        return mse(model, batch) + 0.1 * model.balance

    def run(state, case, model):
        return train(state, case, model, loss_fn, (af.shard_batch((x, y), state) for _ in range(3)))

    return (
        lambda: train_by_hand(Mixture(), loss_fn, [(x, y)] * 3),
        lambda state: run(state, case, Mixture()),
        lambda state: run(state, replace(case, k=1), Mixture(state)),
    )


class Counted(nn.Module):
    """A model that scales its output by a count of forwards."""

    def __init__(self, *, counts: bool = True):
        super().__init__()
        self.net, self.count, self.counts = network(), 0, counts

    def forward(self, x):
        if self.training and self.counts:
            self.count += 1
        return self.net(x) * (1 + 0.1 * self.count)


def counting(case: Case, counts: bool):
    """Train by hand, and by steps in which the forward or the loop counts."""
    batch = samples(case)

    def run(state):
        model = Counted(counts=counts)
        batches = (af.shard_batch(batch, state) for _ in range(3))
        plan = recipe(case)(af.Plan(mse, model, sgd(model)))
        state, step = af.build(plan, state)
        losses = []
        for each in batches:
            model.count += not counts
            state, report = step(state, each)
            losses.append(report.loss)
        return figures(model, losses)

    return lambda: train_by_hand(Counted(), mse, [batch] * 3), run


@kind("warned", "write in the loop", k=(2, 3), num_samples=(12, 15, 21))
def counter_in_the_forward(case: Case):
    """An attribute counts forwards, of which there are several in an update."""
    by_hand, run = counting(case, True)
    return by_hand, run, counting(case, False)[1]


@kind("equal", k=(1,))
def counter_of_updates(case: Case):
    """The same count, with one forward in an update on each rank."""
    return counting(case, True)


@kind("warned", "write in the loop", k=(2, 3))
def teacher_in_the_forward(case: Case):
    """A frozen teacher is moved towards its student in each forward."""
    x, _ = samples(case)

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.student = network()
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def move(model):
        for own, slow in zip(model.student.parameters(), model.teacher.parameters(), strict=True):
            slow.data.mul_(0.9).add_(getattr(own, "data", own), alpha=0.1)

    def loss_fn(model, batch):
        return (model.student(batch) + 1 - model.teacher(batch)).square().mean()

    def moving(model, batch):
        move(model)
        return loss_fn(model, batch)

    def run(state, loss_fn, before=lambda model: None):
        model = Pair()
        optimizer = sgd(model.student)
        replicas = af.compose(af.wrap_ddp(), af.accumulate(case.k))
        state, step = af.build(replicas(af.Plan(loss_fn, model, optimizer)), state)
        for _ in range(3):
            before(model)
            state, _ = step(state, af.shard_batch(x, state))
        return figures(model)

    def by_hand():
        model = Pair()
        optimizer = sgd(model.student)
        for _ in range(3):
            update(model, moving(model, x), optimizer)
        return figures(model)

    return by_hand, lambda state: run(state, moving), lambda state: run(state, loss_fn, move)


@kind("refused", "initialise before build", world_size=(2, 3), strategy=("wrap_ddp",))
def rows_bounded_in_the_lookup(case: Case):
    """`F.embedding(max_norm=)` writes to the rows that it looks up."""
    ids = torch.randint(0, 5, (case.num_samples,), generator=case.generator())

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Parameter(torch.randn(5, 4).double())
            self.head = network()

        def forward(self, ids):
            return self.head(F.embedding(ids, self.table, max_norm=0.5))

    def loss_fn(model, batch):
        return (model(batch).squeeze(1) - batch).square().mean()

    return (
        lambda: train_by_hand(Table(), loss_fn, [ids] * 3),
        lambda state: train(
            state, case, Table(), loss_fn, (af.shard_batch(ids, state) for _ in range(3))
        ),
    )


@kind("refused", "weight_fn count what it divides by", world_size=(2, 3), k=(1,))
def divided_by_a_count_over_ranks(case: Case):
    """A program of DDP divides by the mean count of the ranks itself; the step weighs ranks once more."""
    x, y = samples(case)
    mask = (torch.arange(case.num_samples) % 4 != 1).double()[:, None]

    def errors(model, batch):
        return ((model(batch[0]) - batch[1]).square() * batch[2]).sum()

    def by_itself(state):
        def loss_fn(model, batch):
            count = af.reduce_sum(batch[2].sum(), state) / state.world_size
            return errors(model, batch) / count

        return loss_fn

    def run(state, loss_fn, **options):
        batches = (af.shard_batch((x, y, mask), state) for _ in range(3))
        return train(state, case, network(), loss_fn, batches, **options)

    def mean(model, batch):
        return errors(model, batch) / batch[2].sum()

    return (
        lambda: train_by_hand(network(), mean, [(x, y, mask)] * 3),
        lambda state: run(state, by_itself(state)),
        lambda state: run(state, mean, weight_fn=lambda batch: float(batch[2].sum())),
    )


@kind("refused", "reduction='sum'", num_samples=(24,))
def sum_beside_noise(case: Case):
    """A sum over rows, of which the forward draws noise too small to show in the figures."""
    x, y = samples(case)

    def loss_fn(model, batch):
        noise = 1e-300 * torch.randn_like(batch[0])
        return F.mse_loss(model(batch[0] + noise), batch[1], reduction="sum") / 24

    def run(state, **options):
        batches = (af.shard_batch((x, y), state) for _ in range(3))
        return train(state, case, network(), loss_fn, batches, **options)

    return (
        lambda: train_by_hand(network(), loss_fn, [(x, y)] * 3),
        run,
        lambda state: run(state, reduction="sum"),
    )


def from_samples(case: Case, collate, loss_fn, *, sees="rank", **options):
    """Train over an epoch of samples that `collate` joins, of those of a rank or of all."""
    x, y = samples(case)
    rows = [*zip(x, y, strict=True)]
    loader = DataLoader(rows, batch_size=6, collate_fn=collate)

    def run(state):
        batches = af.shard_loader(loader, state, collate=sees)
        return train(state, case, network(), loss_fn, batches, **options)

    return lambda: train_by_hand(network(), loss_fn, loader), run


@kind("warned", "collate_fn", world_size=(2, 3), num_samples=(12, 24))
def collate_that_centres(case: Case):
    """The collate_fn subtracts the mean of its rows, which on a rank are those of its part."""

    def collate(rows):
        inputs, targets = map(torch.stack, zip(*rows, strict=True))
        return inputs - inputs.mean(0), targets

    repaired = from_samples(case, collate, mse, sees="global")
    return *from_samples(case, collate, mse), repaired[1]


def weighed_errors(model, batch):
    errors = (model(batch["inputs"]) - batch["targets"]).square().squeeze(1)
    return (errors * batch["weights"]).sum() / batch["num_items"]


@kind(
    "refused",
    r"batch\['num_items'\].*collate=\"global\"\).*reduction=\"sum\"",
    k=(2, 3),
    num_samples=(12, 24),
)
def denominator_made_by_collate(case: Case):
    """The collate_fn computes the number by which the loss divides, of the samples that it sees."""

    def collate(rows):
        inputs, targets = map(torch.stack, zip(*rows, strict=True))
        weights = 1 + torch.arange(len(rows)).double() % 4
        batch = {"inputs": inputs, "targets": targets, "weights": weights, "longest": len(rows)}
        return {**batch, "num_items": weights.sum()}

    repaired = from_samples(case, collate, weighed_errors, sees="global", reduction="sum")
    return *from_samples(case, collate, weighed_errors), repaired[1]


@kind("equal", num_samples=(12, 24))
def length_made_by_collate(case: Case):
    """The collate_fn pads, and gives the longest length, as flash attention takes it: no result differs."""

    def collate(rows):
        longest = max(2 + int(x.abs().sum() * 10) % 5 for x, _ in rows)
        inputs, targets = map(torch.stack, zip(*rows, strict=True))
        padded = F.pad(inputs[:, :, None].expand(-1, -1, 2), (0, longest))
        return {"inputs": padded, "targets": targets, "max_length": longest}

    def loss_fn(model, batch):
        inputs = batch["inputs"][:, :, : batch["max_length"]].sum(2)
        return mse(model, (inputs, batch["targets"]))

    return from_samples(case, collate, loss_fn)


def chosen_and_rejected(rows):
    first, second = zip(*[(x, x.roll(1)) for x, _ in rows], strict=True)
    return torch.stack(first + second)


def preference(model, batch):
    chosen, rejected = model(batch).squeeze(1).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


@kind("equal", k=(1,), num_samples=(12, 24))
def pairs_in_one_tensor(case: Case):
    """Chosen rows stand before rejected ones: a rank collates its own part, so nothing is wrong."""
    return from_samples(case, chosen_and_rejected, preference)


# In three parts the loss itself fails, where one has a single row.
@kind("refused", "dict or tuple of tensors", k=(2,), num_samples=(12, 24))
def pairs_in_one_tensor_cut(case: Case):
    """The same, cut into micro-batches along the rows."""
    return from_samples(case, chosen_and_rejected, preference)


@kind("warned", r"\(sum, count\)")
def perplexity(case: Case):
    """A metric that is a function of a mean."""
    batch = samples(case)

    def loss_fn(model, batch):
        loss = mse(model, batch)
        return loss, {"perplexity": loss.detach().exp()}

    def run(state, loss_fn, figure):
        model = network()
        state, step = af.build(recipe(case)(af.Plan(loss_fn, model, sgd(model))), state)
        _, report = step(state, af.shard_batch(batch, state))
        return {"perplexity": figure(report)}

    return (
        lambda: {"perplexity": mse(network(), batch).detach().exp()},
        lambda state: run(state, loss_fn, lambda report: report.metrics["perplexity"]),
        lambda state: run(state, mse, lambda report: report.loss.exp()),
    )


@kind("equal", strategy=("wrap_ddp",))
def counts_that_the_loop_adds_up(case: Case):
    """A buffer counts the rows of each expert; the loop adds the counts up over ranks."""
    x, y = samples(case)

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network(3)
            self.register_buffer("load", torch.zeros(3, dtype=torch.float64))

        def forward(self, x):
            scores = self.net(x)
            if self.training:
                self.load += F.one_hot(scores.argmax(1), 3).sum(0)
            return scores.softmax(1)[:, :1]

    def run(state):
        model = Routed()
        state, step = af.build(recipe(case)(af.Plan(mse, model, sgd(model))), state)
        loads = []
        for _ in range(3):
            state, _ = step(state, af.shard_batch((x, y), state))
            loads.append(af.reduce_sum(model.load.clone(), state))
            model.load.zero_()
        return {**figures(model), "loads": torch.stack(loads)}

    def by_hand():
        model = Routed()
        optimizer = sgd(model)
        loads = []
        for _ in range(3):
            update(model, mse(model, (x, y)), optimizer)
            loads.append(model.load.clone())
            model.load.zero_()
        return {**figures(model), "loads": torch.stack(loads)}

    return by_hand, run


@kind("equal")
def what_hooks_keep(case: Case):
    """Attention maps, features of a hook and an auxiliary loss: written by each forward, read in it alone."""
    batch = samples(case)

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.maps, self.size = network(), [], None
            self.net[0].register_forward_hook(self.keep)

        def keep(self, module, inputs, output):
            self.maps = [*self.maps[-1:], output.detach()]

        def forward(self, x):
            out = self.net(x)
            self.size = out.square().mean()
            return out

    def loss_fn(model, batch):
        return mse(model, batch) + 0.1 * model.size

    return (
        lambda: train_by_hand(Watched(), loss_fn, [batch] * 3),
        lambda state: train(
            state, case, Watched(), loss_fn, (af.shard_batch(batch, state) for _ in range(3))
        ),
    )


@kind("equal")
def buffer_that_takes_its_shape(case: Case):
    """A buffer takes its shape in the first forward, and no forward reads it."""
    batch = samples(case)

    class Observed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()
            self.register_buffer("low", torch.empty(0, dtype=torch.float64), persistent=False)

        def forward(self, x):
            if not self.low.numel():
                self.low.resize_(x.shape[1:]).copy_(x.detach().amin(0))
            return self.net(x)

    def run(state):
        model = Observed()
        found = train(state, case, model, mse, (af.shard_batch(batch, state) for _ in range(3)))
        return {**found, "trains": torch.tensor(float(model.training))}

    return (
        lambda: {
            **train_by_hand(Observed(), mse, [batch] * 3),
            "trains": torch.ones(()),
        },
        run,
    )


@kind("equal", k=(128,), num_samples=(256,), batch_size=(256,))
def parameters_in_half_precision(case: Case):
    """A model in bfloat16, whose gradients of many micro-batches point in one direction."""
    draw = case.generator()
    x, y = (torch.rand(case.num_samples, n, generator=draw).add(5 / n).bfloat16() for n in (4, 1))

    def figures_of(gradients):
        found = torch.cat([each.double().flatten() for each in gradients])
        whole = network().bfloat16().double()
        mse(whole, (x.double(), y.double())).backward()
        right = torch.cat([each.grad.flatten() for each in whole.parameters()])
        # Rounded a few times, whatever k is: 2 % is 5 units.
        return {"off by 2 %": ((found - right).norm() / right.norm() > 0.02).double()}

    def by_hand():
        return {"off by 2 %": torch.zeros(()).double()}

    def run(state):
        model = network().bfloat16()
        plan = recipe(case)(af.Plan(mse, model, sgd(model)))
        state, step = af.build(plan, state, check_loss=False)
        _, grads, _ = step.grads(state, af.shard_batch((x, y), state))
        values = grads.values()
        return figures_of(
            [each.full_tensor() if hasattr(each, "full_tensor") else each for each in values]
        )

    return by_hand, run
