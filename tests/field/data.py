"""Kinds of data: what a sample is, what a collate_fn returns, and where batches come from."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

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
    taught_batches,
    train,
    train_by_hand,
    train_on,
    two_loops,
    update,
)


@kind("equal")
def tuples(case: Case):
    """A data set of tensors."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)
    return two_loops(case, network, mse, loader)


@kind("equal", world_size=(1, 3, 4), num_samples=(6, 10, 14), batch_size=(4,))
def short_tails(case: Case):
    """A last batch of two samples, on more ranks; the loop unpacks its batches."""
    loader = DataLoader([*zip(*samples(case), strict=True)], batch_size=case.batch_size)

    def run(state):
        batches = ((x, y) for x, y in af.shard_loader(loader, state))
        return train(state, case, network(), mse, batches)

    return lambda: train_by_hand(network(), mse, loader), run


@kind("warned", "count_labels", world_size=(2, 3), k=(1,), num_samples=(24, 12), batch_size=(12,))
def padding_free(case: Case):
    """A collate_fn joins the texts of a rank into one row."""
    generator = case.generator()
    lengths = torch.randint(2, 9, (case.num_samples,), generator=generator).tolist()
    texts = [torch.randint(0, 6, (length,), generator=generator) for length in lengths]

    def joined(rows):
        return torch.cat(rows)[None]

    def loss_fn(model, tokens):
        return F.cross_entropy(model(tokens)[0], tokens[0])

    def language_model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6)).double()

    loader = DataLoader(texts, batch_size=case.batch_size, collate_fn=joined)
    repaired = two_loops(
        case, language_model, loss_fn, loader, weight_fn=lambda tokens: tokens.numel()
    )
    return *two_loops(case, language_model, loss_fn, loader), repaired[1]


@kind("warned", "samples first", world_size=(2, 3), k=(1,), num_samples=(24,), batch_size=(12,))
def time_first(case: Case):
    """Batches are [time, samples, features], as torch's recurrent layers take them."""
    x = torch.randn(case.num_samples, 5, 4, generator=case.generator(), dtype=torch.float64)
    rows = [(each, each.sum(1, keepdim=True)) for each in x]

    def stacked(rows):
        return tuple(torch.stack(each, 1) for each in zip(*rows, strict=True))

    loader = DataLoader(rows, batch_size=case.batch_size, collate_fn=stacked)
    repaired = two_loops(case, network, mse, DataLoader(rows, batch_size=case.batch_size))
    return *two_loops(case, network, mse, loader), repaired[1]


@kind("equal")
def dicts(case: Case):
    """Samples are dicts with a text, as those of `datasets`."""
    x, y = samples(case)
    rows = [{"x": x[i], "y": y[i], "name": f"row {i}"} for i in range(len(x))]
    loader = DataLoader(rows, batch_size=case.batch_size)

    def loss_fn(model, batch):
        return F.mse_loss(model(batch["x"]), batch["y"])

    return two_loops(case, network, loss_fn, loader)


@dataclass(frozen=True)
class Record:
    """A batch with fields, which torch's pytree does not know."""

    x: Tensor
    y: Tensor
    names: list[str]


@kind("equal")
def dataclasses(case: Case):
    """A collate_fn returns a dataclass."""

    def collate(rows):
        x, y = map(torch.stack, zip(*rows, strict=True))
        return Record(x, y, [f"row {i}" for i in range(len(x))])

    def loss_fn(model, batch):
        assert len(batch.names) == len(batch.x)
        return F.mse_loss(model(batch.x), batch.y)

    rows = [*zip(*samples(case), strict=True)]
    loader = DataLoader(rows, batch_size=case.batch_size, collate_fn=collate)
    return two_loops(case, network, loss_fn, loader)


@kind("equal")
def views(case: Case):
    """A collate_fn stacks two views of each image, so that a batch has twice as many rows."""
    x, _ = samples(case)

    def two_views(rows):
        return torch.cat([torch.stack(rows), 0.5 * torch.stack(rows)])

    def loss_fn(model, batch):
        return model(batch).square().mean()

    loader = DataLoader(list(x), batch_size=case.batch_size, collate_fn=two_views)
    return two_loops(case, network, loss_fn, loader)


