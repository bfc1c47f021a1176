"""Kinds of loops: several plans, several phases, and evaluation in between."""

from __future__ import annotations

import copy
from itertools import chain

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

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
    stopped_and_resumed,
    train,
    train_by_hand,
    train_in_turn,
    train_on,
    update,
)


@kind("equal", strategy=("wrap_ddp",))
def two_losses_in_turn(case: Case):
    """Two plans over one model and one optimizer; both losses reach all of it."""
    batch = samples(case)

    def size(model, batch):
        return model(batch[0]).abs().mean()

    def by_hand():
        model = network()
        optimizer = sgd(model)
        for loss_fn in (mse, size) * 3:
            update(model, loss_fn(model, batch), optimizer)
        return figures(model)

    def run(state):
        model = network()
        return train_in_turn(state, recipe(case), model, sgd(model), (mse, size), batch)

    return by_hand, run


@kind("equal", strategy=("wrap_ddp",))
def a_head_each(case: Case):
    """Two plans over one model, whose losses reach the body and a head each."""
    batch = samples(case)

    class Tasks(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Linear(4, 5).double()
            self.one, self.two = nn.Linear(5, 1).double(), nn.Linear(5, 1).double()

    def first(model, batch):
        return F.mse_loss(model.one(model.body(batch[0]).tanh()), batch[1])

    def second(model, batch):
        return model.two(model.body(batch[0]).tanh()).abs().mean()

    def by_hand():
        model = Tasks()
        optimizer = sgd(model)
        for loss_fn in (first, second) * 3:
            update(model, loss_fn(model, batch), optimizer)
        return figures(model)

    def run(state):
        model = Tasks()
        optimizer = sgd(model)
        wraps = af.compose(af.wrap_ddp(find_unused_parameters=True), af.accumulate(case.k))
        return train_in_turn(state, wraps, model, optimizer, (first, second), batch)

    return by_hand, run


@kind("equal", strategy=("wrap_ddp",))
def phases(case: Case):
    """The head is trained first; then all of the model, by a plan that is built again."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)

    def trained(model, by):
        model[0].requires_grad_(False)
        by(model)
        model[0].requires_grad_(True)
        by(model)
        return figures(model)

    return (
        lambda: trained(network(), lambda model: train_by_hand(model, mse, loader)),
        lambda state: trained(
            network(),
            lambda model: train(state, case, model, mse, af.shard_loader(loader, state)),
        ),
    )


@kind("equal", num_samples=(12, 24))
def folds(case: Case):
    """Cross-validation: a new model and a new plan for each fold."""
    x, y = samples(case)
    folds = [DataLoader(TensorDataset(x[i::2], y[i::2]), batch_size=6) for i in range(2)]

    def joined(results):
        return {
            f"fold {i}, {name}": v for i, found in enumerate(results) for name, v in found.items()
        }

    return (
        lambda: joined(train_by_hand(network(), mse, fold) for fold in folds),
        lambda state: joined(
            train(state, case, network(), mse, af.shard_loader(fold, state)) for fold in folds
        ),
    )


@kind("equal", world_size=(1,))
def evaluation_in_between(case: Case):
    """Data are augmented in the main process, and validated after each batch of training."""
    x, y = samples(case)

    class Augmented(Dataset):
        def __len__(self):
            return len(x)

        def __getitem__(self, i):
            return x[i] + 0.1 * torch.randn(4, dtype=torch.float64), y[i]

    loader = DataLoader(Augmented(), batch_size=case.batch_size)

    def run(state, validates):
        model = network()
        state, step = af.build(recipe(case)(af.Plan(mse, model, sgd(model))), state)
        torch.manual_seed(case.seed)
        for batch in af.shard_loader(loader, state):
            state, _ = step(state, batch)
            if validates:
                af.evaluate(step, state, af.shard_loader(loader, state))
        return figures(model)

    return lambda: run(af.DistState(), False), lambda state: run(state, True)


@kind("warned", "shard_loader", world_size=(2, 3))
def unsharded(case: Case):
    """Every rank trains on the whole batch, since nobody sharded the loader."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)
    return (
        lambda: train_by_hand(network(), mse, loader),
        lambda state: train(state, case, network(), mse, loader),
        lambda state: train(state, case, network(), mse, af.shard_loader(loader, state)),
    )


@kind("warned", "model.train()")
def left_in_evaluation_mode(case: Case):
    """The loop validates by hand after a batch, and forgets to switch the model back."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)

    def run(state, is_switched_back):
        model = network()
        state, step = af.build(recipe(case)(af.Plan(mse, model, sgd(model))), state)
        batches = af.shard_loader(loader, state)
        for batch in batches:
            state, _ = step(state, batch)
            model.eval()
            step.forward(state, batch)
            if is_switched_back:
                model.train()
        return figures(model)

    def by_hand():
        model = network()
        train_by_hand(model, mse, loader)
        return figures(model)

    return by_hand, lambda state: run(state, False), lambda state: run(state, True)


@kind("equal", strategy=("wrap_ddp",))
def gan(case: Case):
    """Two plans, whose losses use both models; each step on a batch has noise of its own."""
    real, _ = samples(case)

    def noise(state):
        shape = case.num_samples, 4
        return af.draw(lambda g: torch.randn(shape, generator=g, dtype=torch.float64), state)

    def models():
        torch.manual_seed(0)
        return nn.Linear(4, 4).double(), network()

    def losses(generator, critic):
        def of_critic(critic, batch):
            real, noise = batch
            fake = generator(noise).detach()
            return F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()

        def of_generator(generator, noise):
            return F.softplus(-critic(generator(noise))).mean()

        return of_critic, of_generator

    def by_hand():
        generator, critic = models()
        of_critic, of_generator = losses(generator, critic)
        optimizers = sgd(generator), sgd(critic)
        for number in range(3):
            first, second = (
                noise(af.DistState(step=number)),
                noise(af.DistState(step=number, call=1)),
            )
            update(critic, of_critic(critic, (real, first)), optimizers[1])
            update(generator, of_generator(generator, second), optimizers[0])
        return figures(nn.ModuleList([generator, critic]))

    def run(state):
        generator, critic = models()
        of_critic, of_generator = losses(generator, critic)
        wraps = recipe(case)
        state, train_critic = af.build(wraps(af.Plan(of_critic, critic, sgd(critic))), state)
        plan = wraps(af.Plan(of_generator, generator, sgd(generator)))
        state, train_generator = af.build(plan, state)
        for _ in range(3):
            batch = af.shard_batch(real, state), noise(state)
            state, _ = train_critic(state, batch, advance=False)
            state, _ = train_generator(state, noise(state))
        return figures(nn.ModuleList([generator, critic]))

    return by_hand, run


@kind("equal")
def several_steps_a_batch(case: Case):
    """A batch is trained on several times, with other noise each time; the run stops between two."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)
    num_steps = 1 + case.seed % 3
    positions = [(step, call) for step in range(2 * len(loader)) for call in range(num_steps)]

    def noise(size, state):
        return af.draw(lambda g: torch.randn(size, 4, generator=g, dtype=torch.float64), state)

    def by_hand():
        model = network()
        optimizer = sgd(model)
        batches = [*loader] * 2
        for step, call in positions:
            x, y = batches[step]
            noisy = x + noise(len(x), af.DistState(step=step, call=call))
            update(model, mse(model, (noisy, y)), optimizer)
        return {**figures(model), "draws": torch.tensor(float(len(positions)))}

    def run(state, folder, stops_after):
        model = network()
        state, step = af.build(recipe(case)(af.Plan(mse, model, sgd(model))), state)
        batches = af.shard_loader(loader, state)
        state = af.resume(step, state, folder, extras={"data": batches})
        for x, y in chain.from_iterable(batches.epochs(2, since=state)):
            size = af.reduce_sum(len(x), state)
            for call in range(state.call, num_steps):
                batch = x + noise(size, state), y
                state, _ = step(state, batch, advance=call == num_steps - 1)
                if (state.step, state.call) == (stops_after, num_steps // 2):
                    af.save(step, state, folder, extras={"data": batches})
                    return None
        draws = {float(noise(2, af.DistState(step=n, call=call))[0, 0]) for n, call in positions}
        return {**figures(model), "draws": torch.tensor(float(len(draws)))}

    return by_hand, lambda state: stopped_and_resumed(state, run, len(loader))


@kind("equal")
def epochs(case: Case):
    """Several epochs of shuffled batches are those of one process."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size, shuffle=True)

    def batches(state):
        for epoch in af.shard_loader(loader, state).epochs(2):
            yield from epoch

    return (
        lambda: train_by_hand(network(), mse, batches(af.DistState(world_size=1))),
        lambda state: train(state, case, network(), mse, batches(state)),
    )


@kind("equal")
def epochs_by_range(case: Case):
    """The loop of every tutorial, with prefetch that is made anew in each epoch."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size, shuffle=True)

    def whole():
        epochs = af.shard_loader(loader, af.DistState()).epochs(3)
        return (batch for epoch in epochs for batch in epoch)

    def batches(state):
        sharded = af.shard_loader(loader, state)
        for _ in range(3):
            yield from af.prefetch(sharded, state)

    return (
        lambda: train_by_hand(network(), mse, whole()),
        lambda state: train(state, case, network(), mse, batches(state)),
    )


class ByEpoch:
    """A sampler inside a wrapper, and a data set, which both go by `set_epoch`."""

    def __init__(self, length):
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(self.length, generator=generator).tolist())

    def __len__(self):
        return self.length


class Wrapped:
    """A sampler that holds another one under a name of its own."""

    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        return iter(self.inner)

    def __len__(self):
        return len(self.inner)


class Curriculum(Dataset):
    def __init__(self, x, y):
        self.x, self.y, self.epoch = x, y, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] * (1 + self.epoch), self.y[i]


