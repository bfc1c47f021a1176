"""skip_nonfinite and skip_spikes: when a run ends, resumed runs, and what is refused."""

import copy

import pytest
import torch

import accel_fn as af
from accel_fn.testing import simulate
from tests.laws.law07_skipping import linear_model, linear_run, tiny_sgd, trained_in_a_world
from tests.support import strategies as ours


def test_a_spike_on_one_rank_is_left_out_on_all():
    generator = torch.Generator().manual_seed(0)
    calm = [(torch.randn(6, 3, generator=generator).double(), torch.ones(6, 1).double())] * 6
    parts = ours.dealt_evenly([*calm[:4], calm[4], *calm[4:]], 2)
    inputs, targets = parts[0][4]
    parts[0][4] = inputs, targets * 1e4
    _, expected = ours.trained_by_hand(ours.regression_model(), calm)
    for parameters, applied in trained_in_a_world(
        parts, af.skip_spikes(window=4), wrap=af.wrap_fsdp()
    ):
        ours.assert_close(parameters, expected)
        assert applied == [True] * 4 + [False] + [True] * 2


BAD = {"nonfinite": (af.skip_nonfinite(), float("nan")), "spike": (af.skip_spikes(window=4), 1e4)}


@pytest.mark.parametrize(("kind", "row"), [("nonfinite", 3), ("spike", 1)])
def test_a_gradient_that_is_bad_in_the_shard_of_one_rank_is_left_out_by_all(kind, row):
    """The targets of one output reach one row of the weight, which one rank holds."""
    recipe, bad = BAD[kind]
    calm = [(torch.eye(4).double(), torch.ones(4, 4).double())] * 6
    targets = calm[4][1].clone()
    targets[:, row] = bad
    spoilt = [*calm[:4], (calm[4][0], targets), *calm[4:]]

    layer = torch.nn.Linear(4, 4).double()
    _, expected = ours.trained_by_hand(copy.deepcopy(layer), calm)
    parts = ours.dealt_evenly(spoilt, 2)
    for parameters, applied in trained_in_a_world(
        parts, recipe, wrap=af.wrap_fsdp(), make_model=lambda: copy.deepcopy(layer)
    ):
        ours.assert_close(parameters, expected)
        assert applied == [True] * 4 + [False] + [True] * 2


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
def test_too_many_in_a_row_end_the_run_on_every_rank(recipe, bad, rule):
    """Pairs of skipped updates before that are no error."""
    gains = [1.0, 1.0, bad, bad, 1.0, 1.0, bad, bad, bad]

    def run(state):
        parts = ours.dealt(linear_run(gains), [[1, 1]] * len(gains))
        model = linear_model()
        plan = af.Plan(ours.mse, model, tiny_sgd([model.weight]))
        state, step = af.build(af.compose(af.wrap_ddp(), recipe)(plan), state)
        for part in parts[state.rank][:-1]:
            state, _ = step(state, part)
        with pytest.raises(ArithmeticError, match=f"step: the gradient norm must {rule}"):
            step(state, parts[state.rank][-1])
        return state.step

    assert simulate(run, world_size=2) == [8] * 2


@pytest.mark.parametrize("empty", [{0, 1}, {3, 4, 5, 6}], ids=["first", "window"])
def test_a_batch_without_weight_is_no_norm_to_look_back_on(empty):
    """Norms of 0 would make a spike of any other norm."""
    model = linear_model()
    plan = af.Plan(ours.mse, model, tiny_sgd(model.parameters()), lambda batch: batch[1].sum())
    recipe = af.skip_spikes(window=4, max_consecutive=3)
    state, step = af.build(recipe(plan), af.DistState())
    for index, (inputs, targets) in enumerate(linear_run([1.0] * 10)):
        state, report = step(state, (inputs, targets * (index not in empty)))
        assert report.applied


@pytest.mark.parametrize("saved_after", [2, 3, 5])
def test_a_resumed_run_knows_what_it_has_seen(saved_after, tmp_path):
    """It knows the norms of the window, and the number of skipped updates in a row."""
    recipe = af.compose(af.skip_spikes(window=4, max_consecutive=3), af.skip_nonfinite(3))
    nan = float("nan")
    batches = linear_run([1.0, 1.2, 5.0, 1.0, nan, nan, nan])

    def built():
        model = linear_model()
        plan = recipe(af.Plan(ours.mse, model, tiny_sgd([model.weight])))
        return af.build(plan, af.DistState())

    state, step = built()
    for batch in batches[:saved_after]:
        state, _ = step(state, batch)
    af.save(step, state, tmp_path)
    state, step = built()
    state = af.load(step, state, tmp_path)
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
