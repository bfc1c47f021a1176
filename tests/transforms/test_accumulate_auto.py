"""accumulate('auto'): which errors are repeated, what is restored, and what a resumed run keeps."""

import gc
import random

import numpy as np
import pytest
import torch
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate
from tests.laws.law07_scaling import scaled
from tests.support import strategies as ours
from tests.support.block_models import batches as fixed_batches
from tests.support.out_of_memory import (
    FULL,
    assert_same_runs,
    checked,
    count_after,
    go_on,
    limited,
    make,
    ones,
    save_after_one,
    told_by,
    train,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:step. model should write the same in its forward"),
    pytest.mark.filterwarnings("ignore:step. loss_fn should return the mean"),
]


def test_it_repeats_a_later_batch_with_the_buffers_of_the_first_rank():
    """DDP broadcasts them before each update; on the others they are those of their own samples."""
    batches = [fixed_batches(num=1, size=2)[0], *fixed_batches(num=2, size=4)]
    parts = ours.dealt_evenly(batches, world_size=2)
    counts, _ = checked(parts, 1, 1, "backward", af.compose())
    assert counts == [1, 2, 2]


def test_a_step_that_failed_is_repeated_with_the_buffers_of_the_first_rank():
    """As in DDP by hand."""

    def run(state, recipe):
        fails = False

        def loss_fn(model, batch):
            loss = ours.mse(model, batch)
            if fails:
                raise ArithmeticError("no number")
            return loss

        state, step = make(state, loss_fn, af.compose(af.wrap_ddp(), recipe))
        part = tuple(each[state.rank :: 2] for each in fixed_batches(num=1, size=4)[0])
        state, _ = step(state, part)
        fails = True
        with pytest.raises(ArithmeticError):
            step(state, part)
        fails = False
        step(state, part)
        return step.plan.model.state_dict()

    expected, found = (
        simulate(lambda state, recipe=recipe: run(state, recipe), world_size=2)
        for recipe in (af.accumulate(1), af.accumulate("auto"))
    )
    for actual, plain in zip(found, expected, strict=True):
        ours.assert_identical(actual, plain)


def test_a_batch_that_overflows_as_well_is_skipped_once():
    """The overflow is on the first rank; the last rank runs out of memory."""
    batches = fixed_batches(num=3, size=16)
    batches[0][1][0] = float("inf")  # an infinite target, so that buffers stay finite
    parts = ours.dealt_evenly(batches, world_size=2)
    counts, last = checked(parts, 1, 1, "backward", scaled(8.0, growth_interval=2))
    assert counts == [8] * 3
    assert told_by(last.scaler) == (8.0, 0, 1)


@pytest.mark.parametrize("full", FULL.values(), ids=FULL)
def test_random_generators_are_where_they_were(full):
    """The loss uses dropout, and draws from NumPy and Python."""

    def run(loss_fn, recipe):
        torch.manual_seed(1), np.random.seed(1), random.seed(1)
        state, step = ours.built(recipe, optimizer=ours.adamw, loss_fn=loss_fn)
        for _ in range(3):
            state, _ = step(state, (torch.ones(8, 3).double(), torch.ones(8, 1).double()))
        return step.plan.model.state_dict(), torch.rand(3), np.random.rand(), random.random()

    def noisy(loss_fn):
        def with_noise(model, batch):
            inputs = nn.functional.dropout(batch[0], 0.5) + np.random.rand() + random.random()
            return loss_fn(model, (inputs, batch[1]))

        return with_noise

    parameters, *drawn = run(noisy(limited(3, full=full)), af.accumulate("auto"))
    expected, *numbers = run(noisy(ours.mse), af.accumulate(4))
    ours.assert_identical(parameters, expected)
    assert torch.equal(drawn[0], numbers[0])
    assert drawn[1:] == numbers[1:]


def test_it_warns_once_and_remembers(capsys):
    batch = (torch.ones(8, 3).double(), torch.ones(8, 1).double())

    def run(state):
        loss_fn = limited(2 if state.rank == 1 else None)
        reports, _, _ = train(state, [batch] * 3, loss_fn, af.accumulate("auto"))
        return [report.extras["num_microbatches"] for report in reports]

    assert simulate(run, world_size=2) == [[4, 4, 4]] * 2
    assert capsys.readouterr().err.splitlines() == [
        f"out of memory on rank 1 at step 1; continuing with {count} micro-batches"
        for count in (2, 4)
    ]


