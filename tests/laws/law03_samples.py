"""Law: `samples`, images of several sizes, train as the loop by hand on any world and in any cut."""

import warnings

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours

NUM_IMAGES, BATCH_SIZE = 16, 8
LOST = frozenset({0, *range(8, 16)})
"""Images that cannot be read: one of the first batch, all of the second."""


class Images(Dataset):
    """Images [3, height, 5] with boxes, and None where a file cannot be read."""

    def __init__(self, lost=()):
        self.lost = lost

    def __len__(self):
        return NUM_IMAGES

    def __getitem__(self, number):
        if number in self.lost:
            return None
        generator = torch.Generator().manual_seed(number)
        image = torch.randn(3, 4 + number % 3, 5, generator=generator).double()
        return image, {"boxes": torch.ones(1 + number % 2, 4).double() * number, "id": number}


def found(rows):
    return [row for row in rows if row is not None]


def columns(rows):
    kept = found(rows)
    return tuple(map(af.samples, zip(*kept, strict=True))) or None


def a_list(rows):
    return [*map(af.samples, ([row[part] for row in found(rows)] for part in (0, 1)))]


def pairs(rows):
    return af.samples(rows)


def a_dict(rows):
    images, targets = a_list(rows)
    return {
        "targets": targets,
        "images": images,
        "number": torch.tensor([t["id"] for t in targets]),
    }


COLLATES = [columns, a_list, pairs, a_dict]