@kind("equal")
def lists_of_views(case: Case):
    """A batch is a list of two views, each a tensor of all images."""
    x, _ = samples(case)

    def two_views(rows):
        return [torch.stack(rows), 0.5 * torch.stack(rows)]

    def loss_fn(model, batch):
        first, second = map(model, batch)
        return (first - 2 * second).square().mean()

    loader = DataLoader(list(x), batch_size=case.batch_size, collate_fn=two_views)
    return two_loops(case, network, loss_fn, loader)


@kind("equal")
def packing(case: Case):
    """A collate_fn packs texts of several lengths into rows of one length."""
    generator = case.generator()
    lengths = torch.randint(1, 8, (case.num_samples,), generator=generator).tolist()
    texts = [torch.randint(0, 6, (length,), generator=generator) for length in lengths]

    def packed(rows):
        tokens = torch.cat(rows)
        return {
            name: F.pad(tokens, (0, -len(tokens) % 5), value=value).view(-1, 5)
            for name, value in (("tokens", 0), ("labels", -100))
        }

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())

    def language_model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6)).double()

    loader = DataLoader(texts, batch_size=case.batch_size, collate_fn=packed)
    counted = af.count_labels("labels")
    return two_loops(
        case,
        language_model,
        loss_fn,
        loader,
        weight_fn=counted,
    )


@kind("equal", world_size=(1, 2), num_samples=(12, 24), batch_size=(6, 8))
def rows_left_out(case: Case):
    """A collate_fn leaves out samples without a label, never all of a part."""
    x, y = samples(case)
    rows = [(x[i], y[i] if i % 3 else None) for i in range(len(x))]

    def labelled(rows):
        return default_collate([row for row in rows if row[1] is not None])

    loader = DataLoader(rows, batch_size=case.batch_size, collate_fn=labelled)
    return two_loops(case, network, mse, loader)


@kind("refused", r"af\.samples")
def lists_of_images(case: Case):
    """A detection collate: images of several sizes, and a dict of boxes for each."""
    x, _ = samples(case)
    photos = [
        # 10 channels: as many as no part has images
        (row.repeat(10, 2 + i % 3, 1), {"boxes": row.repeat(1 + i % 2, 1)})
        for i, row in enumerate(x)
    ]

    def two_lists(rows):
        return [image for image, _ in rows], [target for _, target in rows]

    def zipped(rows):
        return tuple(zip(*rows, strict=True))

    def of_samples(rows):
        return {"images": af.samples(r[0] for r in rows), "targets": af.samples(r[1] for r in rows)}

    def loss_fn(model, batch):
        images, targets = batch.values() if isinstance(batch, dict) else batch
        boxes = torch.stack([target["boxes"].mean() for target in targets])
        return (model(images) - boxes).square().mean()

    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Conv2d(10, 2, kernel_size=1).double()

        def forward(self, images):
            return torch.stack([self.layer(image.unsqueeze(0)).mean() for image in images])

    def loader(collate_fn):
        return DataLoader(photos, batch_size=case.batch_size, collate_fn=collate_fn)

    def run(state, collate_fn):
        batches = af.shard_loader(loader(collate_fn), state)
        return train(state, case, Detector(), loss_fn, batches)

    natural = zipped if case.seed % 2 else two_lists
    return (
        lambda: train_by_hand(Detector(), loss_fn, loader(natural)),
        lambda state: run(state, natural),
        lambda state: run(state, of_samples),
    )


@kind("equal")
def samples_left_out(case: Case):
    """A data set returns None for a sample that it cannot read; a collate_fn may have none left."""
    x, y = samples(case)
    readable = [i % 4 != 1 for i in range(case.num_samples)]
    if case.seed % 2:  # none of a whole batch
        readable[: case.batch_size] = [False] * case.batch_size
    rows = [(x[i], y[i]) if readable[i] else None for i in range(case.num_samples)]

    def left(rows):
        rows = [row for row in rows if row is not None]
        return default_collate(rows) if rows else None

    def as_samples(rows):
        return af.samples(rows)

    def loss_fn(model, batch):
        return mse(model, default_collate(batch) if type(batch[0]) is tuple else batch)

    def loader(collate_fn):
        return DataLoader(rows, batch_size=case.batch_size, collate_fn=collate_fn)

    def by_hand():
        model = network()
        train_by_hand(model, mse, (batch for batch in loader(left) if batch is not None))
        return figures(model)

    def run(state, collate_fn):
        model = network()
        train(state, case, model, loss_fn, af.shard_loader(loader(collate_fn), state))
        return figures(model)

    return by_hand, lambda state: run(state, left), lambda state: run(state, as_samples)


