"""A loader's batches whose rows are not its samples are warned of or refused; all others train as on one
rank."""

import warnings

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours


def columns(rows):
    return zip(*rows, strict=True)


def samples_first(rows):
    return tuple(map(torch.stack, columns(rows)))


def views(rows):
    return tuple(torch.stack([*each, *each]) for each in columns(rows))


def left_out(rows):
    """Leave out a third of the samples, by what they are."""
    return samples_first([row for row in rows if row[1][0, 0] > 1e-9])


def time_first(rows):
    return tuple(torch.stack(each, 1) for each in columns(rows))


def joined(rows):
    return tuple(torch.cat(each)[None] for each in columns(rows))


RIGHT = {"samples first": samples_first, "views": views, "left out": left_out}
WRONG = {"time first": time_first, "joined": joined}


@st.composite
def programs(draw):
    """Draw a layout, and batches of which each rank has more samples than a sample has times."""
    world_size, length = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    batch_size = draw(st.integers(world_size * (length + 1), 16))
    num_batches, k = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    layout = draw(st.sampled_from([*RIGHT, *WRONG]))
    return layout, world_size, length, batch_size, num_batches, k


@ours.share(0.5)
@given(program=programs())
@example(program=("time first", 3, 2, 10, 1, 1))
@example(program=("joined", 2, 2, 7, 1, 1))
@example(program=("time first", 1, 2, 8, 1, 2))
def test_rows_are_samples_or_the_step_says_so(program):
    layout, world_size, length, batch_size, num_batches, k = program
    generator = torch.Generator().manual_seed(batch_size)
    shape = batch_size * num_batches, length
    x = torch.randn(*shape, 3, generator=generator, dtype=torch.float64)
    y = 1 + x.square().sum(2, keepdim=True)
    y[::3] = 0
    rows = [*zip(x, y, strict=True)]

    def run(state, k):
        model = ours.regression_model()
        recipe = af.compose(af.wrap_ddp(), af.accumulate(k))
        plan = recipe(af.Plan(ours.mse, model, ours.sgd(model.parameters())))
        state, step = af.build(plan, state, check_loss=False)
        collate = {**RIGHT, **WRONG}[layout]
        try:
            for batch in af.shard_loader(DataLoader(rows, batch_size, collate_fn=collate), state):
                state, _ = step(state, batch)
        except af.errors.BatchError as error:
            return str(error)
        return model.state_dict()

    (expected,) = simulate(lambda state: run(state, 1), world_size=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = simulate(lambda state: run(state, k), world_size=world_size)
    refused = [each for each in found if isinstance(each, str)]
    assert len(refused) in (0, world_size)
    warned = [each for each in caught if "weight_fn should count samples" in str(each.message)]
    is_wrong = layout in WRONG and (world_size > 1 or k > 1)
    assert bool(refused or warned) == is_wrong
    assert len(warned) <= 1
    if not is_wrong:
        for parameters in found:
            ours.assert_close(parameters, expected)