def by_set_epoch(case: Case, set_by_loop):
    """Train three passes over what goes by `set_epoch`, which the loop or the loader calls."""
    x, y = samples(case)

    def made():
        data, sampler = Curriculum(x, y), ByEpoch(len(x))
        return data, sampler, DataLoader(data, case.batch_size, sampler=Wrapped(sampler))

    def batches(data, sampler, loader, epochs, *, sets):
        for epoch in epochs:
            if sets:
                data.set_epoch(epoch)
                sampler.set_epoch(epoch)
            yield from loader

    epochs = (3, 0, 7) if set_by_loop else range(3)

    def run(state):
        data, sampler, loader = made()
        sharded = af.shard_loader(loader, state)
        given = batches(data, sampler, sharded, epochs, sets=set_by_loop)
        return train(state, case, network(), mse, given)

    return lambda: train_by_hand(network(), mse, batches(*made(), epochs, sets=True)), run


@kind("equal")
def set_epoch_by_range(case: Case):
    """Each pass of a loop by range calls `set_epoch` of the data set and of a sampler in a sampler."""
    return by_set_epoch(case, False)


@kind("equal")
def set_epoch_by_the_loop(case: Case):
    """The loop calls `set_epoch` itself, with other numbers, which a pass keeps."""
    return by_set_epoch(case, True)


