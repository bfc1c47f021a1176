"""Kinds of losses: what they are a mean over, and what they hold beside the model."""

from __future__ import annotations

import copy
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
    labels,
    mse,
    network,
    recipe,
    samples,
    sgd,
    train,
    train_by_hand,
    two_loops,
    update,
)

OF_ALL_ROWS = "gather the rows"


@kind("warned", "class_weight=")
def class_weights(case: Case):
    """cross_entropy divides by the sum of the weights of the labels."""
    x, _ = samples(case)
    weight = torch.tensor([1.0, 7.0, 0.5]).double()
    loader = DataLoader(TensorDataset(x, labels(case)), batch_size=case.batch_size)

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], weight=weight)

    def run(state, **options):
        return train(state, case, network(3), loss_fn, af.shard_loader(loader, state), **options)

    return (
        lambda: train_by_hand(network(3), loss_fn, loader),
        run,
        lambda state: run(state, weight_fn=af.count_labels(1, class_weight=weight)),
    )


@kind("warned", "a mapping for several")
def two_denominators(case: Case):
    """A detection loss: classes are a mean over labels, boxes one over the samples that have one."""
    x, y = samples(case)
    classes = labels(case)
    classes[::4] = -100
    has_box = x[:, 0] > 0.3
    loader = DataLoader(TensorDataset(x, classes, y, has_box), batch_size=case.batch_size)

    def terms(model, batch):
        out = model(batch[0])
        boxes = (out[:, 3:] - batch[2]).abs()[batch[3]]
        return {"cls": F.cross_entropy(out[:, :3], batch[1]), "box": boxes.mean()}

    def loss_fn(model, batch):
        found = terms(model, batch)
        return found["cls"] + (found["box"] if batch[3].any() else 0)

    def run(state, loss_fn, weight_fn):
        batches = af.shard_loader(loader, state)
        return train(state, case, network(4), loss_fn, batches, weight_fn=weight_fn)

    counted = {"cls": af.count_labels(1), "box": lambda batch: batch[3].sum()}
    return (
        lambda: train_by_hand(network(4), loss_fn, loader),
        lambda state: run(state, loss_fn, counted["cls"]),
        lambda state: run(state, terms, counted),
    )


@kind("equal")
def all_anchors_by_the_positives(case: Case):
    """A sum over all rows, by the number of those that the forward calls positive; a part may have none."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)

    def pair(model, batch):
        out = model(batch[0])
        return (out - batch[1]).square().sum(), (batch[1] > out.detach()).sum()

    def by_hand(model, batch):
        total, count = pair(model, batch)
        return total / count if count else 0 * total

    return (
        lambda: train_by_hand(network(), by_hand, loader),
        lambda state: train(state, case, network(), pair, af.shard_loader(loader, state)),
    )


@kind("equal")
def two_sums_with_counts(case: Case):
    """Classes by the weights of their labels, boxes by the rows that the forward chooses."""
    x, y = samples(case)
    weight = torch.tensor([1.0, 7.0, 0.5]).double()
    loader = DataLoader(TensorDataset(x, labels(case), y), batch_size=case.batch_size)

    def pairs(model, batch):
        out = model(batch[0])
        chosen = out.detach()[:, 3] > 0
        losses = F.cross_entropy(out[:, :3], batch[1], weight=weight, reduction="sum")
        boxes = (out[:, 3:] - batch[2]).abs()[chosen].sum()
        return {"cls": (losses, weight[batch[1]].sum()), "box": (boxes, chosen.sum())}

    def by_hand(model, batch):
        return sum(
            total / count if count else 0 * total for total, count in pairs(model, batch).values()
        )

    return (
        lambda: train_by_hand(network(4), by_hand, loader),
        lambda state: train(state, case, network(4), pairs, af.shard_loader(loader, state)),
    )


@kind("equal", k=(1,))
def balance_of_experts(case: Case):
    """A product of two means over the batch: the load of each expert and its probability."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)

    def loss_of(mean):
        def loss_fn(model, batch):
            scores = model(batch[0])
            routed = scores.softmax(1)
            chosen = F.one_hot(routed.argmax(1), 3).to(routed)
            out = (scores * chosen).sum(1, keepdim=True)
            return F.mse_loss(out, batch[1]) + (mean(chosen) * mean(routed)).sum()

        return loss_fn

    def run(state):
        loss_fn = loss_of(lambda x: af.batch_mean(x, state, "mean"))
        return train(state, case, network(3), loss_fn, af.shard_loader(loader, state))

    return lambda: train_by_hand(network(3), loss_of(lambda x: x.mean(0)), loader), run


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

    counted = {"cls": af.count_labels(1), "box": lambda batch: batch[3].sum()}
    return (
        lambda: train_by_hand(network(4), by_hand, loader),
        lambda state: train(
            state, case, network(4), terms, af.shard_loader(loader, state), weight_fn=counted
        ),
    )


