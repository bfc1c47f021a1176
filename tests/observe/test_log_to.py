"""log_to: what each step computed, in files and functions, once and in order."""

import json
import re
import time

import numpy as np
import pytest
import torch
import torch_optimizer

import accel_fn as af
from accel_fn.testing import assert_equivalent, internals, simulate
from tests.support import strategies as ours
from tests.support.late_reads import read_late

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
    state, step = af.build(plan, state or af.DistState())
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


@pytest.mark.parametrize("order", [1, -1], ids=["first", "last"])
def test_the_learning_rate_is_that_of_the_step_wherever_the_schedule_is_listed(order):
    seen = []
    log = af.log_to(lambda step, line: seen.append(line["learning_rate"]), every=1)
    transforms = [af.schedule(lambda count: 1 / (count + 1)), log]
    train(small_plan(*transforms[::order]), BATCHES[:4])
    assert seen == pytest.approx([0.01 / count for count in (1, 2, 3, 4)], rel=1e-12)


def test_the_step_computes_the_same_bits_with_a_log(tmp_path):
    found = []
    for logs in ([], [af.log_to(tmp_path / "log.csv", every=1)]):
        plan = small_plan(af.schedule(lambda count: 1 / (count + 1)), af.clip(0.1), *logs)
        _, _, reports = train(plan, BATCHES)
        parameters = [each.detach().numpy().tobytes() for each in plan.model.parameters()]
        found.append((parameters, [each.loss.item() for each in reports]))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("world_size", "parts"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)]
)
def test_the_log_is_the_same_for_all_numbers_of_ranks_and_microbatches(world_size, parts, tmp_path):
    def run(state, path, num_parts):
        strategy = [af.wrap_ddp()] if state.world_size > 1 else []
        log = af.log_to(path, every=2)
        model = ours.regression_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        plan = af.compose(*strategy, af.accumulate(num_parts), af.clip(1.0), log)(
            af.Plan(ours.mse, model, optimizer)
        )
        state, step = af.build(plan, state)
        for batch in BATCHES[:6]:
            state, _ = step(state, af.shard_batch(batch, state))

    simulate(lambda state: run(state, tmp_path / "one.jsonl", 1), world_size=1)
    simulate(lambda state: run(state, tmp_path / "other.jsonl", parts), world_size=world_size)
    one, other = (without_times(lines_of(tmp_path / f"{name}.jsonl")) for name in ("one", "other"))
    assert [line.pop("step") for line in one] == [line.pop("step") for line in other] == [2, 4, 6]
    for ours_line, line in zip(one, other, strict=True):
        assert line == pytest.approx(ours_line, rel=1e-12)


def test_plans_that_are_compared_write_to_no_log(tmp_path):
    plan = small_plan(af.log_to(tmp_path / "log.jsonl", every=1))
    assert_equivalent(plan, af.accumulate(2)(plan), batches=BATCHES[:2])
    assert list(tmp_path.iterdir()) == []


def test_terms_metrics_and_items_have_their_names():
    def loss_fn(model, batch):
        inputs, targets = batch
        rows = (model(inputs) - targets) ** 2
        return {"near": rows[:2].mean(), "far": rows[2:].mean()}, {"largest": (rows.max(), 1)}

    weight_fn = {"near": lambda batch: 2, "far": lambda batch: len(batch[0]) - 2}
    seen = []
    log = af.log_to(lambda step, line: seen.append(line), every=1)
    _, _, [report] = train(small_plan(log, loss_fn=loss_fn, weight_fn=weight_fn), BATCHES[:1])
    [line] = seen
    assert line["loss/near"] + line["loss/far"] == pytest.approx(line["loss"], rel=1e-12)
    assert line["largest"] == report.metrics["largest"].item()
    rates = line["items_per_second/near"], line["items_per_second/far"], line["samples_per_second"]
    assert rates == pytest.approx((rates[0], rates[0], 2 * rates[0]), rel=1e-12)


