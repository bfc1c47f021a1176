"""freeze is the loop in which these parameters have no gradient until then."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import strategies
from tests.laws.law07_scaling import scaled
from tests.support import strategies as ours
from tests.support.late_reads import read_late

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


@ours.share(0.5)
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


BATCHES = [
    (torch.full((4, 3), 1.0 + index).double(), torch.zeros(4, 1).double()) for index in range(6)
]


def built(recipe, *, late=False):
    state, step = ours.built(recipe, optimizer=ours.adamw)
    if late:
        read_late(*step.plan.after_update)
    return state, step


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@ours.share(0.5)
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
            af.save(step, state, folder)
            state, step = built(recipe, late=late)
            state = af.load(step, state, folder)
        parameters = dict(step.plan.model.named_parameters())
        before = {name: parameters[name].detach().clone() for name in first}
        state, report = step(state, batch)
        made += bool(report.applied)
        moved = {name for name in first if not torch.equal(parameters[name], before[name])}
        assert moved == {name for name in first if report.applied and made >= first[name]}