@kind("equal")
def curriculum(case: Case):
    """A data set with `set_epoch`, read in the main process or in workers."""
    x, y = samples(case)

    class Curriculum(Dataset):
        def __init__(self):
            self.epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __len__(self):
            return len(x)

        def __getitem__(self, i):
            return x[i] * (1 + self.epoch), y[i]

    def by_hand():
        rows, model = Curriculum(), network()
        for epoch in range(3):
            rows.set_epoch(epoch)
            train_by_hand(model, mse, DataLoader(rows, batch_size=case.batch_size))
        return figures(model)

    def run(state):
        # ranks are threads here, which should not fork
        workers = {"num_workers": 1, "persistent_workers": case.seed % 4 == 1}
        options = workers if case.world_size == 1 and case.seed % 2 else {}
        loader = DataLoader(Subset(Curriculum(), range(len(x))), case.batch_size, **options)
        model = network()
        batches = (batch for epoch in af.shard_loader(loader, state).epochs(3) for batch in epoch)
        train(state, case, model, mse, batches)
        return figures(model)

    return by_hand, run


@kind("equal")
def parts(case: Case):
    """No loader: every rank makes the whole batch, and takes its part."""
    batches = [
        tuple(value.roll(number, 0) for value in samples(case)[: case.batch_size])
        for number in range(3)
    ]
    return (
        lambda: train_by_hand(network(), mse, batches),
        lambda state: train(
            state, case, network(), mse, (af.shard_batch(batch, state) for batch in batches)
        ),
    )


@kind("equal")
def streams(case: Case):
    """An IterableDataset."""
    x, y = samples(case)

    class Stream(IterableDataset[Any]):
        def __iter__(self):
            return iter(zip(x, y, strict=True))

    loader = DataLoader(Stream(), batch_size=case.batch_size)
    return two_loops(case, network, mse, loader)


@kind("warned", "same items on every rank", world_size=(2, 3), num_samples=(24,))
def stream_of_its_own_order(case: Case):
    """A stream shuffles by a generator that each rank seeds by itself; repaired, by the epoch alone."""
    x, y = samples(case)

    class Shuffled(IterableDataset[Any]):
        def __init__(self, seed):
            self.seed = seed

        def __iter__(self):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(self.seed))
            return iter([(x[i], y[i]) for i in order.tolist()])

    def loader(seed):
        return DataLoader(Shuffled(seed), batch_size=case.batch_size)

    def run(state, seed):
        return train(state, case, network(), mse, af.shard_loader(loader(seed), state))

    return (
        lambda: train_by_hand(network(), mse, loader(case.seed)),
        lambda state: run(state, case.seed + state.rank),
        lambda state: run(state, case.seed),
    )