def test_learning_rates_are_named_by_optimizer_and_group():
    first, _, last = model = ours.regression_model()
    groups = [{"params": [last.weight], "lr": 0.2}, {"params": [last.bias], "lr": 0.3}]
    optimizers = {
        "body": torch.optim.SGD(first.parameters(), lr=0.1),
        "head": torch.optim.SGD(groups, lr=0.1),
    }
    seen = []
    log = af.log_to(lambda step, line: seen.append(line), every=1)
    train(log(af.Plan(ours.mse, model, optimizers)), BATCHES[:1])
    rates = {name: value for name, value in seen[0].items() if name.startswith("learning_rate")}
    assert rates == {
        "learning_rate/body": 0.1,
        "learning_rate/head/0": 0.2,
        "learning_rate/head/1": 0.3,
    }


def test_an_optimizer_without_a_rate_of_its_own_logs_none():
    seen = []
    model = ours.regression_model()
    optimizer = torch_optimizer.A2GradInc(model.parameters())
    plan = af.Plan(ours.mse, model, optimizer)
    train(af.log_to(lambda *line: seen.append(line), every=1)(plan), BATCHES[:1])
    assert optimizer.param_groups[0]["lr"] is None
    assert "loss" in seen[0][1]
    assert "learning_rate" not in seen[0][1]


def test_skipped_updates_are_counted_since_the_line_before():
    bad = (torch.full((4, 3), torch.inf).double(), torch.zeros(4, 1).double())
    good = BATCHES[0]
    seen = []
    log = af.log_to(lambda step, line: seen.append(line["skipped_updates"]), every=3)
    train(small_plan(af.skip_nonfinite(), log), [good, bad, bad, bad, good, good, good, good, good])
    assert seen == [2, 1, 0]


def test_the_loss_scale_is_logged():
    seen = []
    log = af.log_to(lambda step, line: seen.append(line), every=1)
    state = af.DistState(scaler=af.extend.LossScale.start(8.0))
    train(small_plan(log), BATCHES[:1], state)
    assert (seen[0]["loss_scale"], seen[0]["skipped_updates"]) == (8.0, 0.0)


@pytest.mark.parametrize("pause", [False, True], ids=["waiting", "evaluating"])
def test_the_share_of_waiting_is_that_between_steps_less_evaluations(pause):
    seen = []
    log = af.log_to(lambda step, line: seen.append(line["data_wait"]), every=2)
    state, step = af.build(small_plan(log), af.DistState())
    for batch in BATCHES[:4]:
        if pause:
            slow = [batch, *([batch] * 200)]
            af.evaluate(step, state, slow)
        else:
            time.sleep(0.1)
        state, _ = step(state, batch)
    assert seen[1] < 0.3 if pause else seen[1] > 0.7


def test_time_in_grads_is_no_waiting():
    def loss_fn(model, batch):
        time.sleep(0.05)
        return ours.mse(model, batch)

    seen = []
    log = af.log_to(lambda step, line: seen.append(line), every=2)
    plan = small_plan(log, loss_fn=loss_fn, weight_fn=lambda batch: 3)
    state, step = af.build(plan, af.DistState())
    for batch in BATCHES[:4]:
        state, grads, report = step.grads(state, batch)
        state, _ = step.update(state, grads, report)
    assert seen[1]["data_wait"] < 0.3
    assert seen[1]["items_per_second"] <= 3 / 0.05
    ratio = seen[1]["samples_per_second"] / seen[1]["items_per_second"]
    assert ratio == pytest.approx(4 / 3, rel=1e-12)


def late(plan):
    """Build a plan whose log reads one step late, as from an accelerator."""
    state, step = af.build(plan, af.DistState())
    for each in internals.recorders(step):
        read_late(each)
    return state, step