def test_a_run_that_is_stopped_continues_with_as_many(tmp_path):
    """Later batches would fit whole, and would round differently."""
    first, *rest = [fixed_batches(num=1, size=size)[0] for size in (8, 2, 2)]
    recipe = af.compose(af.wrap_ddp(), af.accumulate("auto"))

    def made(state):
        return make(state, limited(2 if state.rank else None), recipe)

    def stopped(state):
        saved, step = made(state)
        saved, _ = step(saved, first)
        af.save(step, saved, tmp_path)
        state, step = made(state)
        return go_on(af.load(step, state, tmp_path), step, rest)

    def whole(state):
        state, step = made(state)
        state, _ = step(state, first)
        return go_on(state, step, rest)

    runs = simulate(stopped, world_size=2)
    assert_same_runs(runs, simulate(whole, world_size=2), [4, 4])


def test_another_world_seeks_it_anew(tmp_path):
    """In another world, a rank has another part of the batch."""
    recipe = af.compose(af.wrap_ddp(), af.accumulate("auto"))
    save_after_one(tmp_path, recipe, world_size=2)
    assert count_after(tmp_path, recipe, world_size=3) == [1] * 3


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_sample_that_is_too_much_is_an_error_on_every_rank(world_size):
    def run(state):
        loss_fn = limited(0 if state.rank == world_size - 1 else None)
        words = f"micro-batches of one sample, got on rank {world_size - 1}: Tried to allocate"
        batch = (torch.ones(3, 3).double(), torch.ones(3, 1).double())
        with pytest.raises(MemoryError, match=words):
            train(state, [batch], loss_fn, af.accumulate("auto"))

    simulate(run, world_size=world_size)


def test_another_error_is_not_tried_again():
    calls = []

    def loss_fn(model, batch):
        calls.append(1)
        raise RuntimeError("shapes do not fit")

    state, step = ours.built(af.accumulate("auto"), optimizer=ours.adamw, loss_fn=loss_fn)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        step(state, (torch.ones(4, 3).double(), torch.ones(4, 1).double()))
    assert len(calls) == 1


def test_it_cuts_by_rows_alone():
    with pytest.raises(ValueError, match='split must be "rows" where num_microbatches is "auto"'):
        af.accumulate("auto", split=None)


@pytest.mark.gpu
@pytest.mark.skipif(
    not hasattr(torch.get_device_module(), "set_per_process_memory_fraction"),
    reason="needs an accelerator whose memory can be capped",
)
def test_an_accelerator_that_is_full_is_one_that_was_cut_from_the_start():
    """The device's allocator raises the error, and dropout draws from the device's generator."""
    state, device = af.init(), torch.get_device_module()
    inputs, targets = (each.to(state.device) for each in ones(8))

    def loss_fn(model, batch):
        loss = ours.mse(model, (nn.functional.dropout(batch[0], 0.5), batch[1]))
        torch.empty(len(batch[0]), 64 * 2**20, dtype=torch.uint8, device=state.device)
        return loss

    def run(num_microbatches):
        device.manual_seed(1)
        recipe = af.compose(af.place(), af.accumulate(num_microbatches))
        start, step = make(af.init(), loss_fn, recipe)
        return *go_on(start, step, [(inputs, targets)] * 3), device.get_rng_state()

    # First let the device's libraries allocate what they keep, then cap the memory.
    _, expected, _, standing = run(4)
    gc.collect()
    torch.accelerator.empty_cache()
    total = device.get_device_properties().total_memory
    # 128 MiB of two fit and 256 MiB of four do not, whatever the libraries give back.
    room_for_two = device.memory_reserved() + 192 * 2**20
    device.set_per_process_memory_fraction(room_for_two / total)
    try:
        reports, actual, _, stands = run("auto")
    finally:
        device.set_per_process_memory_fraction(1.0)
    assert [report.extras["num_microbatches"] for report in reports] == [4, 4, 4]
    ours.assert_identical(actual, expected)
    assert torch.equal(stands, standing)


@pytest.mark.parametrize(
    ("saved", "here", "count"),
    [
        (af.accumulate(4), af.accumulate("auto"), 1),
        (af.accumulate("auto"), af.accumulate(2), None),
        (af.accumulate("auto"), af.compose(), None),
    ],
    ids=["given, then found", "found, then given", "found, then whole"],
)
def test_a_number_that_is_found_and_one_that_is_given_are_no_difference(
    tmp_path, saved, here, count
):
    save_after_one(tmp_path, saved, world_size=1)
    assert count_after(tmp_path, here, world_size=1) == [count]