@kind("equal")
def resumed_by_range(case: Case):
    """A loop by range is stopped in its second epoch, and goes on from its checkpoint."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size, shuffle=True)

    def by_hand():
        epochs = af.shard_loader(loader, af.DistState()).epochs(3)
        model = network()
        train_by_hand(model, mse, (batch for epoch in epochs for batch in epoch))
        return figures(model)

    def run(state, folder, stops_after):
        model, sharded = network(), af.shard_loader(loader, state)
        state, step = af.build(recipe(case)(af.Plan(mse, model, sgd(model))), state)
        state = af.resume(step, state, folder, {"loader": sharded})
        for _ in range(sharded.epoch, 3):
            for batch in sharded:
                state, _ = step(state, batch)
                if state.step == stops_after:
                    af.save(step, state, folder, extras={"loader": sharded})
                    return None
        return figures(model)

    return by_hand, lambda state: stopped_and_resumed(state, run, len(loader) + 1)


@kind("equal")
def evaluated(case: Case):
    """The figure of `evaluate` is the mean over all labels of a data set."""
    x, _ = samples(case)
    y = labels(case)
    y[: case.num_samples // 3] = -100

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    loader = DataLoader(TensorDataset(x, y), batch_size=case.batch_size)

    def run(state):
        model = network(3)
        plan = recipe(case)(af.Plan(loss_fn, model, sgd(model), weight_fn=af.count_labels(1)))
        state, step = af.build(plan, state)
        found = af.evaluate(step, state, af.shard_loader(loader, state))
        return {"loss": torch.tensor(found["loss"], dtype=torch.float64)}

    return lambda: {"loss": loss_fn(network(3), (x, y)).detach()}, run


@kind("equal")
def resumed(case: Case):
    """A run is stopped in its second epoch, and goes on from its checkpoint."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)

    def adamw(model):
        return torch.optim.AdamW(model.parameters(), lr=0.05)

    def by_hand():
        model = network()
        optimizer = adamw(model)
        for batch in [*loader] * 3:
            update(model, mse(model, batch), optimizer)
        return figures(model)

    def run(state, folder, stops_after):
        model = network()
        plan = recipe(case)(af.Plan(mse, model, adamw(model)))
        return train_on(state, folder, plan, af.shard_loader(loader, state), 3, stops_after)

    return by_hand, lambda state: stopped_and_resumed(state, run, len(loader) + 1)