READERS = {
    "the next step": lambda state, step, folder: step(state, BATCHES[2]),
    "save": lambda state, step, folder: af.save(step, state, folder / "checkpoints"),
    "evaluate": lambda state, step, folder: af.evaluate(step, state, BATCHES[:1]),
    "predict": lambda state, step, folder: af.predict(
        step, state, BATCHES[:1], lambda model, batch: model(batch[0])
    ),
    "log_values": lambda state, step, folder: af.log_values(step, state, {"mine": 1}),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_line_of_an_accelerator_is_read_by(reader, tmp_path):
    path = tmp_path / "log.jsonl"
    state, step = late(small_plan(af.log_to(path, every=2)))
    reports = []
    for batch in BATCHES[:2]:
        state, report = step(state, batch)
        reports.append(report)
    assert lines_of(path) == []
    READERS[reader](state, step, tmp_path)
    [line] = lines_of(path)
    assert (line["step"], line["loss"]) == (2, reports[1].loss.item())


def test_values_of_ones_own_stand_in_the_line_of_their_step(tmp_path):
    path = tmp_path / "log.jsonl"
    state, step, _ = train(small_plan(af.log_to(path, every=2, prefix="a/")), BATCHES[:2])
    found = af.evaluate(step, state, BATCHES)
    af.log_values(step, state, found, prefix="validation/")
    state, _ = step(state, BATCHES[2])
    af.log_values(step, state, {"one": torch.ones(1), "two": np.float32(2)})
    first, second = lines_of(path)
    assert (first["step"], first["a/validation/loss"]) == (2, found["loss"])
    assert "a/loss" in first
    time_of_second = second.pop("time")
    assert second == {"step": 3, "a/one": 1.0, "a/two": 2.0}
    assert time_of_second > first["time"]


BAD_VALUES = {
    "text": ({"loss": "low"}, r"be numbers by name, got \{'loss': 'low'\}"),
    "two numbers": ({"loss": torch.ones(2)}, r"be numbers by name, got \{'loss': tensor"),
    "complex": ({"loss": 1j}, r"be numbers by name, got \{'loss': 1j\}"),
    "a name": ({1: 1.0}, r"be numbers by name, got \{1: 1.0\}"),
    "no mapping": ([1.0], r"be numbers by name, got \[1.0\]"),
    "of evaluate": (
        {"loss": 1.0},
        r"have printable names of one line, other than those of the step's own values, got \['loss'\]; "
        'give a prefix, such as prefix="validation/"',
    ),
    "step": (
        {"step": 1.0},
        r"have printable names of one line, other than .*, got \['step'\]",
    ),
    "lines": (
        {"a\nb": 1.0},
        r"have printable names of one line, other than .*, got \['a\\nb'\]",
    ),
}


@pytest.mark.parametrize("values", BAD_VALUES)
def test_a_value_that_is_no_number_is_refused_on_every_rank(values):
    given, words = BAD_VALUES[values]

    def run(state):
        plan = af.compose(af.wrap_ddp(), af.log_to(print))(small_plan())
        state, step = af.build(plan, state)
        with pytest.raises(ValueError, match=f"log_values: values must {words}"):
            af.log_values(step, state, given)

    simulate(run, world_size=2)


def test_values_of_an_earlier_step_are_refused_on_every_rank():
    def run(state):
        plan = af.compose(af.wrap_ddp(), af.log_to(print))(small_plan())
        early, step = af.build(plan, state)
        step(early, af.shard_batch(BATCHES[0], early))
        words = "log_values: state must be of the newest step, got step 0 after step 1"
        with pytest.raises(ValueError, match=words):
            af.log_values(step, early, {"mine": 1})

    simulate(run, world_size=2)


def test_values_need_a_log():
    state, step, _ = train(small_plan(), [])
    words = "log_values: step must have a log, got none; add log_to to its plan"
    with pytest.raises(ValueError, match=words):
        af.log_values(step, state, {"mine": 1})


BAD_ARGUMENTS = {
    "none": ((), {}, "writers must be at least one, got none"),
    "kind": ((3,), {}, r"writers must be a path that ends in .jsonl or .csv, .*, got 3"),
    "text": (
        ("log.txt",),
        {},
        r"writers must be paths that end in .jsonl or .csv, and not in .events.jsonl, got 'log.txt'",
    ),
    "events": (("log.events.jsonl",), {}, r".* and not in .events.jsonl, got 'log.events.jsonl'"),
    "every": ((print,), {"every": 0}, "every must be an integer >= 1, got 0"),
    "prefix": ((print,), {"prefix": None}, "prefix must be text of one line, got None"),
}


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS)
def test_a_wrong_argument_is_refused_when_it_is_given(arguments):
    writers, options, words = BAD_ARGUMENTS[arguments]
    with pytest.raises(ValueError, match=f"log_to: {words}"):
        af.log_to(*writers, **options)


