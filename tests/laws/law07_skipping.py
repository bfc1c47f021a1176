"""Skipped updates: the result is the run over the other batches, on all ranks alike."""

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate, strategies
from tests.laws.law07_scaling import OPTIMIZERS
from tests.support import strategies as ours


def with_one_bad(batches, bad, culprit, world_size):
    """Split every batch over the ranks; in a bad batch, all of one rank's part is bad."""
    parts = ours.dealt_evenly(batches, world_size)
    for index, value in bad.items():
        inputs, targets = batches[index]
        parts[culprit][index] = (inputs * value, targets)
    return parts


def trained_in_a_world(
    parts, recipe, optimizer=ours.adamw, wrap=None, make_model=ours.regression_model
):
    wrap = af.wrap_ddp() if wrap is None else wrap

    def run(state):
        model = make_model()
        plan = af.Plan(ours.mse, model, optimizer(model.parameters()))
        state, step = af.build(af.compose(wrap, recipe)(plan), state)
        applied = []
        for part in parts[state.rank]:
            state, report = step(state, part)
            applied.append(bool(report.applied))
        return ours.whole(model.state_dict()), applied

    return simulate(run, world_size=len(parts))


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@ours.share(0.34)
@given(
    batches=strategies.batches(num_batches=5),
    poisoned=st.sets(st.integers(0, 4), max_size=4),
    world_size=st.integers(1, 3),
    culprit=st.integers(0, 2),
    bad=st.sampled_from([float("inf"), float("nan")]),
)
def test_a_gradient_that_is_not_finite_on_one_rank_is_as_if_the_batch_were_not_there(
    optimizer, batches, poisoned, world_size, culprit, bad
):
    poisoned = {index: bad for index in poisoned if index < len(batches)}
    parts = with_one_bad(batches, poisoned, culprit % world_size, world_size)
    clean = [batch for index, batch in enumerate(batches) if index not in poisoned]
    _, expected = ours.trained_by_hand(
        ours.regression_model(), clean, optimizer=optimizer, max_norm=0.5
    )
    recipe = af.compose(af.clip(0.5), af.skip_nonfinite())
    for parameters, applied in trained_in_a_world(parts, recipe, optimizer):
        ours.assert_close(parameters, expected)
        assert applied == [index not in poisoned for index in range(len(batches))]


@given(batches=strategies.batches())
def test_where_all_is_well_nothing_changes_by_a_bit(batches):
    watched = af.compose(af.skip_nonfinite(), af.skip_spikes())
    _, expected = ours.trained(ours.regression_model(), [batches], af.compose())[0]
    _, actual = ours.trained(ours.regression_model(), [batches], watched)[0]
    ours.assert_identical(actual, expected)


def linear_run(gains):
    """Make batches on which a linear model of zeros has gradients as large as the gains."""
    inputs = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]).double() / 2
    return [(inputs * gain, torch.ones(2, 1).double()) for gain in gains]


def tiny_sgd(parameters):
    """Make SGD with a tiny rate, so that the batches determine the size of the gradients."""
    return torch.optim.SGD(parameters, lr=1e-15)


def linear_model():
    model = torch.nn.Linear(3, 1).double()
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    model.bias.requires_grad_(False)
    return model


def outcomes_of(gains, recipe, world_size=1):
    """Return for each batch whether the update was applied, checked to be equal on every rank."""
    parts = ours.dealt(linear_run(gains), [[2 // world_size] * world_size] * len(gains))

    def run(state):
        model = linear_model()
        plan = af.Plan(ours.mse, model, tiny_sgd([model.weight]))
        state, step = af.build(af.compose(af.wrap_ddp(), recipe)(plan), state)
        found = []
        for part in parts[state.rank]:
            state, report = step(state, part)
            found.append(bool(report.applied))
        return found

    first, *others = simulate(run, world_size=world_size)
    assert all(other == first for other in others)
    return first


def expected_outcomes(norms, num_sigmas, window):
    """Apply the documented rule; a norm at the bound may go either way, by rounding."""
    kept, found = [], []
    for norm in norms:
        last = torch.tensor(kept[-window:])
        ok = len(kept) < window // 2
        if not ok:
            bound = max(last.mean() + num_sigmas * last.std(), 2 * last.mean())
            assume(abs(norm - bound) > 1e-4 * bound)
            ok = norm <= bound
        kept += [norm] if ok else []
        found.append(bool(ok))
    return found


@example(gains=[1.0, 1.0, 1.9, 10.0], num_sigmas=1.0, window=4, world_size=1)
@given(
    gains=st.lists(st.sampled_from([1.0, 1.1, 0.9, 1.9, 3.0, 10.0]), min_size=1, max_size=20),
    num_sigmas=st.sampled_from([1.0, 6.0]),
    window=st.integers(4, 8),
    world_size=st.integers(1, 2),
)
def test_a_spike_is_far_above_the_norms_before_it(gains, num_sigmas, window, world_size):
    """The gradient of the mean squared error at zero is as large as the input."""
    recipe = af.skip_spikes(num_sigmas, window=window, max_consecutive=100)
    assert outcomes_of(gains, recipe, world_size) == expected_outcomes(gains, num_sigmas, window)


@ours.share(0.34)
@given(batches=strategies.batches(num_batches=6), world_size=st.integers(1, 3))
def test_a_spike_is_as_if_the_batch_were_not_there(batches, world_size):
    inputs, targets = batches[0]
    spike = (inputs, targets + 1e8)
    calm = [batches[index % len(batches)] for index in range(5)]
    sizes = [[len(part) for part in each[0].tensor_split(world_size)] for each in [*calm, spike]]
    _, expected = ours.trained_by_hand(ours.regression_model(), [*calm, calm[0]])
    parts = ours.dealt([*calm, spike, calm[0]], [*sizes, sizes[0]])
    recipe = af.skip_spikes(1e4, window=8)  # random batches have spikes of their own
    for parameters, applied in trained_in_a_world(parts, recipe):
        ours.assert_close(parameters, expected)
        assert applied == [True] * 5 + [False, True]
