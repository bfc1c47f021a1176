"""skip_nonfinite and skip_spikes where norms are on the device, and the host reads counts a step late."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing.internals import apply_update
from tests.laws.law07_skipping import linear_model, linear_run, tiny_sgd
from tests.sim.device import recorded
from tests.sim.programs import waits_in
from tests.support import strategies as ours

NAN = float("nan")


def built(recipe, device="sim"):
    model = linear_model()
    plan = af.Plan(ours.mse, model, tiny_sgd([model.weight]))
    return af.build(af.compose(af.place(), recipe)(plan), af.init(device=device))


@pytest.mark.parametrize("after", [NAN, 1.0])
def test_a_result_that_is_read_late_ends_the_run_a_step_later_with_its_own_norm(after):
    """The norm of that step does not matter."""
    state, step = built(af.skip_nonfinite(2))
    *first, last = linear_run([1.0, NAN, float("inf"), after])
    for batch in first:
        state, _ = step(state, batch)
    with pytest.raises(ArithmeticError, match="got nan at step 3, and so for 2 in a row"):
        step(state, last)


def test_a_result_that_is_read_late_does_not_end_the_run_that_is_gone_back_to(tmp_path):
    state, step = built(af.skip_nonfinite(2))
    good, *bad = linear_run([1.0, NAN, NAN])
    af.save(step, state, tmp_path)
    for batch in bad:
        state, _ = step(state, batch)
    state = af.load(step, state, tmp_path)
    _, report = step(state, good)
    assert report.applied


@given(
    gains=st.lists(
        st.one_of(st.floats(0, 3, width=32), st.sampled_from([0.0, 1.0, 40.0, 1e30, NAN])),
        min_size=1,
        max_size=14,
    ),
    num_sigmas=st.sampled_from([0.5, 2.0, 6.0]),
)
@example(gains=[1.0] * 5 + [2.5, 1.0, 40.0, 1.0], num_sigmas=2.0)
def test_the_device_and_the_host_skip_the_same_updates(gains, num_sigmas):
    """On the host, norms are judged as numbers; on the device, by operations on a window of them."""
    recipe = af.skip_spikes(num_sigmas, window=4, max_consecutive=100)

    def applied(device):
        state, step = built(recipe, device)
        found = []
        for batch in linear_run(gains):
            state, report = step(state, batch)
            found.append(bool(report.applied))
        return found

    assert applied("sim") == applied("cpu")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"fused": True}, [0, 0, 0]),
        ({"fused": True, "momentum": 0.9}, [1, 0, 0]),
        ({"fused": False, "momentum": 0.9}, [1, 1, 1]),
    ],
    ids=["fused", "fused with momentum", "not fused"],
)
def test_the_host_waits_for_a_verdict_where_no_kernel_can_take_it(options, expected):
    """A momentum that is not there yet would be left unset by a kernel that skips."""
    early, never = trained = [torch.nn.Parameter(torch.ones(4, device="sim")) for _ in range(2)]
    optimizer = torch.optim.SGD(trained, lr=0.1, **options)
    found = []
    for finite in (True, True, False):
        gradient = torch.full((4,), 1.0 if finite else torch.inf, device="sim")
        ok = torch.tensor(finite).to("sim")
        with recorded() as seen:
            apply_update(optimizer, trained, af.Grads((gradient, None)), ok)
        found.append(sum(waits_in(seen, since=0).values()))
    assert found == expected
    assert torch.isfinite(early.cpu()).all()
    assert torch.equal(never.cpu(), torch.ones(4))
