"""Runs on devices whose memory holds some rows only, and the runs that are cut so from the start."""

from dataclasses import replace

import torch
from torch import nn

import accel_fn as af
from accel_fn.core.dtensor import local
from accel_fn.core.split_batch import split_batch
from accel_fn.testing import simulate
from tests.support import strategies as ours

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
    return af.build(recipe(plan), state)


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


class Votes(af.extend.SlotFunction):
    """A wrapper of the gradient function after which ranks vote, as with `accumulate("auto")`.

    Such ranks divide by the weight of the global batch, where others predict it from the last
    batch. The two differ in the last bit if the weight varies.
    """

    traits = frozenset({"retries"})


def cut_into(counts):
    """Make a split into these numbers of micro-batches, batch by batch."""
    left = iter(counts)
    cut = af.accumulate(1, split=lambda batch: split_batch(batch, num_parts=next(left)))
    return af.compose(cut, lambda plan: replace(plan, wrap_grad_fn=(Votes(lambda fn: fn),)))


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


def ones(num_samples):
    return torch.ones(num_samples, 3).double(), torch.ones(num_samples, 1).double()


def save_after_one(folder, recipe, world_size):
    """Save a run in which two samples fit, after one batch of eight samples per rank."""

    def run(state):
        state, step = make(state, limited(2), recipe)
        state, _ = step(state, ones(8))
        af.save(step, state, folder)

    simulate(run, world_size=world_size)


def count_after(folder, recipe, world_size):
    """Return the number of micro-batches with which a run continues when everything fits."""

    def run(state):
        state, step = make(state, ours.mse, recipe)
        _, report = step(af.load(step, state, folder), ones(2))
        return report.extras.get("num_microbatches")

    return simulate(run, world_size=world_size)