@kind("warned", OF_ALL_ROWS)
def rmse(case: Case):
    """The root of a mean: the repaired loss is that of the whole batch."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)

    def loss_fn(model, batch):
        return mse(model, batch).sqrt()

    def run(state, case, loss_fn):
        return train(state, case, network(), loss_fn, af.shard_loader(loader, state))

    def of_all_ranks(state):
        def loss_fn(model, batch):
            return af.reduce_mean(mse(model, batch), state, weight=len(batch[0])).sqrt()

        return run(state, replace(case, k=1), loss_fn)

    return (
        lambda: train_by_hand(network(), loss_fn, loader),
        lambda state: run(state, case, loss_fn),
        of_all_ranks,
    )


@kind("warned", OF_ALL_ROWS)
def dice(case: Case):
    """A ratio of sums over the batch: the repaired loss adds up over the ranks."""
    x, _ = samples(case)
    loader = DataLoader(TensorDataset(x, (x[:, :2] > 0).double()), batch_size=case.batch_size)

    def sums(model, batch):
        p = model(batch[0]).sigmoid()
        return (p * batch[1]).sum(), p.sum() + batch[1].sum()

    def loss_fn(model, batch):
        both, each = sums(model, batch)
        return 1 - 2 * both / each

    def run(state, case, loss_fn):
        return train(state, case, network(2), loss_fn, af.shard_loader(loader, state))

    def of_all_ranks(state):
        def loss_fn(model, batch):
            both, each = af.reduce_sum(sums(model, batch), state)
            return 1 - 2 * both / each

        return run(state, replace(case, k=1), loss_fn)

    return (
        lambda: train_by_hand(network(2), loss_fn, loader),
        lambda state: run(state, case, loss_fn),
        of_all_ranks,
    )


@kind("warned", OF_ALL_ROWS)
def contrastive(case: Case):
    """Each row is compared with those of its batch, or, in the repaired loss, of all ranks."""
    x, _ = samples(case)
    loader = DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=case.batch_size)

    def loss_fn(model, batch):
        first, second = (F.normalize(model(view)) for view in batch)
        return F.cross_entropy(first @ second.T, torch.arange(len(first)))

    def run(state, case, loss_fn):
        return train(state, case, network(3), loss_fn, af.shard_loader(loader, state))

    def of_all_ranks(state):
        def loss_fn(model, batch):
            first, second = (F.normalize(model(view)) for view in batch)
            start = sum(af.gather([len(first)], state)[: state.rank])
            every = af.gather(second, state)
            return F.cross_entropy(first @ every.T, start + torch.arange(len(first)))

        return run(state, replace(case, k=1), loss_fn)

    return (
        lambda: train_by_hand(network(3), loss_fn, loader),
        lambda state: run(state, case, loss_fn),
        of_all_ranks,
    )


@kind("refused", "leave out accumulate", k=(2, 3))
def gathered_in_parts(case: Case):
    """Rows are gathered for a loss that is accumulated."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)

    def run(state, case):
        def loss_fn(model, batch):
            out = model(batch[0])
            return (out - af.gather(out, state).mean()).square().mean()

        return train(state, case, network(), loss_fn, af.shard_loader(loader, state))

    def by_hand(model, batch):
        out = model(batch[0])
        return (out - out.mean()).square().mean()

    return (
        lambda: train_by_hand(network(), by_hand, loader),
        lambda state: run(state, case),
        lambda state: run(state, replace(case, k=1)),
    )