@kind("equal")
def adapters_alone(case: Case):
    """A head on a frozen body is stopped, and goes on from a checkpoint without the body."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)

    def adapted(seed):
        model = network()
        model[0].requires_grad_(False)
        torch.manual_seed(seed)
        model[2].reset_parameters()
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    def by_hand():
        model, optimizer = adapted(1)
        for batch in [*loader] * 2:
            update(model, mse(model, batch), optimizer)
        return figures(model)

    def run(state, folder, stops_after):
        model, optimizer = adapted(stops_after or 2)
        state, step = af.build(recipe(case)(af.Plan(mse, model, optimizer)), state)
        batches = af.shard_loader(loader, state)
        state = af.resume(step, state, folder, extras={"data": batches})
        for batch in batches:
            state, _ = step(state, batch)
        if stops_after:
            af.save(step, state, folder, extras={"data": batches}, only="trained")
        return figures(model)

    return by_hand, lambda state: stopped_and_resumed(state, run, 1)


@kind("equal")
def momentum_teacher(case: Case):
    """The loop moves a teacher towards the model after each update, as BYOL and DINO do."""
    x, _ = samples(case)
    loader = DataLoader(TensorDataset(x), batch_size=case.batch_size)

    def trained(model, teacher, steps):
        for each in steps:
            each()
            with torch.no_grad():
                new = figures(model)
                for name, value in teacher.named_parameters():
                    value.lerp_(new[name], 0.1)
        return {**figures(model), **{f"teacher {n}": v for n, v in figures(teacher).items()}}

    def made():
        model = network(3)
        teacher = copy.deepcopy(model).requires_grad_(False)

        def loss_fn(model, batch):
            return F.mse_loss(model(batch[0] + 0.1), 2 * teacher(batch[0]))

        return model, teacher, loss_fn

    def by_hand():
        model, teacher, loss_fn = made()
        optimizer = sgd(model)
        steps = (
            lambda batch=batch: update(model, loss_fn(model, batch), optimizer) for batch in loader
        )
        return trained(model, teacher, steps)

    def run(state):
        model, teacher, loss_fn = made()
        state, step = af.build(recipe(case)(af.Plan(loss_fn, model, sgd(model))), state)
        batches = af.shard_loader(loader, state)

        def go_on(batch):
            nonlocal state
            state, _ = step(state, batch)

        return trained(model, teacher, (lambda batch=batch: go_on(batch) for batch in batches))

    return by_hand, run


@kind("equal")
def rate_by_hand(case: Case):
    """The loop lowers the learning rate itself, and trains the head by another optimizer."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)

    def optimizers(model):
        return {
            "body": torch.optim.AdamW(model[0].parameters(), lr=0.05),
            "head": torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9),
        }

    def by_hand():
        model = network()
        both = optimizers(model)
        for batch in loader:
            model.zero_grad()
            mse(model, batch).backward()
            for each in both.values():
                each.step()
            both["body"].param_groups[0]["lr"] *= 0.5
        return figures(model)

    def run(state):
        model = network()
        both = optimizers(model)
        state, step = af.build(recipe(case)(af.Plan(mse, model, both)), state)
        for batch in af.shard_loader(loader, state):
            state, _ = step(state, batch)
            both["body"].param_groups[0]["lr"] *= 0.5
        return figures(model)

    return by_hand, run


