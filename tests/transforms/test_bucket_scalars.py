"""Loss and weight in the bucket of the gradients: exact, heard of by all ranks, and free of history."""

import copy
import math
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate
from accel_fn.transforms.ddp.bucket_scalars import CarriedTally, Carrier
from tests import strategies as ours


def weighing(state, dtype=torch.float32):
    """A step over batches that bring their weight."""
    model = torch.nn.Linear(2, 1).to(dtype)
    plan = af.Plan(
        lambda model, batch: model(batch[0]).square().mean(),
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        weight_fn=lambda batch: batch[1],
    )
    return af.build(state, af.wrap_ddp()(plan))


def reports_of(weights, world_size, dtype=torch.float32):
    """One step per row of weights, a rank's each: what every rank reports."""

    def run(state):
        state, step = weighing(state, dtype)
        found = []
        for row in weights:
            state, report = step(state, (torch.ones(1, 2, dtype=dtype), row[state.rank]))
            found.append(report.weight)
        return found

    return simulate(run, world_size=world_size)


@given(
    weights=st.lists(
        st.lists(st.integers(0, 2**32), min_size=5, max_size=5), min_size=2, max_size=3
    ),
    world_size=st.integers(2, 5),
)
def test_counts_are_exact_whatever_the_dtype_of_the_model(weights, world_size):
    """float32 alone would lose them beyond 2**24."""
    expected = [sum(row[:world_size]) for row in weights]
    for found in reports_of(weights, world_size):
        assert found == expected
        assert all(type(weight) is int for weight in found)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("kind", "largest"),
    [
        (np.int64, 2**53),
        (np.uint8, 255),
        (np.float32, 1.5),
        (np.float64, 2.0**51 + 0.5),
        (Fraction, 2.5),
        (torch.tensor, 2**53),
        (partial(torch.tensor, dtype=torch.float64), 2.0**51 + 0.5),
        (partial(torch.tensor, dtype=torch.uint8), 255),
    ],
)
def test_a_number_of_any_kind_weighs_what_it_is(kind, largest, world_size):
    [first, *_] = reports_of([[kind(largest), kind(0)]], world_size)
    assert first == [largest]
    assert type(first[0]) is type(largest)


@pytest.mark.parametrize("weight", [1e-40, 1e40, 10**40])
def test_weights_at_the_ends_of_float32_are_refused_on_every_rank(weight):
    def refused(state):
        state, step = weighing(state)
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            step(state, (torch.ones(1, 2), weight if state.rank else 1))
        return str(caught.value)

    other, own = simulate(refused, world_size=2)
    assert "weight_fn must return 0 or a count from 1e-30 to 1e+30" in own
    assert other == "step: batch must be countable on every rank; another rank's error says why"


ANY_WEIGHT = st.just(0.0) | st.floats(1e-30, 1e6)