@kind("equal")
def accuracy(case: Case):
    """The loss returns a metric, which the report has for the global batch."""
    x, _ = samples(case)
    y = labels(case)
    y[::3] = -100
    loader = DataLoader(TensorDataset(x, y), batch_size=case.batch_size)

    def loss_fn(model, batch):
        out, counts = model(batch[0]), batch[1] != -100
        right = (out.argmax(1) == batch[1])[counts].double().mean()
        return F.cross_entropy(out, batch[1]), {"accuracy": right}

    def by_hand():
        model = network(3)
        optimizer = sgd(model)
        found = {}
        for number, batch in enumerate(loader):
            loss, metrics = loss_fn(model, batch)
            update(model, loss, optimizer)
            found[f"accuracy {number}"] = metrics["accuracy"]
        return found

    def run(state):
        model = network(3)
        plan = af.Plan(loss_fn, model, sgd(model), weight_fn=af.count_labels(1))
        state, step = af.build(recipe(case)(plan), state)
        found = {}
        for number, batch in enumerate(af.shard_loader(loader, state)):
            state, report = step(state, batch)
            found[f"accuracy {number}"] = report.metrics["accuracy"]
        return found

    return by_hand, run


@kind("warned", OF_ALL_ROWS)
def policy_gradient(case: Case):
    """Ratios are 1 in the first batch, where normalised advantages sum to 0 in each part."""
    x, _ = samples(case)
    reward = x.sum(1)
    old = network()(x).detach().squeeze(1)

    def loss_fn(model, batch):
        x, reward, old = batch
        advantage = (reward - reward.mean()) / (reward.std(correction=0) + 1e-8)
        return -(advantage * (model(x).squeeze(1) - old).exp()).mean()

    def given(model, batch):
        x, advantage, old = batch
        return -(advantage * (model(x).squeeze(1) - old).exp()).mean()

    advantage = (reward - reward.mean()) / (reward.std(correction=0) + 1e-8)

    def run(state, loss_fn, third):
        batches = (af.shard_batch((x, third, old), state) for _ in range(4))
        return train(state, case, network(), loss_fn, batches)

    return (
        lambda: train_by_hand(network(), loss_fn, [(x, reward, old)] * 4),
        lambda state: run(state, loss_fn, reward),
        lambda state: run(state, given, advantage),
    )


@kind("warned", "keeps state.*check_loss=False")
def state_by_row(case: Case):
    """The loss keeps a hidden state of each row from batch to batch."""
    text = torch.randn(4, case.num_samples, 4, generator=case.generator(), dtype=torch.float64)
    batches = [(x, torch.arange(case.num_samples)) for x in text]

    def stateful_loss():
        hidden = torch.zeros(case.num_samples, 4).double()

        def loss_fn(model, batch):
            x, rows = batch
            out = model(x + hidden[rows]).tanh()
            hidden[rows] = out.detach()
            return F.mse_loss(out, x)

        return loss_fn

    def run(state, **options):
        given = (af.shard_batch(batch, state) for batch in batches)
        return train(state, case, network(4), stateful_loss(), given, **options)

    return (
        lambda: train_by_hand(network(4), stateful_loss(), batches),
        run,
        lambda state: run(state, check_loss=False),
    )


@kind("equal", world_size=(1,))
def noise(case: Case):
    """The loss draws noise from the global generator, which the check of the loss gives back."""
    batches = [samples(case)] * 3

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0] + torch.randn_like(batch[0])), batch[1])

    def by_hand(model, batch):
        parts = zip(*(value.tensor_split(case.k) for value in batch), strict=True)
        return sum(loss_fn(model, part) * len(part[0]) for part in parts) / case.num_samples

    def seeded():
        model = network()
        torch.manual_seed(case.seed)
        return model

    return (
        lambda: train_by_hand(seeded(), by_hand, batches),
        lambda state: train(state, case, seeded(), loss_fn, batches),
    )