@kind("equal")
def habits(case: Case):
    """The loop clears gradients and steps the optimizer too; its loss closes over the model."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)

    def run(state):
        model = network()
        optimizer = sgd(model)

        def loss_fn(_, batch):
            return mse(model, batch)

        state, step = af.build(recipe(case)(af.Plan(loss_fn, model, optimizer)), state)
        losses = []
        for batch in af.shard_loader(loader, state):
            optimizer.zero_grad()
            state, report = step(state, batch)
            optimizer.step()
            losses.append(report.loss)
        return figures(model, losses)

    return lambda: train_by_hand(network(), mse, loader), run


@kind("equal", strategy=("wrap_ddp",))
def averaged(case: Case):
    """An exponential moving average of the parameters is evaluated."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)

    def by_hand():
        model = network()
        average, optimizer = copy.deepcopy(model), sgd(model)
        for number, batch in enumerate(loader):
            update(model, mse(model, batch), optimizer)
            with torch.no_grad():
                for mean, new in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(new, 0.1 if number else 1.0)
        return {**figures(average), "loss": mse(average, samples(case)).detach()}

    def run(state):
        model = network()
        plan = af.ema(0.9)(recipe(case)(af.Plan(mse, model, sgd(model))))
        state, step = af.build(plan, state)
        batches = af.shard_loader(loader, state)
        for batch in batches:
            state, _ = step(state, batch)
        with af.averaged(step):
            loss = af.evaluate(step, state, batches)["loss"]
            return {**figures(model), "loss": torch.tensor(loss, dtype=torch.float64)}

    return by_hand, run


@kind(
    "warned", r"write state, report = step\(state, batch\)", num_samples=(21, 24), batch_size=(6,)
)
def state_that_stays(case: Case):
    """The loop drops the new state, by which a schedule of batches counts."""
    batch = samples(case)
    batches = [tuple(each[start : start + 6] for each in batch) for start in range(0, 18, 6)] * 2

    def by_hand():
        model = network()
        optimizer = sgd(model)
        for number, each in enumerate(batches):
            optimizer.param_groups[0]["lr"] = 0.1 * 0.5 ** (number // 2)
            update(model, mse(model, each), optimizer)
        return figures(model)

    def run(state, *, is_kept=False):
        model = network()
        halves = af.schedule(lambda count: 0.5**count, every=2)
        plan = af.compose(recipe(case), halves)(af.Plan(mse, model, sgd(model)))
        state, step = af.build(plan, state)
        for each in batches:
            after, _ = step(state, af.shard_batch(each, state))
            state = after if is_kept else state
        return figures(model)

    return by_hand, run, lambda state: run(state, is_kept=True)
