"""local_sgd over real processes equals one loop by hand per rank, with their means."""

import json

import pytest

from tests.support import strategies as ours
from tests.support.local_sgd_by_hand import parts, trained_apart_by_hand
from tests.support.processes import from_lists, launch

TRAIN = """
import json

import pytest
import accel_fn as af
from tests.support import strategies as ours
from tests.support.local_sgd_by_hand import parts

state = af.init(device="cpu", timeout_s=60)
model = ours.regression_model(seed=state.rank)
plan = af.Plan(ours.mse, model, ours.adamw(model.parameters()))
recipe = af.compose(af.place(), af.local_sgd(2), af.accumulate(2), af.clip(0.5))
state, step = af.build(state, recipe(plan))
trace = []
for batch in parts(state.world_size)[state.rank]:
    state, report = step(state, batch)
    parameters = {name: value.tolist() for name, value in model.state_dict().items()}
    trace.append([state.rank, float(report.loss), parameters])
say(json.dumps(trace))
"""


@pytest.mark.slow
def test_processes_apart_and_their_means_are_those_by_hand():
    expected = trained_apart_by_hand(parts(2), 2, max_norm=0.5)
    traces = [json.loads(line) for line in launch(TRAIN, num_processes=2).splitlines()]
    assert sorted(trace[0][0] for trace in traces) == [0, 1]
    for trace in traces:
        assert [loss for _, loss, _ in trace] == [loss for _, loss, _ in traces[0]]
        for (_, _, parameters), by_hand in zip(trace, expected[trace[0][0]], strict=True):
            actual = from_lists(parameters)
            ours.assert_close(actual, {name: by_hand[name] for name in actual})
