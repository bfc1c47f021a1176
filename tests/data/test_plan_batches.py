"""plan_batches predicts what loaders and accumulate do."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af


@st.composite
def plans(draw):
    """Draw valid arguments."""
    world_size = draw(st.integers(1, 8))
    batch_size = draw(st.integers(world_size, 40))
    drop_last = draw(st.booleans())
    num_samples = draw(st.integers(batch_size if drop_last else world_size, 200))
    num_microbatches = draw(st.integers(1, 9))
    return num_samples, batch_size, world_size, num_microbatches, drop_last


def micro_batches(rows, num_microbatches):
    """Cut rows as `accumulate` does, which gives no micro-batch without rows."""
    return [part for part in rows.tensor_split(num_microbatches) if len(part)] or [rows]


@given(arguments=plans())
def test_a_plan_is_what_loaders_and_accumulate_do(arguments):
    num_samples, batch_size, world_size, num_microbatches, drop_last = arguments
    plan = af.data.plan_batches(*arguments[:4], drop_last=drop_last)
    data = TensorDataset(torch.arange(num_samples))
    loaders = [
        af.shard_loader(
            DataLoader(data, batch_size=batch_size, drop_last=drop_last),
            af.DistState(rank=rank, world_size=world_size),
        )
        for rank in range(world_size)
    ]
    assert [len(loader) for loader in loaders] == [plan.num_batches] * world_size
    for number, parts in enumerate(zip(*loaders, strict=True)):
        full = number < plan.num_full
        sizes = tuple(len(part[0]) for part in parts)
        assert sizes == (plan.rank_sizes if full else plan.last_rank_sizes)
        assert sum(sizes) == (batch_size if full else plan.last_batch)
        cut = tuple(tuple(map(len, micro_batches(part[0], num_microbatches))) for part in parts)
        assert cut == (plan.microbatch_sizes if full else plan.last_microbatch_sizes)
    assert plan.num_full in (plan.num_batches, plan.num_batches - 1)


@given(batch_size=st.integers(1, 300))
def test_even_worlds_are_those_whose_ranks_get_equal_parts(batch_size):
    plan = af.data.plan_batches(300, batch_size)
    assert plan.even_world_sizes == tuple(
        each for each in range(1, batch_size + 1) if batch_size % each == 0
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            (128, 64, 3, 4),
            """\
128 samples, batches an epoch: 2
batches  samples    on each rank  in each micro-batch
      2       64  1 x 22, 2 x 21         4 x 6, 8 x 5
world sizes that share a batch evenly: 1, 2, 4, 8, 16, 32, 64""",
        ),
        (
            (10, 4, 3),
            """\
10 samples, batches an epoch: 3
batches  samples  on each rank  in each micro-batch
      2        4  1 x 2, 2 x 1         1 x 2, 2 x 1
      1        2  2 x 1, 1 x 0         2 x 1, 1 x 0
world sizes that share a batch evenly: 1, 2, 4""",
        ),
        (
            (5, 7),
            """\
5 samples, batches an epoch: 1
batches  samples  on each rank  in each micro-batch
      1        5         1 x 5                1 x 5
world sizes that share a batch evenly: 1, 7""",
        ),
    ],
    ids=["full", "short tail", "one short batch"],
)
def test_a_plan_reads_as_a_table(arguments, text):
    plan = af.data.plan_batches(*arguments)
    assert repr(plan) == str(plan) == text


def test_a_plan_is_data():
    assert af.data.plan_batches(10, 4) == af.data.plan_batches(10, 4)
    with pytest.raises(AttributeError):
        af.data.plan_batches(10, 4).num_batches = 3


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((0, 4), ValueError, "num_samples must be an integer >= 1, got 0"),
        ((10, -1), ValueError, "batch_size must be an integer >= 1, got -1"),
        ((10, 4, 0), ValueError, "world_size must be an integer >= 1, got 0"),
        ((10, 4, 2, 1.5), TypeError, r"num_microbatches must be an integer >= 1, got 1\.5"),
        ((10, True), TypeError, "batch_size must be an integer >= 1, got True"),
    ],
)
def test_what_cannot_be_cut_is_refused(arguments, error, text):
    with pytest.raises(error, match=f"plan_batches: {text}"):
        af.data.plan_batches(*arguments)


def test_a_plan_that_drops_all_is_refused():
    with pytest.raises(ValueError, match="plan_batches: drop_last=True must leave a batch, got 3"):
        af.data.plan_batches(3, 4, drop_last=True)