@kind("warned", "ModuleDict")
def parameters_in_a_closure(case: Case):
    """The loss has class centres, which an optimizer of the user's own trains."""
    x, _ = samples(case)
    loader = DataLoader(TensorDataset(x, labels(case)), batch_size=case.batch_size)

    def whole():
        net = network(3)  # seeds first: simulated ranks share a generator
        centres = nn.Linear(3, 3, bias=False).double()
        nn.init.eye_(centres.weight)
        return nn.ModuleDict({"net": net, "centres": centres})

    def loss_fn(model, batch):
        return F.cross_entropy(model["centres"](model["net"](batch[0])), batch[1])

    def in_a_closure(state):
        model = whole()
        centres, own = model["centres"], sgd(model["centres"])

        def loss_fn(net, batch):
            return F.cross_entropy(centres(net(batch[0])), batch[1])

        plan = recipe(case)(af.Plan(loss_fn, model["net"], sgd(model["net"])))
        state, step = af.build(plan, state)
        losses = []
        for batch in af.shard_loader(loader, state):
            own.zero_grad()
            state, report = step(state, batch)
            own.step()
            losses.append(report.loss)
        return figures(model, losses)

    return (
        lambda: train_by_hand(whole(), loss_fn, loader),
        in_a_closure,
        lambda state: train(state, case, whole(), loss_fn, af.shard_loader(loader, state)),
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
        state, step = af.build(plan, state)
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


@kind("equal")
def text_to_image(case: Case):
    """Noise on the latents of a frozen autoencoder, predicted from those of a frozen text encoder."""
    x, _ = samples(case)
    texts, noise = labels(case, 7), x.flip(1).cos()
    loader = DataLoader(TensorDataset(x, texts, noise), batch_size=case.batch_size)

    def frozen(rank=0):
        torch.manual_seed(1 + rank)  # each rank has weights of its own, which the plan makes equal
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(2)]
        text = nn.Sequential(nn.Embedding(7, 3), nn.Dropout(0.5), nn.Linear(3, 4)).double()
        return {"vae": nn.Sequential(*layers).double(), "text": text}

    def loss_fn(model, batch, frozen):
        image, text, noise = batch
        with torch.no_grad():
            latents, condition = frozen["vae"](image), frozen["text"](text)
        return F.mse_loss(model(latents + 0.5 * noise + condition), noise)

    def by_hand():
        models = {name: each.eval() for name, each in frozen().items()}
        return train_by_hand(network(4), lambda *given: loss_fn(*given, models), loader)

    def run(state):
        models, model = frozen(state.rank), network(4)
        plan = recipe(case)(af.Plan(loss_fn, model, sgd(model), frozen=models))
        state, step = af.build(plan, state)
        losses = []
        for batch in af.shard_loader(loader, state):
            state, report = step(state, batch)
            losses.append(report.loss)
        return figures(model, losses)

    return by_hand, run


@kind("equal", strategy=("wrap_fsdp",), world_size=(2, 3))
def reference_in_shards(case: Case):
    """Preferences (DPO) over chosen and rejected rows; the reference is in shards as the model is."""
    x, _ = samples(case)
    chosen, rejected = x, x.roll(1, 1).sin()
    picks = labels(case)
    loader = DataLoader(TensorDataset(chosen, rejected, picks), batch_size=case.batch_size)

    def log_odds(model, batch):
        chosen, rejected, picks = batch
        odds = model(chosen).log_softmax(1) - model(rejected).log_softmax(1)
        return odds.gather(1, picks[:, None])

    def loss_fn(model, batch, *, frozen):
        with torch.no_grad():
            wanted = log_odds(frozen["reference"], batch)
        return -F.logsigmoid(log_odds(model, batch) - wanted).mean()

    def by_hand():
        frozen = {"reference": network(3).requires_grad_(False)}
        return train_by_hand(
            network(3), lambda model, batch: loss_fn(model, batch, frozen=frozen), loader
        )

    def run(state):
        model = network(3)
        plan = af.Plan(loss_fn, model, sgd(model), frozen={"reference": network(3)})
        wraps = af.compose(af.wrap_fsdp(frozen=True), af.accumulate(case.k))
        state, step = af.build(wraps(plan), state)
        losses = []
        for batch in af.shard_loader(loader, state):
            state, report = step(state, batch)
            losses.append(report.loss)
        return figures(model, losses)

    return by_hand, run


