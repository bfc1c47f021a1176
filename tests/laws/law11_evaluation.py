"""evaluate returns the figures of one process, for any data set size, batches and ranks."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours


def regression_data(num_samples):
    generator = torch.Generator().manual_seed(num_samples)
    inputs = torch.randn(num_samples, ours.NUM_FEATURES, generator=generator).double()
    return TensorDataset(inputs, torch.randn(num_samples, 1, generator=generator).double())


def metric_fn(model, batch):
    inputs, targets = batch
    errors = (model(inputs) - targets).squeeze(1)
    return {
        "below": errors < 0.1,
        "error": errors.abs(),
        "by feature": errors.unsqueeze(1) * inputs,
        "square": (errors.square().sum(), len(errors)),
    }


def by_hand(model, data):
    with torch.no_grad():
        inputs, targets = data.tensors
        errors = (model(inputs) - targets).squeeze(1)
        return {
            "below": float((errors < 0.1).double().mean()),
            "error": float(errors.abs().mean()),
            "by feature": (errors.unsqueeze(1) * inputs).mean(dim=0),
            "square": float(errors.square().mean()),
            "loss": float(F.mse_loss(model(inputs), targets)),
        }


def evaluated(state, data, batch_size, num_microbatches, **options):
    recipe = af.compose(af.place(), af.wrap_ddp(), af.accumulate(num_microbatches))
    state, step = ours.built(recipe, state)
    loader = af.shard_loader(DataLoader(data, batch_size=batch_size, **options), state)
    return {
        **af.evaluate(step, state, loader, metric_fn),
        **af.evaluate(step, state, af.prefetch(loader, state)),
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
        else:
            assert found[name] == pytest.approx(value, rel=1e-12, abs=1e-12)


@ours.share(0.5)
@given(
    world_size=st.integers(1, 5),
    num_samples=st.integers(1, 60),
    batch_size=st.integers(1, 60),
    num_microbatches=st.integers(1, 9),
    shuffle=st.booleans(),
)
@example(world_size=1, num_samples=1, batch_size=1, num_microbatches=3, shuffle=False)
@example(world_size=5, num_samples=3, batch_size=2, num_microbatches=3, shuffle=False)
def test_any_ranks_give_the_figures_of_one_process(
    world_size, num_samples, batch_size, num_microbatches, shuffle
):
    data = regression_data(num_samples)
    expected = by_hand(ours.regression_model(), data)
    for found in simulate(
        lambda state: evaluated(state, data, batch_size, num_microbatches, shuffle=shuffle),
        world_size=world_size,
    ):
        assert_same(found, expected)


def token_data(num_samples):
    generator = torch.Generator().manual_seed(num_samples)
    labels = torch.randint(0, ours.NUM_CLASSES, (num_samples, 6), generator=generator)
    lengths = torch.randint(0, 7, (num_samples, 1), generator=generator)
    labels[torch.arange(6) >= lengths] = -100
    labels[0, 0] = 1
    inputs = torch.randn(num_samples, 6, ours.NUM_FEATURES, generator=generator).double()
    return [{"inputs": inputs[i], "labels": labels[i]} for i in range(num_samples)]


@ours.share(0.5)
@given(num_samples=st.integers(1, 20), batch_size=st.integers(1, 8), world_size=st.integers(1, 5))
@example(num_samples=6, batch_size=6, world_size=2)
def test_a_loss_over_tokens_is_the_mean_over_all_tokens(num_samples, batch_size, world_size):
    data = token_data(num_samples)
    whole = torch.utils.data.default_collate(data)
    expected = float(ours.token_loss(ours.token_model(), whole).detach())

    def run(state):
        state, step = ours.built(
            af.compose(af.wrap_ddp(), af.accumulate(2)),
            state,
            model=ours.token_model(),
            loss_fn=ours.token_loss,
            weight_fn=af.count_labels("labels"),
        )
        loader = af.shard_loader(DataLoader(data, batch_size=batch_size), state)
        by_another = af.evaluate(step, state, loader, doubled)
        assert by_another["length"] == 6
        return [af.evaluate(step, state, loader)["loss"], by_another["loss"] / 2]

    for found in simulate(run, world_size=world_size):
        assert found == pytest.approx([expected] * 2, rel=1e-12)


def doubled(model, batch):
    """Another loss than that of the plan, beside metrics: a mean, and a sum over a count of its own."""
    labels = batch["labels"]
    wide = (6 * (labels != -100).sum(), (labels != -100).sum())
    return 2 * ours.token_loss(model, batch), {"one": 1.0, "length": wide}


def test_row_14_a_metric_of_objects_counts_every_sample_once_and_raises_its_own_error():
    """Two ranks hold seven samples in batches of 4, and the batches hold no tensor."""
    data = [{"id": i, "boxes": [i] * (i % 3)} for i in range(7)]

    def run(state):
        state, step = ours.built(af.wrap_ddp(), state)
        loader = af.shard_loader(DataLoader(data, batch_size=4, collate_fn=list), state)

        def count_boxes(model, batch):
            return {"boxes": (sum(len(each["boxes"]) for each in batch), len(batch))}

        with pytest.raises((KeyError, RuntimeError), match="absent"):
            af.evaluate(step, state, loader, lambda model, batch: {"x": batch[0]["absent"]})
        return af.evaluate(step, state, loader, count_boxes)

    assert simulate(run, world_size=2) == [{"boxes": 6 / 7}] * 2
