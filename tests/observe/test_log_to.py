"""log_to: what each step computed, in files and functions, once and in order."""

import json

import pytest
import torch

import accel_fn as af
from tests.support import strategies as ours

BATCHES = [
    (torch.full((4, 3), float(n)).double(), torch.zeros(4, 1).double()) for n in range(1, 13)
]
TIMES = ("time", "samples_per_second", "items_per_second", "data_wait", "peak_memory")


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def events_of(path):
    return [each["event"] for each in lines_of(path)]


def without_times(lines):
    return [{name: line[name] for name in line if name not in TIMES} for line in lines]


def small_plan(*transforms, loss_fn=ours.mse, **plan):
    model = ours.regression_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return af.compose(*transforms)(af.Plan(loss_fn, model, optimizer, **plan))


def train(plan, batches, state=None):
    """Train on one rank; return state, step and reports."""
    state, step = af.build(state or af.DistState(), plan)
    reports = []
    for batch in batches:
        state, report = step(state, batch)
        reports.append(report)
    return state, step, reports


def test_a_line_has_what_the_reports_of_every_so_many_steps_have(tmp_path):
    path = tmp_path / "run" / "log.jsonl"
    _, _, reports = train(small_plan(af.clip(1.0), af.log_to(path, every=3)), BATCHES[:7])
    lines = lines_of(path)
    assert [line["step"] for line in lines] == [3, 6]
    for line in lines:
        report = reports[line["step"] - 1]
        assert line["loss"] == report.loss.item()
        assert line["grad_norm"] == report.grad_norm.item()
        assert line["learning_rate"] == 0.01
        assert 0 <= line["data_wait"] <= 1
        assert line["samples_per_second"] > 0
        assert line["peak_memory"] > 1e6
    assert lines[0]["time"] < lines[1]["time"]


def test_a_function_is_called_with_plain_floats():
    seen = []
    train(small_plan(af.log_to(lambda *line: seen.append(line), every=2)), BATCHES[:4])
    assert [step for step, _ in seen] == [2, 4]
    assert {type(value) for _, values in seen for value in values.values()} == {float}


@pytest.mark.parametrize("order", [1, -1], ids=["first", "last"])
def test_the_learning_rate_is_that_of_the_step_wherever_the_schedule_is_listed(order):
    seen = []
    log = af.log_to(lambda step, line: seen.append(line["learning_rate"]), every=1)
    transforms = [af.schedule(lambda count: 1 / (count + 1)), log]
    train(small_plan(*transforms[::order]), BATCHES[:4])
    assert seen == pytest.approx([0.01 / count for count in (1, 2, 3, 4)], rel=1e-12)
