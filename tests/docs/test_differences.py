"""The faults that were measured in accelerate, row by row of docs/differences.md, do not occur
here."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours


def data(num_samples):
    generator = torch.Generator().manual_seed(num_samples)
    return TensorDataset(
        torch.randn(num_samples, 3, generator=generator).double(),
        torch.randn(num_samples, 1, generator=generator).double(),
    )


def trained_through_loader(num_samples, batch_size, world_size, num_microbatches, num_epochs):
    """Return the parameters of every rank after epochs of shuffled batches with AdamW."""
    samples = data(num_samples)

    def run(state):
        recipe = af.compose(af.wrap_ddp(), af.accumulate(num_microbatches))
        state, step = ours.built(recipe, state, optimizer=ours.adamw)
        loader = af.shard_loader(DataLoader(samples, batch_size=batch_size, shuffle=True), state)
        for epoch in loader.epochs(num_epochs, since=state):
            for batch in epoch:
                state, _ = step(state, tuple(batch))
        return step.plan.model.state_dict()

    return simulate(run, world_size=world_size)


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "world_size", "num_microbatches"),
    [
        pytest.param(103, 4, 2, 4, id="rows 1 and 5: 103 samples, accumulated by 4, on 2 ranks"),
        pytest.param(
            103, 16, 2, 4, id="rows 1, 2 and 5: a tail of 7 samples for 2 ranks in 4 parts"
        ),
        pytest.param(15, 15, 2, 1, id="row 3: 8 and 7 samples"),
        pytest.param(14, 4, 2, 2, id="row 2: a tail of 2 samples for 2 ranks"),
    ],
)
def test_epochs_of_any_length_train_what_one_process_trains(
    num_samples, batch_size, world_size, num_microbatches
):
    expected = trained_through_loader(num_samples, batch_size, 1, 1, 3)[0]
    for parameters in trained_through_loader(
        num_samples, batch_size, world_size, num_microbatches, 3
    ):
        ours.assert_close(parameters, expected)


@pytest.mark.parametrize("interval", [1, 2])
def test_row_8_two_optimizers_under_one_moving_scale_update_as_without(interval):
    """The second update is unscaled by the scale of its own backward, whatever the first one
    changed."""

    def run(precision):
        state, models, steps = af.DistState(), [], []
        for seed in range(2):
            model = ours.regression_model(seed).float()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
            plan = precision(af.Plan(ours.mse, model, optimizer))
            state, step = af.build(plan, state)
            models.append(model)
            steps.append(step)
        batch = (torch.ones(4, 3), torch.ones(4, 1))
        for _ in range(4):
            state, _ = steps[0](state, batch, advance=False)
            state, _ = steps[1](state, batch)
        return state, [model.state_dict() for model in models]

    scale = {"init_scale": 4.0, "growth_interval": interval}
    state, scaled = run(af.with_amp("fp16", **scale))
    _, still = run(af.with_amp("fp16", init_scale=2.0**8))
    assert state.step == 4
    assert float(state.scaler.scale) == 4.0 * 2.0 ** (8 // interval)
    for moving, fixed in zip(scaled, still, strict=True):
        # float16 rounds to 11 bits, in the same way at any exponent except for subnormals
        ours.assert_close(moving, fixed, rtol=1e-3, atol=1e-4)


def test_row_18_float16_on_a_cpu_is_float16():
    seen = []

    def loss_fn(model, batch):
        output = model(batch[0])
        seen.append(output.dtype)
        return nn.functional.mse_loss(output.float(), batch[1])

    model = ours.regression_model().float()
    state, step = ours.built(af.with_amp("fp16"), model=model, loss_fn=loss_fn)
    step(state, (torch.ones(2, 3), torch.ones(2, 1)))
    assert seen == [torch.float16]


def test_row_21_two_models_in_one_loop_each_accumulate_and_average_in_every_step():
    batches = [(torch.ones(n, 3).double() * n, torch.ones(n, 1).double()) for n in (4, 3, 5)]

    def run(state):
        models = [ours.regression_model(seed) for seed in range(2)]
        steps = []
        for model in models:
            recipe = af.compose(af.wrap_ddp(), af.accumulate(2))
            state, step = af.build(
                recipe(af.Plan(ours.mse, model, ours.adamw(model.parameters()))), state
            )
            steps.append(step)
        for batch in batches:
            part = tuple(value.tensor_split(state.world_size)[state.rank] for value in batch)
            for step in steps:
                after, _ = step(state, part)
            state = after
        return [model.state_dict() for model in models]

    for parameters in simulate(run, world_size=2):
        for seed in range(2):
            _, expected = ours.trained_by_hand(ours.regression_model(seed), batches)
            ours.assert_close(parameters[seed], expected)


def test_row_22_a_second_setup_leaves_the_first_alone():
    batch = (torch.ones(4, 3).double(), torch.ones(4, 1).double())
    first_model, second_model = ours.regression_model(0), ours.regression_model(1)
    plan = af.accumulate(2)(af.Plan(ours.mse, first_model, ours.adamw(first_model.parameters())))
    first_state, first = af.build(plan, af.DistState())
    first_state, _ = first(first_state, batch)
    af.build(
        af.Plan(ours.mse, second_model, ours.sgd(second_model.parameters())), af.DistState(seed=9)
    )
    first_state, _ = first(first_state, batch)
    _, expected = ours.trained_by_hand(ours.regression_model(0), [batch] * 2)
    ours.assert_close(first_model.state_dict(), expected)
    assert (first_state.step, first_state.seed) == (2, 0)
