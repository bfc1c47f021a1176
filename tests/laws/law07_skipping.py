"""Skipped updates: the result is the run over the other batches, on all ranks alike."""

import copy

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate, strategies
from tests.laws.law07_scaling import OPTIMIZERS, scaled
from tests.support import strategies as ours
from tests.support.cases import pinned
from tests.support.late_reads import read_late


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
        state, step = af.build(state, af.compose(wrap, recipe)(plan))
        applied = []
        for part in parts[state.rank]:
            state, report = step(state, part)
            applied.append(bool(report.applied))
        return ours.whole(model.state_dict()), applied

    return simulate(run, world_size=len(parts))


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
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
        state, step = af.build(state, af.compose(af.wrap_ddp(), recipe)(plan))
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


@pytest.mark.parametrize("wrap", [af.wrap_ddp(), af.wrap_fsdp()], ids=["ddp", "fsdp"])
@pytest.mark.parametrize(("world_size", "culprit"), [(2, 0), (2, 1), (3, 1)])
def test_a_spike_on_one_rank_is_left_out_on_all(wrap, world_size, culprit):
    generator = torch.Generator().manual_seed(0)
    calm = [(torch.randn(6, 3, generator=generator).double(), torch.ones(6, 1).double())] * 6
    parts = ours.dealt_evenly([*calm[:4], calm[4], *calm[4:]], world_size)
    inputs, targets = parts[culprit][4]
    parts[culprit][4] = inputs, targets * 1e4
    _, expected = ours.trained_by_hand(ours.regression_model(), calm)
    for parameters, applied in trained_in_a_world(parts, af.skip_spikes(window=4), wrap=wrap):
        ours.assert_close(parameters, expected)
        assert applied == [True] * 4 + [False] + [True] * 2


BAD = {"nonfinite": (af.skip_nonfinite(), float("nan")), "spike": (af.skip_spikes(window=4), 1e4)}


