"""A step over the parts of a global batch is a step over the batch, for every kind of mapping."""

from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import strategies
from tests.support import strategies as ours


class Encoding(UserDict):
    """A stand-in for transformers' `BatchEncoding`: a mapping with attributes beside its items."""

    encodings = None


def loss_of(model, batch):
    """Find the two tensors anywhere in the batch; an `Encoding` must have kept its class and its
    attribute."""
    if isinstance(batch, UserDict):
        assert batch.encodings == "all"
        batch = (batch["x"], batch["y"])
    if isinstance(batch, Record):
        assert len(batch.names) == len(batch.x)
        batch = (batch.x, batch.y)
    return ours.mse(model, batch)


def encoded(batch):
    encoding = Encoding(x=batch[0], y=batch[1])
    encoding.encodings = "all"
    return encoding


@dataclass(frozen=True)
class Record:
    """A batch that torch's pytree does not know, with a setting beside its rows."""

    x: torch.Tensor
    y: torch.Tensor
    names: tuple[str, ...] = ("x", "y", "z")


KINDS = {
    "tuple": tuple,
    "list": list,
    "mapping": encoded,
    "dataclass": lambda batch: Record(*batch, tuple(f"row {i}" for i in range(len(batch[0])))),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@ours.share(0.3)
@given(
    batches=strategies.batches(),
    world_size=strategies.world_sizes(4),
    num_microbatches=st.integers(1, 4),
)
@example(
    batches=[(torch.ones(2, 3).double(), torch.ones(2, 1).double())],
    world_size=3,  # one rank has no rows
    num_microbatches=2,
)
def test_a_step_over_parts_is_a_step_over_the_batch(kind, batches, world_size, num_microbatches):
    expected = ours.trained_by_hand(ours.regression_model(), batches)
    states = [af.DistState(rank=rank, world_size=world_size) for rank in range(world_size)]
    parts = [[af.shard_batch(kind(batch), state) for batch in batches] for state in states]
    recipe = af.compose(af.place(), af.wrap_ddp(), af.accumulate(num_microbatches))
    ranks = ours.trained(ours.regression_model(), parts, recipe, loss_fn=loss_of)
    ours.assert_trained(ranks, expected)


@given(num_rows=st.integers(0, 20), world_size=st.integers(1, 9))
def test_the_parts_of_the_ranks_joined_are_the_batch(num_rows, world_size):
    batch = encoded((torch.arange(num_rows), [f"row {i}" for i in range(num_rows)]))
    states = [af.DistState(rank=rank, world_size=world_size) for rank in range(world_size)]
    parts = [af.shard_batch(batch, state) for state in states]
    assert torch.cat([part["x"] for part in parts]).tolist() == batch["x"].tolist()
    assert {type(part) for part in parts} == {Encoding}
    assert max(map(len, (part["x"] for part in parts))) <= min(len(p["x"]) for p in parts) + 1
    if num_rows != 1:
        assert [text for part in parts for text in part["y"]] == batch["y"]