@given(
    weights=st.lists(st.lists(ANY_WEIGHT, min_size=3, max_size=3), min_size=2, max_size=2),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_fractions_are_summed_to_rounding(weights, dtype):
    expected = [math.fsum(row) for row in weights]
    for found in reports_of(weights, 3, dtype):
        assert found == pytest.approx(expected, rel=1e-6 if dtype == torch.float32 else 1e-12)


def replicas(state, *recipe, lr, ddp=None, **settings):
    """A small model under DDP, and transforms after it; its loss is the mean of what it gives."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    plan = af.Plan(lambda model, batch: model(batch).mean(), model, optimizer, **settings)
    return af.build(state, af.compose(af.wrap_ddp(**(ddp or {})), *recipe)(plan))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_came_before_moves_no_bit(dtype):
    """The unit follows the weights of earlier batches; a resumed run has had none."""
    generator = torch.Generator().manual_seed(3)
    first, batch = (torch.randn(size, 4, generator=generator, dtype=dtype) for size in (1000, 21))

    def gradients(warm):
        def run(state):
            model = torch.nn.Linear(4, 1, dtype=dtype)
            torch.nn.init.constant_(model.weight, 0.3)
            torch.nn.init.constant_(model.bias, 0.1)
            plan = af.Plan(
                lambda model, batch: model(batch).square().mean(),
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
            )
            state, step = af.build(state, af.wrap_ddp()(plan))
            for rows in ([first] if warm else []) + [batch]:
                state, grads, report = step.grads(state, rows[state.rank :: 3])
            return {**dict(enumerate(grads.values())), "loss": report.loss}

        return simulate(run, world_size=3)

    for warm, cold in zip(gradients(True), gradients(False), strict=True):
        ours.assert_identical(warm, cold)


def test_a_factor_of_one_is_not_there():
    """Where weights are powers of two nothing passes over the gradients, from the second step on."""

    def run(state):
        state, step = replicas(state, lr=0.1)
        return [step.grads(state, torch.ones(16, 4))[1].factor is None for _ in range(3)]

    assert simulate(run, world_size=2) == [[False, True, True]] * 2


def test_a_rank_that_cannot_count_is_heard_of_by_all():
    def run(state):
        state, step = replicas(state, lr=0.1, weight_fn=lambda batch: 1 / int(batch[0, 0]))
        model = step.plan.model
        before = copy.deepcopy(model.state_dict())
        with pytest.raises((ZeroDivisionError, ValueError)) as caught:
            step(state, torch.full((2, 4), float(state.rank)))
        ours.assert_identical(model.state_dict(), before)
        _, report = step(state, torch.full((2, 4), 1.0))  # and the step is as good as new
        return type(caught.value).__name__, report.weight

    assert simulate(run, world_size=3) == [
        ("ZeroDivisionError", 3),
        ("BatchError", 3),
        ("BatchError", 3),
    ]


def test_a_loss_that_is_no_number_on_one_rank_leaves_the_weight_alone():
    def run(state):
        state, step = replicas(state, lr=0.0)
        _, report = step(state, torch.full((2, 4), math.nan if state.rank else 1.0))
        return math.isnan(report.loss), report.weight

    assert simulate(run, world_size=2) == [(True, 4)] * 2


def test_a_batch_that_weighs_nothing_anywhere():
    def run(state):
        state, step = replicas(state, lr=0.1, weight_fn=lambda batch: 0)
        _, grads, report = step.grads(state, torch.ones(2, 4))
        return [float(t.abs().sum()) for t in grads.values()], float(report.loss), report.weight

    assert simulate(run, world_size=2) == [([0.0, 0.0], 0.0, 0)] * 2


@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        ({}, (af.accumulate(2),)),
        ({"find_unused_parameters": True}, ()),
        ({"find_unused_parameters": True}, (af.accumulate(2),)),
        ({"static_graph": True}, ()),  # and no accumulation, which build refuses with it
    ],
    ids=["accumulated", "unused", "unused, accumulated", "static"],
)
def test_it_is_carried_under_the_options_of_ddp_that_look_at_the_graph(options, recipe):
    """Once a batch: what a micro-batch before the last leaves there is nothing."""

    def run(state):
        state, step = replicas(state, *recipe, lr=0.0, ddp=options)
        found = []
        for num_samples in (2, 3, 4):
            state, report = step(state, torch.full((num_samples + state.rank, 4), 1.0))
            found.append(report.weight)
        return found

    assert simulate(run, world_size=2) == [[5, 7, 9]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(3, 40, 7), (64, 64, 10), (40, 3, 1)])
def test_the_largest_gradient_begins_at_a_cache_line_of_the_bucket(sizes, dtype):
    def run(state):
        layers = [torch.nn.Linear(*pair, dtype=dtype) for pair in pairwise(sizes)]
        model, places = torch.nn.Sequential(*layers), []
        plan = af.Plan(
            lambda model, batch: model(batch).mean(), model, ours.sgd(model.parameters())
        )
        state, step = af.build(state, af.wrap_ddp()(plan))
        largest = max(model.parameters(), key=torch.numel)
        step.plan.optimizer.register_step_pre_hook(
            lambda *_: places.append(largest.grad.data_ptr() % 64)
        )
        for _ in range(3):
            state, _ = step(state, torch.ones(2, sizes[0], dtype=dtype))
        return places

    assert simulate(run, world_size=2) == [[0, 0, 0]] * 2


def test_a_step_that_failed_leaves_nothing_to_be_carried_by_the_next():
    def run(state):
        model = torch.nn.Linear(4, 1)
        plan = af.Plan(
            lambda model, batch: model(batch).mean() if len(batch) > 1 else torch.ones(()),
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
        )
        state, step = af.build(state, af.compose(af.wrap_ddp(), af.accumulate(2))(plan))
        with pytest.raises(ValueError, match="requires no gradient"):
            step(state, torch.ones(1, 4))
        return step(state, torch.ones(6, 4))[1].weight

    assert simulate(run, world_size=2) == [12, 12]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_goes_on_after_its_loss_failed_is_no_batch_ahead_of_the_others(world_size):
    """Gradients of two batches in one update would be nobody's mean; all ranks hear of it at once."""

    def run(state):
        def loss_fn(model, batch):
            if batch[0, 0] < 0:
                raise ZeroDivisionError
            return model(batch).mean()

        model = torch.nn.Linear(4, 1)
        plan = af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1))
        state, step = af.build(state, af.wrap_ddp()(plan))
        state, _ = step(state, torch.ones(2, 4))
        before = copy.deepcopy(model.state_dict())
        if state.rank == 1:
            with pytest.raises(ZeroDivisionError):
                step(state, -torch.ones(2, 4))
        with pytest.raises(RuntimeError, match="step: every rank must be at the same call of it"):
            step(state, torch.ones(2, 4))
        ours.assert_identical(model.state_dict(), before)
        return state.rank

    assert simulate(run, world_size=world_size) == [*range(world_size)]