@kind("equal")
def masked_labels(case: Case):
    """Some labels are -100, on some ranks all of them."""
    x, _ = samples(case)
    y = labels(case)
    y[: case.num_samples // 3] = -100
    loader = DataLoader(TensorDataset(x, y), batch_size=case.num_samples)

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    counted = af.count_labels(1)
    return two_loops(case, lambda: network(3), loss_fn, loader, weight_fn=counted)


@kind("equal")
def taught_sampler(case: Case):
    """A sampler that the loop changes after every batch, read in this process or by workers."""
    # ranks are threads here, which should not fork
    options = {"num_workers": 1} if case.world_size == 1 and case.seed % 2 else {}

    def run(state):
        taught = taught_batches(
            case,
            lambda loader: af.shard_loader(loader, state),
            lambda indices: af.gather(indices, state),
            **options,
        )
        return train(state, case, network(), mse, taught)

    by_hand = taught_batches(case, iter, torch.clone, **options)
    return lambda: train_by_hand(network(), mse, by_hand), run


@kind("equal")
def taught_sampler_ahead(case: Case):
    """The same under `prefetch`, which reads as far ahead as a worker of torch's loader."""

    def run(state):
        taught = taught_batches(
            case,
            lambda loader: af.prefetch(af.shard_loader(loader, state), state, depth=2),
            lambda indices: af.gather(indices, state),
        )
        return train(state, case, network(), mse, taught)

    by_hand = taught_batches(case, iter, torch.clone, num_workers=1, prefetch_factor=2)
    return lambda: train_by_hand(network(), mse, by_hand), run


@kind("equal")
def ready_batches(case: Case):
    """Batches that a data set, a sampler of lists or a stream has ready."""
    x, y = samples(case)
    bounds = [*range(0, case.num_samples, case.batch_size), case.num_samples]
    batches = [(x[a:b], y[a:b]) for a, b in pairwise(bounds)]

    class Stream(IterableDataset[Any]):
        def __iter__(self):
            return iter(batches)

    lists = BatchSampler(SequentialSampler(x), case.batch_size, drop_last=False)
    loader = (
        lambda: DataLoader(batches, batch_size=None),
        lambda: DataLoader(TensorDataset(x, y), batch_size=None, sampler=lists),
        lambda: DataLoader(Stream(), batch_size=None),
    )[case.seed % 3]()
    return two_loops(case, network, mse, loader)


@kind("equal", batch_size=(3, 4))
def growing_batches(case: Case):
    """A batch sampler whose batches grow with the number of updates, over several epochs."""
    rows = TensorDataset(*samples(case))

    class Growing:
        def __init__(self):
            self.epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.epoch))
            sizes = self.sizes()
            return iter(order[: sum(sizes)].split(sizes))

        def sizes(self):
            step = 0
            for _ in range(self.epoch + 1):
                sizes = []
                while sum(sizes) + (size := case.batch_size + step // 2) <= len(rows):
                    sizes.append(size)
                    step += 1
            return sizes

    def by_hand():
        sampler, model = Growing(), network()
        for epoch in range(3):
            sampler.set_epoch(epoch)
            train_by_hand(model, mse, DataLoader(rows, batch_sampler=sampler))
        return figures(model)

    def run(state):
        loader, model = DataLoader(rows, batch_sampler=Growing()), network()
        batches = (batch for epoch in af.shard_loader(loader, state).epochs(3) for batch in epoch)
        train(state, case, model, mse, batches)
        return figures(model)

    return by_hand, run


@kind("equal")
def drawn(case: Case):
    """Noise and times are drawn for each batch, of which the last may be shorter; the run is stopped."""
    loader = DataLoader(TensorDataset(samples(case)[0]), batch_size=case.batch_size)

    def loss_fn(model, batch):
        rows, noise, time = batch
        return F.mse_loss(model(rows + time * (noise - rows)), (noise - rows)[:, :1])

    def beside(rows, size, state):
        noise = af.draw(lambda g: torch.randn(size, 4, generator=g).double(), state, "noise")
        return rows, noise, af.draw(lambda g: torch.rand(size, 1, generator=g).double(), state, "t")

    def by_hand():
        model = network()
        optimizer = sgd(model)
        for number, (rows,) in enumerate([*loader] * 2):
            batch = beside(rows, len(rows), af.DistState(step=number))
            update(model, loss_fn(model, batch), optimizer)
        return figures(model)

    def make_batch(batch, state):
        (rows,) = batch
        if case.seed % 4 > 1:
            return beside(rows, af.reduce_sum(len(rows), state), state)

        def noise(generator, num_rows):
            return torch.randn(num_rows, 4, generator=generator).double()

        def times(generator, num_rows):
            return torch.rand(num_rows, 1, generator=generator).double()

        drawn = af.draw(noise, state, "noise", rows=batch)
        return rows, drawn, af.draw(times, state, "t", rows=batch)

    def run(state, folder, stops_after):
        model = network()
        plan = recipe(case)(af.Plan(loss_fn, model, sgd(model)))
        batches = af.shard_loader(loader, state)
        return train_on(state, folder, plan, batches, 2, stops_after, make_batch=make_batch)

    return by_hand, lambda state: stopped_and_resumed(state, run, len(loader) + case.seed % 2)
