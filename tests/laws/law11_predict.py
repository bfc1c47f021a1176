"""predict returns the rows of one process, each sample once, for any loader, batches and ranks."""

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset

import accel_fn as af
from accel_fn.testing import simulate
from tests.laws.law11_evaluation import assert_same, metric_fn, regression_data
from tests.support import strategies as ours

RECIPES = {
    "ddp": af.compose(af.place(), af.wrap_ddp()),
    "fsdp": af.compose(af.place(), af.wrap_fsdp()),
}


def fn(model, batch):
    inputs, targets = batch
    outputs = model(inputs)
    return {"output": outputs, "texts": [f"{float(each):.4f}" for each in targets], "x": inputs}


def by_hand(data):
    with torch.no_grad():
        return fn(ours.regression_model(), data.tensors)


def assert_rows(found, expected):
    assert found.keys() == expected.keys()
    assert found["texts"] == expected["texts"]
    for name in ("output", "x"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-12)


class Longest(Sampler):
    """Samples in an order of the user's own; some come twice."""

    def __init__(self, order):
        self.order = order

    def __iter__(self):
        return iter(self.order)

    def __len__(self):
        return len(self.order)


def options(order, batch_size, num_samples):
    """Return the arguments of a DataLoader for an order, in which each sample comes at least once."""
    backwards = [*reversed(range(num_samples))]
    return {
        "as they are": {"batch_size": batch_size},
        "shuffled": {"batch_size": batch_size, "shuffle": True},
        "sampler": {"batch_size": batch_size, "sampler": Longest(backwards)},
        "repeated": {"batch_size": batch_size, "sampler": Longest([*backwards, *range(3)])},
        "batch sampler": {
            "batch_sampler": BatchSampler(Longest(backwards), batch_size, drop_last=False)
        },
    }[order]


ORDERS = ("as they are", "shuffled", "sampler", "repeated", "batch sampler")


@ours.share(0.34)
@given(
    strategy=st.sampled_from([*RECIPES]),
    order=st.sampled_from(ORDERS),
    world_size=st.integers(1, 4),
    num_samples=st.integers(3, 24),
    batch_size=st.integers(1, 16),
    num_microbatches=st.integers(1, 3),
    read=st.sampled_from(["plain", "prefetch", "epoch"]),
)
@example("ddp", "sampler", 2, 9, 3, 2, "prefetch")
@example("fsdp", "repeated", 3, 12, 4, 2, "plain")
def test_rows_are_those_of_one_process_in_the_order_of_the_data_set(
    strategy, order, world_size, num_samples, batch_size, num_microbatches, read
):
    data = regression_data(num_samples)

    def run(state):
        recipe = af.compose(RECIPES[strategy], af.accumulate(num_microbatches))
        state, step = ours.built(recipe, state)
        loader = DataLoader(data, **options(order, batch_size, len(data)))
        loader = af.shard_loader(loader, state)
        if read == "prefetch":
            loader = af.prefetch(loader, state)
        if read == "epoch":
            _, loader = loader.epochs(2)
        return af.predict(step, state, loader, fn)

    for found in simulate(run, world_size=world_size):
        assert_rows(found, by_hand(data))


@ours.share(0.34)
@given(
    strategy=st.sampled_from([*RECIPES]),
    world_size=st.integers(1, 4),
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    num_microbatches=st.integers(1, 3),
)
@example("fsdp", 3, [4, 0, 1, 2], 2)
def test_batches_that_part_cuts_give_the_rows_and_the_figures_of_one_process(
    strategy, world_size, sizes, num_microbatches
):
    """Batches may have fewer rows than there are ranks, or none."""
    data = regression_data(sum(sizes))
    batches = [*zip(*[tensor.split(sizes) for tensor in data.tensors], strict=True)]

    def run(state):
        recipe = af.compose(RECIPES[strategy], af.accumulate(num_microbatches))
        state, step = ours.built(recipe, state)
        mine = [af.shard_batch(batch, state) for batch in batches]
        figures = {**af.evaluate(step, state, mine, metric_fn), **af.evaluate(step, state, mine)}
        return af.predict(step, state, iter(mine), fn), figures

    ((_, figures),) = simulate(run, world_size=1)
    for rows, found in simulate(run, world_size=world_size):
        assert_rows(rows, by_hand(data))
        assert_same(found, figures)


@ours.share(0.34)
@given(
    strategy=st.sampled_from([*RECIPES]),
    counts=st.lists(st.integers(0, 3), min_size=2, max_size=4).filter(any),
)
@example("fsdp", [0, 3, 1])
def test_ranks_may_have_as_many_batches_as_they_like(strategy, counts):
    """Rows come by batch, and in a batch by rank; the figures are those of all rows."""
    data = regression_data(2 * sum(counts))
    pairs = iter(zip(*[tensor.split(2) for tensor in data.tensors], strict=True))
    lists = [[next(pairs) for _ in range(count)] for count in counts]
    in_order = [each[place] for place in range(3) for each in lists if place < len(each)]

    def run(state):
        state, step = ours.built(af.compose(RECIPES[strategy], af.accumulate(2)), state)
        mine = lists[state.rank]
        figures = {**af.evaluate(step, state, mine, metric_fn), **af.evaluate(step, state, mine)}
        return af.predict(step, state, mine, fn), figures

    def alone(state):
        state, step = ours.built(af.compose(), state)
        return {
            **af.evaluate(step, state, in_order, metric_fn),
            **af.evaluate(step, state, in_order),
        }

    expected = by_hand(TensorDataset(*[torch.cat(each) for each in zip(*in_order, strict=True)]))
    for rows, found in simulate(run, world_size=len(counts)):
        assert_rows(rows, expected)
        assert_same(found, alone(af.DistState()))