@pytest.mark.parametrize("world_size", [3, 100, 1000])
def test_rounding_in_a_sum_over_many_ranks_is_not_taken_for_another_call(world_size):
    """Added one after another in float32, as around a ring; in every call of a round of numbers."""
    carrier = Carrier(torch.nn.Linear(2, 1))
    state = af.DistState(world_size=world_size)
    for _ in range(64):
        tally = CarriedTally(carrier, state, [1.0], None, stop=False)
        tally.add(torch.ones(()), 1.0, last=True)
        part = tally.loads()[0] / world_size
        carrier.numbers.grad = torch.zeros_like(part)
        for _ in range(world_size):
            carrier.numbers.grad += part
        assert tally.close()[1] == world_size


def test_a_number_too_large_is_carried_as_infinite():
    """An error on one rank, where the others wait, would be worse."""
    cargo = Carrier(torch.nn.Linear(2, 1)).cargo
    cargo.write(1e300, *[0.0] * 6)
    assert cargo.load.tolist()[:7] == [float("inf")] + [0.0] * 6


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", [af.compose(), af.accumulate(3)], ids=["whole", "accumulated"])
def test_large_counts_are_no_gradients_to_overflow(dtype, world_size, recipe):
    """In float16, 70,000 labels times a gradient are infinite."""
    inputs = torch.linspace(-1, 1, 48).view(12, 4)

    def loss_fn(model, batch):
        return model(batch).square().mean()

    def trained(state, dtype):
        model = torch.nn.Linear(4, 1).to(dtype)
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 0.5)
        plan = af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1))
        plan = replace(plan, weight_fn=lambda batch: 70_000 * len(batch))
        state, step = af.build(state, af.compose(af.wrap_ddp(), recipe)(plan))
        state, _ = step(state, inputs[state.rank :: state.world_size].to(dtype))
        return model.state_dict()

    expected = trained(af.DistState(), torch.float64)
    for found in simulate(lambda state: trained(state, dtype), world_size=world_size):
        for name, value in expected.items():
            error = (found[name].double() - value).abs().max()
            assert error <= 4 * torch.finfo(dtype).eps  # of values below 1, a few roundings


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_step_without_a_loss_scale_goes_with_one_that_has_one_on_one_state(num_microbatches):
    """As of a GAN: the state has the scale of the second, whatever the first was built with."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(10, 4, generator=generator)
    batch = inputs, inputs.sum(1, keepdim=True)
    scaled = af.compose(af.wrap_ddp(), af.with_amp("fp16", init_scale=2.0**10))

    def run(state):
        part = tuple(each.tensor_split(state.world_size)[state.rank] for each in batch)
        steps, found = [], {}
        for recipe in (af.wrap_ddp(), scaled):
            model = torch.nn.Linear(4, 1)
            torch.nn.init.constant_(model.weight, 0.25)
            torch.nn.init.zeros_(model.bias)
            plan = af.Plan(ours.mse, model, ours.sgd(model.parameters()))
            recipe = af.compose(recipe, af.accumulate(num_microbatches))
            state, step = af.build(state, recipe(plan))
            steps.append(step)
        for _ in range(3):
            for index, step in enumerate(steps):
                state, report = step(state, part)
                found[f"loss {index}"] = report.loss
        return {**steps[0].plan.model.state_dict(), "loss": found["loss 0"]}

    [alone] = simulate(run, world_size=1)
    for world_size in (2, 3):
        for found in simulate(run, world_size=world_size):
            ours.assert_close(found, alone, rtol=1e-5, atol=1e-6)  # of float32
