"""Kinds of models: what a forward writes, and which parts of a model a batch reaches."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from tests.field.catalogue import kind
from tests.field.program import (
    Case,
    figures,
    mse,
    network,
    normed,
    samples,
    sgd,
    train,
    train_by_hand,
    two_loops,
    update,
)


@kind("warned", "sync_batchnorm=True", k=(1,), num_samples=(24,), batch_size=(6, 8))
def batch_norm(case: Case):
    """Layers take statistics of their rows; the figure of `evaluate` is that of what is saved."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)

    def seen(model, losses, loss):
        return {**figures(model, losses), **dict(model.named_buffers()), "evaluated": loss}

    def by_hand():
        model = normed()
        optimizer = sgd(model)
        losses = [update(model, mse(model, batch), optimizer) for batch in loader]
        return seen(model, losses, mse(copy.deepcopy(model).eval(), samples(case)).detach())

    def run(state, **options):
        model, losses = normed(), []
        wrap = getattr(af, case.strategy)(**options)
        state, step = af.build(wrap(af.Plan(mse, model, sgd(model))), state)
        batches = af.shard_loader(loader, state)
        for batch in batches:
            state, report = step(state, batch)
            losses.append(report.loss)
        loss = af.evaluate(step, state, batches)["loss"]
        with tempfile.TemporaryDirectory() as folder:
            folder = af.broadcast([folder], state)[0]
            if state.is_main or case.strategy == "wrap_fsdp":
                af.save_model(model, folder)
            af.barrier(state)
            saved = normed().eval()
            af.load_model(saved, folder)
            af.barrier(state)
        assert abs(loss - float(mse(saved, samples(case)).detach())) < 1e-12
        return seen(model, losses, torch.tensor(loss, dtype=torch.float64))

    return by_hand, run, lambda state: run(state, sync_batchnorm=True)


@kind(
    "warned",
    "GroupNorm, or freeze it by eval",
    world_size=(1, 2),
    k=(2,),
    num_samples=(24,),
    batch_size=(8,),
)
def batch_norm_of_micro_batches(case: Case):
    """Layers take statistics of micro-batches, where no rank can join them."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)

    def frozen():
        model = normed()
        model[1].eval()
        return model

    by_hand, repaired = two_loops(case, frozen, mse, loader)
    return by_hand, two_loops(case, normed, mse, loader)[1], repaired


@kind("refused", "sync_batchnorm=True", world_size=(2, 3), k=(1,), num_samples=(15,))
def one_row_of_batch_norm(case: Case):
    """A last batch leaves a rank one row, of which a layer has no variance."""
    rows = TensorDataset(*[each[: 6 + 2 * case.world_size - 1] for each in samples(case)])
    loader = DataLoader(rows, batch_size=6)

    def run(state, **options):
        model, losses = normed(), []
        wrap = getattr(af, case.strategy)(**options)
        state, step = af.build(wrap(af.Plan(mse, model, sgd(model))), state)
        for batch in af.shard_loader(loader, state):
            state, report = step(state, batch)
            losses.append(report.loss)
        return figures(model, losses)

    return (
        lambda: train_by_hand(normed(), mse, loader),
        run,
        lambda state: run(state, sync_batchnorm=True),
    )


@kind("warned", "reduce_sum", strategy=("wrap_ddp",))
def codebook(case: Case):
    """The forward moves a codebook in buffers by an average over the batch."""
    x, _ = samples(case)

    class Quantizer(nn.Module):
        def __init__(self, state=None):
            super().__init__()
            torch.manual_seed(2)
            self.encoder, self.state = nn.Linear(4, 3).double(), state
            self.register_buffer("codes", torch.randn(5, 3).double())
            self.register_buffer("counts", torch.ones(5).double())
            self.register_buffer("sums", self.codes.clone())

        def forward(self, x):
            z = self.encoder(x)
            nearest = torch.cdist(z.detach(), self.codes).argmin(1)
            chosen = self.codes[nearest]
            if self.training:
                hot = F.one_hot(nearest, 5).double()
                found = hot.sum(0), hot.T @ z.detach()
                if self.state is not None:
                    found = af.reduce_sum(found, self.state)
                self.counts.mul_(0.9).add_(found[0], alpha=0.1)
                self.sums.mul_(0.9).add_(found[1], alpha=0.1)
                self.codes.copy_(self.sums / self.counts[:, None])
            return (z - chosen).square().mean()

    def loss_fn(model, batch):
        return model(batch)

    def run(state, case, model):
        return {
            **train(state, case, model, loss_fn, (af.shard_batch(x, state) for _ in range(3))),
            "codes": model.codes,
        }

    def by_hand():
        model = Quantizer()
        return {**train_by_hand(model, loss_fn, [x] * 3), "codes": model.codes}

    return (
        by_hand,
        lambda state: run(state, case, Quantizer()),
        lambda state: run(state, replace(case, k=1), Quantizer(state)),
    )


@kind("refused", "find_unused_parameters=True", world_size=(2, 3), strategy=("wrap_ddp",))
def heads_in_turn(case: Case):
    """Each batch is of one task, and reaches the body and the head of its task."""
    x, y = samples(case)

    class Tasks(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Linear(4, 5).double()
            self.heads = nn.ModuleList(nn.Linear(5, 1).double() for _ in range(2))

    def loss_fn(model, batch):
        x, y, task = batch
        return F.mse_loss(model.heads[int(task)](model.body(x).tanh()), y)

    def run(state, wrap):
        model = Tasks()
        plan = af.compose(wrap, af.accumulate(case.k))(af.Plan(loss_fn, model, sgd(model)))
        state, step = af.build(plan, state)
        for number in range(4):
            state, _ = step(state, af.shard_batch((x, y, torch.tensor(number % 2)), state))
        return figures(model)

    def by_hand():
        model = Tasks()
        train_by_hand(model, loss_fn, [(x, y, number % 2) for number in range(4)])
        return figures(model)

    return (
        by_hand,
        lambda state: run(state, af.wrap_ddp()),
        lambda state: run(state, af.wrap_ddp(find_unused_parameters=True)),
    )


@kind("warned", "find_unused_parameters=True", world_size=(1,), k=(2, 3), strategy=("wrap_ddp",))
def heads_on_one_process(case: Case):
    """Heads in turn, on one process, which trains what several ranks refuse."""
    return heads_in_turn(case)


@kind("equal")
def tied_weights(case: Case):
    """A language model whose embedding and head are one parameter."""
    tokens = torch.randint(0, 6, (case.num_samples, 5), generator=case.generator())
    loader = DataLoader(tokens, batch_size=case.batch_size)

    def language_model():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)).double()
        model[1].weight = model[0].weight
        return model

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    return two_loops(case, language_model, loss_fn, loader)


@kind("equal", strategy=("wrap_ddp",))
def adapters(case: Case):
    """A frozen model with a small adapter, whose parameters alone the optimizer holds."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = network().requires_grad_(False)
            self.down, self.up = nn.Linear(4, 2).double(), nn.Linear(2, 1).double()

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    return two_loops(case, Adapted, mse, loader)