class Detector(nn.Module):
    """Takes a list of images and gives one number each, as torchvision's detection models do."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, images):
        assert isinstance(images, list)
        return torch.stack([self.conv(image[None]).mean() for image in images])


def detector():
    torch.manual_seed(0)
    return Detector().double()


def errors(model, batch):
    """Return one number an image: [num_samples]."""
    if isinstance(batch, dict):
        images, targets = batch["images"], batch["targets"]
    elif type(batch) is type(af.samples([])):
        images, targets = map(list, zip(*batch, strict=True))
    else:
        images, targets = batch
    boxes = torch.stack([target["boxes"].mean() for target in targets])
    return (model(images) - boxes).square()


def detection_loss(model, batch):
    return errors(model, batch).mean()


def sgd(parameters):
    """Without momentum, which moves parameters in a batch without samples too."""
    return torch.optim.SGD(parameters, lr=0.05)


def by_hand(lost=()):
    batches = [Images(lost)[number] for number in range(NUM_IMAGES)]
    batches = [found(batches[:BATCH_SIZE]), found(batches[BATCH_SIZE:])]
    return ours.trained_by_hand(
        detector(),
        [pairs(batch) for batch in batches if batch] * 2,
        loss_fn=detection_loss,
        optimizer=sgd,
    )


def built(state, recipe, loss_fn=detection_loss, **given):
    model = detector()
    return af.build(recipe(af.Plan(loss_fn, model, sgd(model.parameters()), **given)), state)


def trained(state, collate, recipe, lost=(), read=lambda loader, state: loader, **options):
    """Train for two epochs; return the losses of batches that have samples, and the parameters."""
    state, step = built(state, recipe)
    loader = DataLoader(Images(lost), batch_size=BATCH_SIZE, collate_fn=collate, **options)
    loader = af.shard_loader(loader, state)
    losses = []
    for epoch in read(loader, state).epochs(2):
        for batch in epoch:
            state, report = step(state, batch)
            losses += [float(report.loss)] if report.weight else []
    return losses, ours.whole(step.plan.model.state_dict())


def assert_trained(world_size, *arguments, lost=(), **options):
    run = lambda state: trained(state, *arguments, lost, **options)
    ours.assert_trained(simulate(run, world_size=world_size), by_hand(lost))


@pytest.mark.parametrize(
    "recipe",
    [
        af.compose(af.wrap_fsdp(), af.accumulate(3)),
        af.compose(af.wrap_ddp(), af.place(), af.accumulate("auto")),
    ],
    ids=["fsdp", "auto"],
)
def test_other_recipes_train_as_by_hand(recipe):
    assert_trained(2, columns, recipe, lost=LOST)


def test_workers_and_prefetching_hand_over_samples():
    options = {"num_workers": 2, "multiprocessing_context": "fork"}
    recipe = af.compose(af.wrap_ddp(), af.accumulate(3))
    assert_trained(2, columns, recipe, lost=LOST, read=af.prefetch, **options)


@ours.share(0.34)
@given(
    lost=st.sets(st.integers(0, NUM_IMAGES - 1)),
    collate=st.sampled_from(COLLATES),
    world_size=st.integers(1, 3),
    k=st.integers(1, 3),
)
@example(lost=LOST, collate=columns, world_size=2, k=3)
@example(lost=set(range(BATCH_SIZE)), collate=a_dict, world_size=3, k=2)
@example(lost=set(range(NUM_IMAGES)), collate=columns, world_size=2, k=1)
def test_detection_trains_as_by_hand_and_samples_that_are_none_count_nowhere(
    lost, collate, world_size, k
):
    """A part may lose some of its samples, or all, and is then empty, or None."""
    recipe = af.compose(af.wrap_ddp(), af.accumulate(k))
    assert_trained(world_size, collate, recipe, lost=lost)


def test_a_window_of_batches_takes_those_that_are_none_for_nothing():
    recipe = af.compose(af.wrap_ddp(), af.accumulate(2, split=None))
    every = found(Images(LOST)[number] for number in range(NUM_IMAGES))
    _, expected = ours.trained_by_hand(
        detector(), [pairs(every)] * 2, loss_fn=detection_loss, optimizer=sgd
    )
    for _, actual in simulate(
        lambda state: trained(
            state, columns, recipe, LOST, read=lambda loader, state: af.group_batches(loader, 2)
        ),
        world_size=2,
    ):
        ours.assert_close(actual, expected)


@pytest.mark.parametrize(
    "recipe",
    [af.compose(), af.accumulate(3), af.accumulate(3, split=None)],
    ids=["whole", "rows", "window"],
)
def test_a_batch_that_is_none_changes_nothing_on_one_process(recipe):
    state, step = built(af.DistState(), recipe, weight_fn=lambda batch: 1)
    before = ours.kept_tensors(step)
    state, report = step(state, None)
    ours.assert_identical(ours.kept_tensors(step), before)
    assert (state.step, report.weight, float(report.loss)) == (1, 0, 0.0)


@pytest.mark.parametrize(("world_size", "with_samples"), [(2, []), (2, [1]), (1, [0])])
def test_a_loop_that_gives_none_forever_is_warned_of_once(world_size, with_samples):
    """A loss that needs no batch is never called; samples that cannot be read end some day."""
    image = columns([Images()[0]])

    def run(state):
        state, step = built(state, af.wrap_ddp())
        for number in range(12):
            has_samples = state.rank in with_samples and (world_size == 2 or number == 5)
            state, _ = step(state, image if has_samples else None)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        simulate(run, world_size=world_size)
    text = (
        "step: batch should hold samples, got None in the first 10 steps, so loss_fn was not called; "
        "if it needs no batch, use () and a weight_fn"
    )
    expected = [] if with_samples else [(text, __file__)]
    assert [(str(each.message), each.filename) for each in found] == expected


def test_losses_of_single_samples_on_each_rank_are_compared():
    """Images are joined for it, not their channels."""

    def run(state):
        state, step = built(state, af.wrap_ddp(), lambda model, batch: errors(model, batch).sum())
        with pytest.raises(ValueError, match=r"loss_fn must return the mean .*, got a sum"):
            step(state, columns([Images()[state.rank]]))

    simulate(run, world_size=2)


@pytest.mark.parametrize("batch", [(af.samples([]), torch.ones(3, 2)), ()], ids=["rows", "nothing"])
def test_a_batch_is_not_left_out_where_a_loss_has_something_else(batch):
    """Of unlabelled rows beside no labelled image, or of no batch at all, as in a PINN."""
    state, step = ours.built(
        loss_fn=lambda model, batch: model(torch.ones(1, 3).double()).square().mean(),
        weight_fn=lambda batch: 1,
    )
    _, report = step(state, batch)
    assert (report.weight, float(report.loss) > 0) == (1, True)


@ours.share(0.34)
@given(
    lost=st.sampled_from([(), LOST, range(NUM_IMAGES)]),
    collate=st.sampled_from(COLLATES),
    wrap=st.sampled_from([af.wrap_ddp, af.wrap_fsdp]),
)
def test_evaluation_counts_each_image_once(lost, collate, wrap):
    kept = found(Images(lost)[number] for number in range(NUM_IMAGES))
    mean = detection_loss(detector(), pairs(kept)).item() if kept else float("nan")
    expected = pytest.approx(mean, rel=1e-12, nan_ok=True)

    def run(state):
        state, step = built(state, af.compose(wrap(), af.accumulate(3)))
        loader = DataLoader(Images(lost), batch_size=BATCH_SIZE, collate_fn=collate)
        loader = af.shard_loader(loader, state)
        assert af.evaluate(step, state, loader) == {"loss": expected}

        def metric_fn(model, batch):
            return {"error": errors(model, batch)}

        name = "error" if kept else "loss"  # no call has named another
        assert af.evaluate(step, state, loader, metric_fn) == {name: expected}

    for world_size in (1, 2):
        simulate(run, world_size=world_size)