@kind("warned", "average|extras", num_samples=(24,))
def moving_teacher(case: Case):
    """The loop moves a teacher that stands among the frozen models, whose values no checkpoint has."""
    x, _ = samples(case)
    loader = DataLoader(TensorDataset(x), batch_size=case.batch_size)

    def distil(model, batch, teacher):
        return F.mse_loss(model(batch[0]).log_softmax(1), 2 * teacher(batch[0]))

    def follow(teacher, model):
        for old, new in zip(teacher.parameters(), figures(model).values(), strict=True):
            old.data.lerp_(new, 0.1)

    def by_hand():
        model, teacher = network(3), network(3).requires_grad_(False)
        optimizer, losses = sgd(model), []
        for batch in loader:
            losses.append(update(model, distil(model, batch, teacher), optimizer))
            follow(teacher, model)
        return figures(model, losses)

    def run(state, is_frozen=True):
        model, teacher = network(3), network(3).requires_grad_(False)
        plan = af.Plan(
            lambda model, batch: distil(model, batch, teacher),
            model,
            sgd(model),
            frozen={"teacher": teacher} if is_frozen else {},
        )
        state, step = af.build(recipe(case)(plan), state, check_loss=False)
        losses = []
        for batch in af.shard_loader(loader, state):
            state, report = step(state, batch)
            losses.append(report.loss)
            follow(teacher, model)
        return figures(model, losses)

    return by_hand, run, lambda state: run(state, is_frozen=False)


@kind("equal")
def rule_by_parameter(case: Case):
    """Adaptive clipping: the gradient of a matrix is at most a share of the norm of the matrix."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)

    def rule(name, parameter, grad):
        if not name.endswith("weight"):
            return grad
        return grad * (0.01 * parameter.norm() / grad.norm()).clamp(max=1)

    def by_hand():
        model = network()
        optimizer, losses = sgd(model), []
        for batch in loader:
            optimizer.zero_grad()
            loss = mse(model, batch)
            loss.backward()
            for name, each in model.named_parameters():
                each.grad = rule(name, each.detach(), each.grad)
            optimizer.step()
            losses.append(loss.detach())
        return figures(model, losses)

    def clipped(state, grads):
        values = iter([rule(name, p.detach(), g) for name, p, g in grads.named()])
        return grads.map(lambda _: next(values))

    def run(state):
        model = network()
        plan = replace(af.Plan(mse, model, sgd(model)), gradients=(clipped,))
        state, step = af.build(recipe(case)(plan), state)
        losses = []
        for batch in af.shard_loader(loader, state):
            state, report = step(state, batch)
            losses.append(report.loss)
        return figures(model, losses)

    return by_hand, run


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

    counted = af.count_labels(1)
    return two_loops(case, lambda: network(3), loss_fn, loader, weight_fn=counted)


@kind("warned", "weight_fn")
def sample_weights(case: Case):
    """A weighted mean, which divides by the sum of the samples' weights."""
    x, y = samples(case)
    weights = 10 ** x[:, 1:2]
    loader = DataLoader(TensorDataset(x, y, weights), batch_size=case.batch_size)

    def loss_fn(model, batch):
        x, y, weights = batch
        return ((model(x) - y).square() * weights).sum() / weights.sum()

    counted = {"weight_fn": lambda batch: batch[2].sum()}
    _, repaired = two_loops(case, network, loss_fn, loader, **counted)
    return *two_loops(case, network, loss_fn, loader), repaired


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
        parts = (
            (*af.shard_batch((x, y), state), af.shard_batch(others, state))
            for x, y, others in batches
        )
        return train(state, case, network(), terms, parts, weight_fn=counted)

    return lambda: train_by_hand(network(), by_hand, batches), run