@kind("equal")
def switched_adapters(case: Case):
    """Blocks that are recomputed have two adapters, switched between two forwards of one loss."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.adapters, self.active = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), 0

        def forward(self, x):
            return x + self.adapters[self.active](x).tanh() * (2 if self.training else 1)

    def adapted():
        torch.manual_seed(0)
        blocks = nn.Sequential(Block(), Block())
        return nn.Sequential(blocks, nn.Linear(4, 1)).double()

    def use(model, number):
        for block in model[0]:
            block.active = number
            block.train(number == 0)
        return model

    def loss_fn(model, batch):
        x, y = batch
        first, second = use(model, 0)(x), use(model, 1)(x)
        loss = F.mse_loss(first, y) + F.mse_loss(second, -y)
        use(model, 0)
        return loss

    def run(state):
        recipe = af.compose(getattr(af, case.strategy)(), af.accumulate(case.k))
        model = adapted()
        plan = af.compose(recipe, af.checkpoint_activations())(af.Plan(loss_fn, model, sgd(model)))
        state, step = af.build(plan, state)
        losses = []
        for batch in af.shard_loader(loader, state):
            state, report = step(state, batch)
            losses.append(report.loss)
        return figures(model, losses)

    return lambda: train_by_hand(adapted(), loss_fn, loader), run


@kind("refused", "as an argument", k=(1, 2))
def blocks_that_read_their_parent(case: Case):
    """Blocks that are recomputed read a figure of the model around them, which has moved since."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)

    class Block(nn.Module):
        def __init__(self, parent, is_repaired):
            super().__init__()
            self.layer, self.parent, self.is_repaired = nn.Linear(4, 4), [parent], is_repaired

        def forward(self, x, power):
            power = power if self.is_repaired else self.parent[0].power
            return x + self.layer(x).tanh() * power

    class Model(nn.Module):
        def __init__(self, is_repaired=False):
            super().__init__()
            torch.manual_seed(0)
            self.power = 1.0
            self.blocks = nn.ModuleList(Block(self, is_repaired) for _ in range(2))
            self.head = nn.Linear(4, 1)
            self.double()

        def forward(self, x):
            for number, block in enumerate(self.blocks):
                self.power = 1.0 + number
                x = block(x, self.power)
            return self.head(x)

    def run(state, **options):
        model = Model(**options)
        wrap = getattr(af, case.strategy)()
        recipe = af.compose(wrap, af.accumulate(case.k), af.checkpoint_activations())
        state, step = af.build(recipe(af.Plan(mse, model, sgd(model))), state)
        losses = []
        for batch in af.shard_loader(loader, state):
            state, report = step(state, batch)
            losses.append(report.loss)
        return figures(model, losses)

    return (
        lambda: train_by_hand(Model(), mse, loader),
        run,
        lambda state: run(state, is_repaired=True),
    )
