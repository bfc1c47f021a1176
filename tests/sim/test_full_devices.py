"""A device without room for a batch: the step starts anew in smaller micro-batches, or changes nothing."""

import contextlib
import gc

import pytest
import torch

import accel_fn as af
from tests.gpu.parts import TRANSFORMS
from tests.sim.device import native
from tests.sim.programs import (
    OPTIMIZERS,
    assert_equal,
    loss_fn,
    make_batches,
    make_model,
    train,
    whole,
)


@contextlib.contextmanager
def room_for(num_rows):
    """Leave room for what `forward` or `backward` take for so many rows."""
    gc.collect()  # else what other tests have left could make more room later
    taken = torch.accelerator.memory_allocated()
    torch.sim.set_per_process_memory_fraction((taken + (num_rows + 1) * 2**20) / native.memory)
    try:
        yield
    finally:
        torch.sim.set_per_process_memory_fraction(1.0)


def take(batch):
    torch.empty(len(batch[0]), 2**20, dtype=torch.uint8, device=batch[0].device)


def forward(model, batch):
    loss, metrics = loss_fn(model, batch)
    take(batch)
    return loss, metrics


def backward(model, batch):
    """Take it near the end of the backward, when most gradients are there."""

    def take_with_gradient(module, inputs, output):
        output.register_hook(lambda gradient: take(batch))

    with model.first.register_forward_hook(take_with_gradient):
        return loss_fn(model, batch)


WITH_AUTO = [(), *((name,) for name in TRANSFORMS if not name.startswith(("accumulate", "repro")))]


@pytest.mark.parametrize("names", [*WITH_AUTO, ("fp16", "fsdp(offload)", "average")], ids="+".join)
@pytest.mark.parametrize("loss", [forward, backward])
def test_a_batch_that_does_not_fit_is_as_one_that_was_cut_from_the_start(names, loss):
    half = {"fp16", "bf16", "fsdp"} & {*names}
    options = {"dtype": torch.float32 if half else torch.float64, "loss": loss}

    def run(number):
        recipe = [af.accumulate(number), *(TRANSFORMS[name]() for name in names)]
        return train("sim", recipe, **options)

    with room_for(4):
        found = run("auto")
    assert_equal(found, run(2), atol=0)
    assert found.extras["num_microbatches"] == 2
    assert found.hazards == []


def built(*transforms):
    model = make_model()
    plan = af.Plan(forward, model, OPTIMIZERS["fused"](model.parameters()))
    return af.build(af.compose(af.place(), *transforms)(plan), af.init())


def parameters(step):
    return {name: whole(each) for name, each in step.plan.model.named_parameters()}


@pytest.mark.parametrize(
    ("transforms", "error", "text"),
    [
        ([], torch.OutOfMemoryError, "^sim out of memory. Tried to allocate"),
        (
            [af.accumulate("auto")],
            MemoryError,
            r"^step: batch must fit into memory in micro-batches of one sample, got on rank 0: sim out of",
        ),
    ],
)
def test_an_error_for_want_of_memory_changes_nothing_and_the_run_goes_on(transforms, error, text):
    first, second, *_ = make_batches()
    runs = []
    for is_full in (True, False):
        state, step = built(*transforms)
        state, _ = step(state, first)
        if is_full:
            before = parameters(step)
            with room_for(0), pytest.raises(error, match=text):
                step(state, first)
            torch.testing.assert_close(parameters(step), before, rtol=0, atol=0)
        step(state, second)
        runs.append(parameters(step))
    torch.testing.assert_close(*runs, rtol=0, atol=0)
