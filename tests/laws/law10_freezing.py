"""freeze is the loop in which these parameters have no gradient until then."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate, strategies
from tests.laws.law07_scaling import scaled
from tests.support import strategies as ours
from tests.support.late_reads import LateRead, read_late

FROZEN = [
    ("0", ["0.weight", "0.bias"]),
    ("2.bias", ["2.bias"]),
    ("0.weight", ["0.weight"]),
    (["2.bias", "0"], ["0.weight", "0.bias", "2.bias"]),
]
"""Names given to `freeze`, and the parameters that they select."""


def by_hand(batches, names, until, max_norm, skipped=()):
    model = ours.regression_model()
    optimizer = ours.adamw(model.parameters())
    num_updates = 0
    for number, batch in enumerate(batches, start=1):
        if number in skipped:
            continue
        ours.mse(model, batch).backward()
        num_updates += 1
        for name, parameter in model.named_parameters():
            if name in names and num_updates < until:
                parameter.grad = None
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def spoilt(batches, skipped):
    """Make the gradients of some batches non-finite, so that their updates are skipped."""
    return [
        (inputs * (float("inf") if number in skipped else 1.0), targets)
        for number, (inputs, targets) in enumerate(batches, start=1)
    ]


@given(
    batches=strategies.batches(num_batches=4),
    frozen=st.sampled_from(FROZEN),
    until=st.sampled_from([1, 2, 3, None]),
    order=st.permutations([af.clip(0.1), af.accumulate(2), af.wrap_ddp(), scaled(8.0)]),
    place=st.integers(0, 4),
    world_size=st.integers(1, 3),
    skipped=st.sets(st.integers(1, 3), max_size=2),
)
@example(
    batches=[(torch.ones(4, 3).double(), torch.zeros(4, 1).double())] * 3,
    frozen=FROZEN[0],
    until=3,
    order=[af.clip(0.1), scaled(8.0)],
    place=0,
    world_size=1,
    skipped={1},
)
@example(
    batches=[(torch.ones(4, 3).double(), torch.zeros(4, 1).double())] * 3,
    frozen=FROZEN[-1],
    until=None,
    order=[af.clip(0.1)],
    place=1,
    world_size=1,
    skipped=set(),
)
def test_it_is_the_loop_without_these_gradients_in_any_order(
    batches, frozen, until, order, place, world_size, skipped
):
    """A skipped update does not count."""
    names, meant = frozen
    expected = by_hand(batches, meant, until or 99, 0.1, skipped)
    transforms = [*order[:place], af.freeze(names, until=until), *order[place:]]
    parts = ours.dealt_evenly(spoilt(batches, skipped), world_size)
    for _, parameters in ours.trained(ours.regression_model(), parts, af.compose(*transforms)):
        ours.assert_close(parameters, expected)


@pytest.mark.parametrize("listed_first", [True, False])
def test_a_gradient_function_sees_no_such_gradient_wherever_it_is_listed(listed_first):
    seen = []

    def watching(plan):
        def wrap(grad_fn):
            def watched(state, batch):
                state, grads, report = grad_fn(state, batch)
                seen.append([each is None for each in grads.tensors])
                return state, grads, report

            return watched

        return replace(plan, wrap_grad_fn=(*plan.wrap_grad_fn, wrap))

    transforms = [af.freeze("0"), watching]
    plan = ours.plan(optimizer=ours.adamw)
    state, step = af.build(af.DistState(), af.compose(*transforms[:: 1 - 2 * listed_first])(plan))
    step(state, (torch.ones(4, 3).double(), torch.zeros(4, 1).double()))
    assert seen == [[True, True, False, False]]


BATCHES = [
    (torch.full((4, 3), 1.0 + index).double(), torch.zeros(4, 1).double()) for index in range(6)
]


def built(recipe, *, late=False):
    state, step = ours.built(recipe, optimizer=ours.adamw)
    if late:
        read_late(*step.plan.after_update)
    return state, step


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@given(
    until=st.integers(1, 5),
    skipped=st.sets(st.integers(1, 4), max_size=2),
    saved_after=st.none() | st.integers(1, 4),
)
@example(until=3, skipped={2, 3}, saved_after=3)
@example(until=2, skipped=set(), saved_after=2)
def test_it_thaws_at_the_given_update(tmp_path_factory, until, skipped, saved_after, late):
    """The run may stop and resume anywhere, and the host may read the outcome of an update late."""
    first = {"0.weight": until, "2.bias": 4}
    recipe = af.compose(
        af.freeze("0", until=until), af.skip_nonfinite(), af.freeze("2.bias", until=4)
    )
    state, step = built(recipe, late=late)
    folder = tmp_path_factory.mktemp("run")
    made = 0
    for number, batch in enumerate(spoilt(BATCHES, skipped), start=1):
        if number - 1 == saved_after:
            af.save(folder, state, step)
            state, step = built(recipe, late=late)
            state = af.load(folder, state, step)
        parameters = dict(step.plan.model.named_parameters())
        before = {name: parameters[name].detach().clone() for name in first}
        state, report = step(state, batch)
        made += bool(report.applied)
        moved = {name for name in first if not torch.equal(parameters[name], before[name])}
        assert moved == {name for name in first if report.applied and made >= first[name]}


def test_the_host_waits_for_an_accelerator_only_where_the_next_update_may_be_the_first():
    class Counting(LateRead):
        num_waits = 0

        def __call__(self, value):
            self.is_of_this_step = True
            return super().__call__(value)

        def last(self):
            self.num_waits += self.held is not None and self.is_of_this_step
            return super().last()

    state, step = built(af.compose(af.freeze("0", until=5), af.skip_nonfinite()))
    [thawing] = step.plan.after_update
    reads = thawing._updates._delayed = Counting()
    waits = []
    for batch in spoilt([*BATCHES, *BATCHES], {2, 5}):
        reads.is_of_this_step = False
        state, _ = step(state, batch)
        waits.append(reads.num_waits)
    assert waits == [0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 2]


def test_ranks_agree_on_what_is_frozen():
    def run(state):
        plan = ours.plan(optimizer=ours.adamw)
        names = ["0", "2.bias"][state.rank]
        with pytest.raises(RuntimeError, match="build: plan must be the same on every rank"):
            af.build(state, af.compose(af.wrap_ddp(), af.freeze(names))(plan))

    simulate(run, world_size=2)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("0.wieght", "got '0.wieght'; did you mean 0.weight?"),
        ("1", "freeze: names must be of parameters or modules of the model, got '1'"),
        (["0", "2"], r"must leave a parameter to train, got \['0', '2'\]; give until"),
        ([], "names must be names of parameters or modules"),
        ([3], "names must be names of parameters or modules"),
    ],
)
def test_what_names_no_parameter_is_refused(names, text):
    plan = ours.plan(optimizer=ours.adamw)
    with pytest.raises(ValueError, match=text):
        af.freeze(names)(plan)


def test_until_is_the_number_of_an_update():
    with pytest.raises(ValueError, match="freeze: until must be an integer >= 1, got 0"):
        af.freeze("0", until=0)
