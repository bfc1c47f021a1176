"""A run that resumes with more epochs follows the saved schedule or the program's, by choice."""

import pytest
import transformers
from hypothesis import example, given
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
    "transformers": lambda o, n: transformers.get_scheduler("cosine", o, 2, n),
    "sequential": sequential_of_function,
    "chained": chained_of_function,
}


def stopped_and_lengthened(folder, make, wrap, k, worlds, batches, stop, choice):
    """Return the rates and parameters of every rank of the second run."""

    def first(state):
        state, step = built(state, make, wrap, k, SHORT)
        state, rates = go_on(state, step, batches[:stop])
        af.save(folder, state, step)
        return rates

    def second(state):
        state, step = built(state, make, wrap, k, LONG)
        state = af.resume(folder, state, step, schedule=choice)
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


BEFORE_THE_FIRST_UPDATE = {"wrap": "wrap_ddp", "bad": {0}, "worlds": (1, 1), "k": 1, "stop": 1}


def assert_is_the_run_by_hand(folder, make, choice, *, follows_program, wrap, bad, worlds, k, stop):
    batches = batches_of(bad if wrap != "local_sgd" else ())
    expected = ByHand(make)
    expected.train(batches[:stop])
    if follows_program:
        expected.lengthen()
    expected.train(batches[stop:])
    ends = stopped_and_lengthened(folder, make, wrap, k, worlds, batches, stop, choice)
    for rates, found in ends:
        assert rates == expected.rates
        ours.assert_close(found, expected.model.state_dict())


@pytest.mark.parametrize("make", [make for make, _ in WITH_LENGTH.values()], ids=WITH_LENGTH)
@ours.share(0.3)
@given(run=RUNS)
def test_the_schedule_of_a_longer_program_goes_on_from_the_saved_update(
    tmp_path_factory, make, run
):
    folder = tmp_path_factory.mktemp("run")
    assert_is_the_run_by_hand(folder, make, "program", follows_program=True, **run)


@pytest.mark.parametrize("make", WITHOUT_LENGTH.values(), ids=WITHOUT_LENGTH)
@ours.share(0.3)
@given(choice=st.sampled_from([None, "saved", "program"]), run=RUNS)
@example(choice="saved", run=BEFORE_THE_FIRST_UPDATE)
def test_a_function_of_a_longer_program_gives_the_rate_of_the_next_update(
    tmp_path_factory, make, choice, run
):
    folder = tmp_path_factory.mktemp("run")
    assert_is_the_run_by_hand(folder, make, choice, follows_program=True, **run)


@pytest.mark.parametrize(
    "make",
    [m for name, (m, _) in WITH_LENGTH.items() if name != "one cycle"],
    ids=list(WITH_LENGTH)[1:],
)
@ours.share(0.2)
@given(run=RUNS)
def test_the_saved_schedule_goes_on_in_a_longer_program(tmp_path_factory, make, run):
    folder = tmp_path_factory.mktemp("run")
    assert_is_the_run_by_hand(folder, make, "saved", follows_program=False, **run)