def test_without_a_writer_there_is_no_log_and_values_are_checked_alone():
    def run(state):
        plan = af.compose(af.wrap_ddp(), af.log_to(None, None))(small_plan())
        state, step = af.build(plan, state)
        for batch in BATCHES:
            state, report = step(state, af.shard_batch(batch, state))
        af.log_values(step, state, {"mine": 1})
        with pytest.raises(ValueError, match="log_values: values must be numbers by name"):
            af.log_values(step, state, {"mine": "text"})
        return float(report.loss)

    _, _, reports = train(small_plan(), BATCHES)
    losses = simulate(run, world_size=2)
    assert losses == [pytest.approx(float(reports[-1].loss))] * 2


def test_a_writer_may_be_missing_on_the_other_ranks_alone():
    def run(state, *, is_there):
        writer = (lambda step, values: None) if state.is_main is is_there else None
        plan = af.compose(af.wrap_ddp(), af.log_to(writer))(small_plan())
        return af.build(plan, state)[0].step

    assert simulate(lambda state: run(state, is_there=True), world_size=2) == [0, 0]
    words = r"log_to: writers must be a path .*, or a function \(step, values\), got None"
    with pytest.raises(Exception, match=words):
        simulate(lambda state: run(state, is_there=False), world_size=2)


@pytest.mark.parametrize("name", ["time", "learning_rate", "peak_memory", "top\r5"])
def test_metrics_must_have_other_names_than_the_columns_of_a_log(name):
    def loss_fn(model, batch):
        return ours.mse(model, batch), {name: 1.0}

    words = (
        "log_to: metrics must have printable names of one line, other than those of the step's own values, "
        f"got {[name]}; rename them"
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        train(small_plan(af.log_to(print), loss_fn=loss_fn), BATCHES[:1])


def test_the_names_that_metrics_must_not_have_are_those_of_a_line():
    lines = []
    log = af.log_to(lambda step, values: lines.append(values), every=1)
    recipe = af.compose(log, af.with_amp("fp16"), af.clip(1.0))
    train(recipe(small_plan(weight_fn=lambda batch: 3)), BATCHES[:1])
    assert {"step", "time", *lines[0]} == internals.LOGGED_NAMES


@pytest.mark.parametrize("adds", [True, False], ids=["added", "removed"])
def test_a_checkpoint_loads_into_a_program_with_another_observer(adds, tmp_path):
    def plan(is_there):
        between = [af.log_to(lambda step, values: None)] if is_there else []
        schedule = af.schedule(lambda count: 1 / (count + 1))
        return small_plan(af.ema(0.9), *between, schedule)

    state, step, _ = train(plan(not adds), BATCHES[:3])
    af.save(step, state, tmp_path)
    other_state, other = af.build(plan(adds), af.DistState())
    other_state = af.load(other, other_state, tmp_path)
    for batch in BATCHES[3:5]:
        state, _ = step(state, batch)
        other_state, _ = other(other_state, batch)
    states = [
        [each.state_dict() for each in built.plan.after_update if hasattr(each, "state_dict")]
        for built in (step, other)
    ]
    assert repr(states[0]) == repr(states[1])
    for one, two in zip(step.plan.trained(), other.plan.trained(), strict=True):
        assert torch.equal(one, two)


def test_it_prints_as_the_call_and_explain_shows_where_it_writes():
    plan = small_plan(af.log_to("runs/a/log.jsonl", print, every=5, prefix="a/"))
    assert "observers=[log_to(every=5, prefix='a/')]" in repr(plan)
    text = af.explain(plan, af.DistState())
    assert "log_to(every=5, prefix='a/'), to runs/a/log.jsonl and print" in text