@pytest.mark.parametrize(
    ("kind", "row", "world_size"),
    pinned(
        [("nonfinite", 0, 2), ("nonfinite", 3, 2), ("spike", 1, 2), ("spike", 2, 2)],
        BAD,
        range(4),
        [2, 4],
    ),
)
def test_a_gradient_that_is_bad_in_the_shard_of_one_rank_is_left_out_by_all(kind, row, world_size):
    """The targets of one output reach one row of the weight, which one rank holds."""
    recipe, bad = BAD[kind]
    calm = [(torch.eye(4).double(), torch.ones(4, 4).double())] * 6
    targets = calm[4][1].clone()
    targets[:, row] = bad
    spoilt = [*calm[:4], (calm[4][0], targets), *calm[4:]]

    layer = torch.nn.Linear(4, 4).double()
    _, expected = ours.trained_by_hand(copy.deepcopy(layer), calm)
    parts = ours.dealt_evenly(spoilt, world_size)
    for parameters, applied in trained_in_a_world(
        parts, recipe, wrap=af.wrap_fsdp(), make_model=lambda: copy.deepcopy(layer)
    ):
        ours.assert_close(parameters, expected)
        assert applied == [True] * 4 + [False] + [True] * 2


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("autocast", [af.compose(), af.with_amp("bf16")], ids=["float32", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(
    ("recipe", "bad"),
    [(af.skip_nonfinite(), float("nan")), (af.skip_spikes(window=4), 1e6)],
    ids=["nonfinite", "spike"],
)
def test_in_single_and_half_precision_it_is_the_run_without_the_batch_to_the_bit(
    recipe, bad, optimizer, autocast, world_size
):
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(6, 3, generator=generator), torch.ones(6, 1)) for _ in range(6)]
    spoilt = [*batches[:4], (batches[4][0], batches[4][1] * bad), *batches[4:]]
    model = ours.regression_model().float()
    recipe = af.compose(af.wrap_ddp(), af.clip(0.5), autocast, recipe)
    expected, found = (
        ours.trained(model, ours.dealt_evenly(each, world_size), recipe, optimizer=optimizer)
        for each in (batches, spoilt)
    )
    for (losses, parameters), (expected_losses, wanted) in zip(found, expected, strict=True):
        ours.assert_identical(parameters, wanted)
        assert [*losses[:4], *losses[5:]] == expected_losses


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("recipe", "bad", "rule"),
    [
        (af.skip_nonfinite(3), float("nan"), "be finite once in 3 updates, got nan at step 9"),
        (
            af.skip_spikes(window=4, max_consecutive=3),
            1e3,
            "be in line with those before it once in 3 updates, got 1000 at step 9",
        ),
    ],
    ids=["nonfinite", "spikes"],
)
def test_too_many_in_a_row_end_the_run_on_every_rank(recipe, bad, rule, world_size):
    """Pairs of skipped updates before that are no error."""
    gains = [1.0, 1.0, bad, bad, 1.0, 1.0, bad, bad, bad]

    def run(state):
        parts = ours.dealt(linear_run(gains), [[2 // world_size] * world_size] * len(gains))
        model = linear_model()
        plan = af.Plan(ours.mse, model, tiny_sgd([model.weight]))
        state, step = af.build(state, af.compose(af.wrap_ddp(), recipe)(plan))
        for part in parts[state.rank][:-1]:
            state, _ = step(state, part)
        with pytest.raises(ArithmeticError, match=f"step: the gradient norm must {rule}"):
            step(state, parts[state.rank][-1])
        return state.step

    assert simulate(run, world_size=world_size) == [8] * world_size


@pytest.mark.parametrize("after", [float("nan"), 1.0])
def test_a_result_that_is_read_late_ends_the_run_a_step_later_with_its_own_norm(after):
    """The norm of that step does not matter."""
    model = linear_model()
    plan = af.skip_nonfinite(2)(af.Plan(ours.mse, model, tiny_sgd([model.weight])))
    state, step = af.build(af.DistState(), plan)
    read_late(*step.plan.accept)
    *first, last = linear_run([1.0, float("nan"), float("inf"), after])
    for batch in first:
        state, _ = step(state, batch)
    with pytest.raises(ArithmeticError, match="got nan at step 3, and so for 2 in a row"):
        step(state, last)


def test_a_result_that_is_read_late_does_not_end_the_run_that_is_gone_back_to(tmp_path):
    model = linear_model()
    plan = af.skip_nonfinite(2)(af.Plan(ours.mse, model, tiny_sgd([model.weight])))
    state, step = af.build(af.DistState(), plan)
    read_late(*step.plan.accept)
    good, *bad = linear_run([1.0, float("nan"), float("nan")])
    af.save(tmp_path, state, step)
    for batch in bad:
        state, _ = step(state, batch)
    state = af.load(tmp_path, state, step)
    _, report = step(state, good)
    assert report.applied


@pytest.mark.parametrize("empty", [{0, 1}, {3, 4, 5, 6}], ids=["first", "window"])
def test_a_batch_without_weight_is_no_norm_to_look_back_on(empty):
    """Norms of 0 would make a spike of any other norm."""
    model = linear_model()
    plan = af.Plan(ours.mse, model, tiny_sgd(model.parameters()), lambda batch: batch[1].sum())
    recipe = af.skip_spikes(window=4, max_consecutive=3)
    state, step = af.build(af.DistState(), recipe(plan))
    for index, (inputs, targets) in enumerate(linear_run([1.0] * 10)):
        state, report = step(state, (inputs, targets * (index not in empty)))
        assert report.applied


def test_a_spike_leaves_the_loss_scale_alone():
    recipe = af.compose(scaled(1024.0), af.skip_spikes(window=4))
    model = linear_model()
    plan = recipe(af.Plan(ours.mse, model, tiny_sgd([model.weight])))
    state, step = af.build(af.DistState(), plan)
    for batch in linear_run([1.0, 1.0, 1.0, 1e3]):
        state, report = step(state, batch)
    assert (bool(report.applied), float(state.scaler.scale)) == (False, 1024.0)


def test_two_steps_of_one_plan_count_for_themselves():
    model = linear_model()
    plan = af.skip_nonfinite(2)(af.Plan(ours.mse, model, tiny_sgd([model.weight])))
    bad = linear_run([float("nan")])[0]
    for _ in range(2):
        state, step = af.build(af.DistState(), plan)
        step(state, bad)


@pytest.mark.parametrize("saved_after", range(1, 7))
def test_a_resumed_run_knows_what_it_has_seen(saved_after, tmp_path):
    """It knows the norms of the window, and the number of skipped updates in a row."""
    recipe = af.compose(af.skip_spikes(window=4, max_consecutive=3), af.skip_nonfinite(3))
    nan = float("nan")
    batches = linear_run([1.0, 1.2, 5.0, 1.0, nan, nan, nan])

    def built():
        model = linear_model()
        plan = recipe(af.Plan(ours.mse, model, tiny_sgd([model.weight])))
        return af.build(af.DistState(), plan)

    state, step = built()
    for batch in batches[:saved_after]:
        state, _ = step(state, batch)
    af.save(tmp_path, state, step)
    state, step = built()
    state = af.load(tmp_path, state, step)
    outcomes = [True, True, False, True, False, False][saved_after:]
    for batch, expected in zip(batches[saved_after:-1], outcomes, strict=True):
        state, report = step(state, batch)
        assert bool(report.applied) == expected
    with pytest.raises(ArithmeticError, match="got nan at step 7"):
        step(state, batches[-1])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: af.skip_nonfinite(0), "skip_nonfinite: max_consecutive must be an integer >= 1"),
        (lambda: af.skip_spikes(0.0), "skip_spikes: num_sigmas must be a finite number > 0"),
        (lambda: af.skip_spikes(window=3), "skip_spikes: window must be an integer >= 4, got 3"),
        (lambda: af.skip_spikes(max_consecutive=True), "max_consecutive must be an integer >= 1"),
    ],
)
def test_what_makes_no_rule_is_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()
