"""A run that resumes with more epochs follows the saved schedule or the program's, by choice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as schedulers

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours
from tests.support.longer_runs import (
    LONG,
    SHORT,
    WITH_LENGTH,
    WRAPS,
    ByHand,
    batches_of,
    built,
    falling,
    go_on,
    parameters_of,
)


def sequential_of_function(optimizer, n):
    constant, function = schedulers.ConstantLR(optimizer, 0.5, 2), falling(n)
    parts = [constant, schedulers.LambdaLR(optimizer, function)]
    return schedulers.SequentialLR(optimizer, parts, [2])


def chained_of_function(optimizer, n):
    parts = [
        schedulers.LambdaLR(optimizer, falling(n)),
        schedulers.ExponentialLR(optimizer, 0.5),
    ]
    return schedulers.ChainedScheduler(parts)


WITHOUT_LENGTH = {
    "function": lambda o, n: falling(n),
    "lambda": lambda o, n: schedulers.LambdaLR(o, falling(n)),
    "sequential": sequential_of_function,
    "chained": chained_of_function,
}


def stopped_and_lengthened(folder, make, wrap, k, worlds, batches, stop, choice):
    """Return the rates and parameters of every rank of the second run."""

    def first(state):
        state, step = built(state, make, wrap, k, SHORT)
        state, rates = go_on(state, step, batches[:stop])
        af.save(step, state, folder)
        return rates

    def second(state):
        state, step = built(state, make, wrap, k, LONG)
        state = af.resume(step, state, folder, schedule=choice)
        _, rates = go_on(state, step, batches[stop:])
        return rates, parameters_of(step)

    rates, *_ = simulate(first, world_size=worlds[0])
    return [([*rates, *more], found) for more, found in simulate(second, world_size=worlds[1])]


RUNS = st.fixed_dictionaries(
    {
        "wrap": st.sampled_from(list(WRAPS)),
        "bad": st.sets(st.integers(0, LONG - 2), max_size=4),
        "worlds": st.tuples(st.integers(1, 3), st.integers(1, 3)),
        "k": st.integers(1, 3),
        "stop": st.integers(1, SHORT - 1),
    }
)
CASES = [(name, make, "program") for name, (make, _) in WITH_LENGTH.items()]
CASES += [(name, make, "saved") for name, (make, _) in WITH_LENGTH.items() if name != "one cycle"]
CASES += [(f"{name} without length", make, None) for name, make in WITHOUT_LENGTH.items()]
"""Names of schedules, how they are made, and which one is to be followed."""


def check(folder, case, wrap, bad, worlds, k, stop):
    _, make, choice = case
    batches = batches_of(bad if wrap != "local_sgd" else ())
    expected = ByHand(make)
    expected.train(batches[:stop])
    if choice == "program" or make in WITHOUT_LENGTH.values():
        expected.lengthen()
    expected.train(batches[stop:])
    ends = stopped_and_lengthened(folder, make, wrap, k, worlds, batches, stop, choice)
    for rates, found in ends:
        assert rates == expected.rates
        ours.assert_close(found, expected.model.state_dict())


RATE_OF_0 = pytest.mark.filterwarnings("ignore:schedule. learning rate should be above 0")
"""The saved schedule of a shorter run stays at its end, where some have a rate of 0."""


@RATE_OF_0
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, {case[2]}")
def test_a_longer_program_goes_on_from_the_saved_update_by_the_schedule_that_is_chosen(
    tmp_path, case
):
    check(tmp_path, case, "wrap_ddp", {1, 7}, worlds=(1, 1), k=2, stop=5)


@pytest.mark.parametrize("choice", ["saved", "program"])
def test_a_function_has_no_length_that_could_be_chosen(tmp_path, choice):
    """The update before the stop was skipped."""
    case = "function", WITHOUT_LENGTH["function"], choice
    check(tmp_path, case, "wrap_fsdp", {0}, worlds=(1, 1), k=1, stop=1)


@RATE_OF_0
@ours.share(0.5)
@given(case=st.sampled_from(CASES), run=RUNS)
def test_a_run_that_stops_anywhere_goes_on_in_a_longer_program(tmp_path_factory, case, run):
    check(tmp_path_factory.mktemp("run"), case, **run)
