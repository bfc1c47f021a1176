"""accumulate("auto"): if any rank runs out of memory, all repeat the batch, and nothing else
changes."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accel_fn as af
from accel_fn.base.out_of_memory import free_memory
from accel_fn.base.split_batch import split_batch
from accel_fn.comm.dtensor import local
from accel_fn.testing import simulate, strategies
from tests.laws.law07_scaling import scaled
from tests.support import strategies as ours
from tests.support.block_models import batches as fixed_batches

pytestmark = [
    pytest.mark.filterwarnings("ignore:step. model should write the same to its buffers"),
    pytest.mark.filterwarnings("ignore:step. loss_fn should return the mean"),
]


FULL = {
    "accelerator": lambda: torch.OutOfMemoryError("Tried to allocate 20.00 MiB"),
    "host": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."),
    "python": MemoryError,
    "cublas": lambda: RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublas..."
    ),
    "cublas at its start": lambda: RuntimeError(
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
    ),
    "cudnn": lambda: RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "cudnn 9": lambda: RuntimeError(
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
    ),
}


class FailingBackward(torch.autograd.Function):
    """The identity, with a backward that runs out of memory."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise FULL["accelerator"]()


class Centred(nn.Module):
    """Subtracts a running mean, which changes in a failed forward too; unlike BatchNorm it takes
    one sample."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5).double())

    def forward(self, inputs):
        self.mean.lerp_(inputs.detach().mean(dim=0), 0.5)
        return inputs - self.mean.clone()


def model_with_statistics():
    model = ours.regression_model()
    return nn.Sequential(model[0], Centred(), *model[1:])


def limited(limit, where="after", full=FULL["accelerator"]):
    """Make a loss that takes a limited number of samples, and fails before, after or in the
    backward."""

    def loss_fn(model, batch):
        too_many = limit is not None and len(batch[0]) > limit
        if too_many and where == "before":
            raise full()
        loss = ours.mse(model, batch)
        if too_many and where == "after":
            raise full()
        return FailingBackward.apply(loss) if too_many else loss

    return loss_fn


def make(state, loss_fn, recipe):
    plan = ours.plan(model=model_with_statistics(), optimizer=ours.adamw, loss_fn=loss_fn)
    return af.build(state, recipe(plan))


def go_on(state, step, parts):
    """Continue a run; return reports, parameters, buffers and the last state."""
    reports = []
    for part in parts:
        state, report = step(state, part)
        reports.append(report)
    tensors = step.plan.model.state_dict()
    return reports, {name: local(value).clone() for name, value in tensors.items()}, state


def train(state, parts, loss_fn, recipe):
    return go_on(*make(state, loss_fn, af.compose(af.wrap_ddp(), recipe)), parts)


def cut_into(counts):
    """Make a split into these numbers of micro-batches, batch by batch."""
    left = iter(counts)
    return af.accumulate(1, split=lambda batch: split_batch(batch, num_parts=next(left)))


def told_by(scaler):
    """Return the values of a loss scale that change."""
    return scaler and (float(scaler.scale), int(scaler.good_steps), int(scaler.skipped))


def assert_same_runs(runs, expected, counts):
    """Assert equal bits on every rank: parameters, losses and scale, given the numbers of micro-
    batches."""
    for (reports, actual, state), (plain, parameters, other) in zip(runs, expected, strict=True):
        ours.assert_identical(actual, parameters)
        assert [float(each.loss) for each in reports] == [float(each.loss) for each in plain]
        assert [report.extras["num_microbatches"] for report in reports] == counts
        assert told_by(state.scaler) == told_by(other.scaler)


def checked(parts, culprit, limit, where, recipe):
    """Train where one rank has little memory; assert that it equals the run that was cut so from the start.

    How many micro-batches were made of each batch, and the last state.
    """
    world_size = len(parts)

    def found(state):
        loss_fn = limited(limit if state.rank == culprit else None, where)
        return train(state, parts[state.rank], loss_fn, af.compose(recipe, af.accumulate("auto")))

    runs = simulate(found, world_size=world_size)
    reports, _, last = runs[0]
    counts = [report.extras["num_microbatches"] for report in reports]

    def expected(state):
        return train(state, parts[state.rank], ours.mse, af.compose(recipe, cut_into(counts)))

    assert_same_runs(runs, simulate(expected, world_size=world_size), counts)
    return counts, last


@ours.share(0.32)
@given(
    batches=strategies.batches(num_batches=3),
    world_size=st.sampled_from([1, 2, 4]),
    culprit=st.integers(0, 3),
    limit=st.integers(1, 4),
    where=st.sampled_from(["before", "after", "backward"]),
    recipe=st.sampled_from([af.compose(), af.clip(0.1), scaled(8.0, growth_interval=2)]),
)
def test_it_is_the_run_that_had_as_many_micro_batches_from_the_start_to_the_bit(
    batches, world_size, culprit, limit, where, recipe
):
    parts = ours.dealt_evenly(batches, world_size)
    counts, _ = checked(parts, culprit % world_size, limit, where, recipe)
    assert counts == sorted(counts)
    mine = [len(part[0]) for part in parts[culprit % world_size]]
    largest = max(-(-size // count) for size, count in zip(mine, counts, strict=True))
    assert largest <= limit


@pytest.mark.parametrize("where", ["after", "backward"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_it_is_that_run_where_the_last_rank_alone_has_no_room(world_size, where):
    parts = ours.dealt_evenly(fixed_batches(num=3, size=16), world_size)
    counts, last = checked(parts, world_size - 1, 1, where, scaled(8.0, growth_interval=2))
    assert counts == [16 // world_size] * 3
    assert told_by(last.scaler) == (16.0, 1, 0)


@pytest.mark.parametrize("where", ["before", "after", "backward"])
def test_it_repeats_a_later_batch_with_the_buffers_of_the_first_rank(where):
    """DDP broadcasts them before each update; on the others they are those of their own samples."""
    batches = [fixed_batches(num=1, size=2)[0], *fixed_batches(num=2, size=4)]
    parts = ours.dealt_evenly(batches, world_size=2)
    counts, _ = checked(parts, 1, 1, where, af.compose())
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


@pytest.mark.parametrize("where", ["after", "backward"])
def test_a_batch_that_overflows_as_well_is_skipped_once(where):
    """The overflow is on the first rank; the last rank runs out of memory."""
    batches = fixed_batches(num=3, size=16)
    batches[0][1][0] = float("inf")  # an infinite target, so that buffers stay finite
    parts = ours.dealt_evenly(batches, world_size=2)
    counts, last = checked(parts, 1, 1, where, scaled(8.0, growth_interval=2))
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


def ones(num_samples):
    return torch.ones(num_samples, 3).double(), torch.ones(num_samples, 1).double()


def save_after_one(folder, recipe, world_size):
    """Save a run in which two samples fit, after one batch of eight samples per rank."""

    def run(state):
        state, step = make(state, limited(2), recipe)
        state, _ = step(state, ones(8))
        af.save(folder, state, step)

    simulate(run, world_size=world_size)


def count_after(folder, recipe, world_size):
    """Return the number of micro-batches with which a run continues when everything fits."""

    def run(state):
        state, step = make(state, ours.mse, recipe)
        _, report = step(af.load(folder, state, step), ones(2))
        return report.extras.get("num_microbatches")

    return simulate(run, world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_is_stopped_continues_with_as_many(tmp_path, world_size):
    """Later batches would fit whole, and would round differently."""
    first, *rest = [fixed_batches(num=1, size=size)[0] for size in (8, 2, 2)]
    recipe = af.compose(af.wrap_ddp(), af.accumulate("auto"))

    def made(state):
        return make(state, limited(2 if state.rank == world_size - 1 else None), recipe)

    def stopped(state):
        saved, step = made(state)
        saved, _ = step(saved, first)
        af.save(tmp_path, saved, step)
        state, step = made(state)
        return go_on(af.load(tmp_path, state, step), step, rest)

    def whole(state):
        state, step = made(state)
        state, _ = step(state, first)
        return go_on(state, step, rest)

    runs = simulate(stopped, world_size=world_size)
    assert_same_runs(runs, simulate(whole, world_size=world_size), [4, 4])


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_world_seeks_it_anew(tmp_path, world_size):
    """In another world, a rank has another part of the batch."""
    recipe = af.compose(af.wrap_ddp(), af.accumulate("auto"))
    save_after_one(tmp_path, recipe, world_size=2)
    assert count_after(tmp_path, recipe, world_size) == [1] * world_size


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


def test_parameters_that_the_loss_misses_are_refused_as_without_it():
    def loss_fn(model, batch):
        return model[0](batch[0]).square().mean()

    def run(state):
        batch = (torch.ones(4, 3).double(), torch.ones(4, 1).double())
        with pytest.raises(ValueError, match=r"got no gradient for 3\.weight"):
            train(state, [batch], loss_fn, af.accumulate("auto"))

    simulate(run, world_size=2)


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
        torch.empty(len(batch[0]), 16 * 2**20, dtype=torch.uint8, device=state.device)
        return loss

    def run(num_microbatches):
        device.manual_seed(1)
        recipe = af.compose(af.place(), af.accumulate(num_microbatches))
        start, step = make(af.init(), loss_fn, recipe)
        return *go_on(start, step, [(inputs, targets)] * 3), device.get_rng_state()

    # First let the device's libraries allocate what they keep, then cap the memory.
    _, expected, _, standing = run(4)
    free_memory(state)
    total = device.get_device_properties().total_memory
    room_for_two = device.memory_reserved() + 48 * 2**20  # 32 MiB of them fit, 64 do not
    device.set_per_process_memory_fraction(room_for_two / total)
    try:
        reports, actual, _, stands = run("auto")
    finally:
        device.set_per_process_memory_fraction(1.0)
    assert [report.extras["num_microbatches"] for report in reports] == [4, 4, 4]
    ours.assert_identical(actual, expected)
    assert torch.equal(stands, standing)
