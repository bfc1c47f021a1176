"""Files of a log: one line a step over crashes and resumes, and clear errors where they cannot be written."""

import gc
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import pytest

import accel_fn as af
from accel_fn.contrib.runs.charts import marks
from accel_fn.contrib.runs.goodput import goodput
from accel_fn.contrib.runs.run_log import read_runs
from accel_fn.testing import internals, simulate
from tests.observe.test_log_to import BATCHES, events_of, late, lines_of, small_plan, train
from tests.support.forked_ranks import ROOT
from tests.support.other_runs import other_run

SUFFIXES = [".jsonl", ".csv"]


def steps_in(path):
    """Return the steps of the lines of a log, each as it stands in the file."""
    lines = path.read_text().splitlines()
    if path.suffix == ".jsonl":
        return [json.loads(line)["step"] for line in lines]
    return [int(line.split(",")[0]) for line in lines[1:]]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_resumed_run_goes_on_in_the_same_log(suffix, tmp_path):
    path = tmp_path / f"log{suffix}"
    state, step, _ = train(small_plan(af.log_to(path, every=1)), BATCHES[:3])
    af.save(step, state, tmp_path / "checkpoints")
    for batch in BATCHES[3:6]:
        state, _ = step(state, batch)
    whole = path.read_text().splitlines()
    del step
    state, step = af.build(small_plan(af.log_to(path, every=1)), af.DistState())
    state = af.resume(step, state, tmp_path / "checkpoints")
    assert path.read_text().splitlines() == whole[: 3 + (suffix == ".csv")]
    for batch in BATCHES[3:5]:
        state, _ = step(state, batch)
    assert steps_in(path) == [1, 2, 3, 4, 5]
    events = lines_of(tmp_path / "log.events.jsonl")
    [load] = [each for each in events if each["event"] == "load"]
    assert (load["step"], load["lost_step"]) == (3, 6)
    assert load["folder"].endswith("step_00000003")
    assert [each["event"] for each in events if each["event"] != "first_step"] == [
        *("start", "save", "end", "start", "load")
    ]


@pytest.mark.parametrize(("suffix", "cut"), [(".jsonl", 1), (".csv", 9)])
def test_a_line_that_was_cut_in_its_middle_is_repaired(suffix, cut, tmp_path):
    path, events = tmp_path / f"log{suffix}", tmp_path / "log.events.jsonl"
    state, step, _ = train(small_plan(af.log_to(path, every=1)), BATCHES[:3])
    del step
    for each in (path, events):
        os.truncate(each, each.stat().st_size - cut)
    _, step = af.build(small_plan(af.log_to(path, every=1)), af.DistState())
    assert steps_in(path) == [1, 2]
    step(state, BATCHES[3])
    assert steps_in(path) == [1, 2, 4]
    start = events.read_text().splitlines()[-2]
    assert json.loads(start)["event"] == "start"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("data.jsonl", '{"text": "a"}\n{"text": "b"}\n'),
        ("data.jsonl", '{"text": "without an end of the line"}'),
        ("table.csv", "x,y\n1,2\n"),
        ("table.csv", "step,action\n1,left\n"),
    ],
)
def test_a_file_that_is_no_log_is_refused_and_stays_as_it_is(name, text, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    plan = small_plan(af.log_to(path))
    words = (
        f"log_to: writers must be new files or logs, got {path}, which holds something else; give"
    )
    with pytest.raises(af.errors.LogError, match=re.escape(words)):
        af.build(plan, af.DistState())
    assert path.read_text() == text
    assert [each.name for each in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_run_that_begins_anew_keeps_the_log_of_before_aside(suffix, tmp_path, capfd):
    path = tmp_path / f"log{suffix}"
    train(small_plan(af.log_to(path, every=1)), BATCHES[:3])
    before = path.read_bytes()
    train(small_plan(af.log_to(path, every=1)), BATCHES[:2])
    assert steps_in(path) == [1, 2]
    assert path.with_name(f"{path.name}.old").read_bytes() == before
    assert capfd.readouterr().err == (
        f"{path} has steps up to 3, and this run begins after step 0; the log of before is now "
        f"{path.name}.old\n"
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_run_that_goes_back_to_an_earlier_state_cuts_its_log(suffix, tmp_path):
    path = tmp_path / f"log{suffix}"
    early, step, _ = train(small_plan(af.log_to(path, every=1)), BATCHES[:2])
    state = early
    for batch in BATCHES[2:5]:
        state, _ = step(state, batch)
    step(early, BATCHES[2])
    assert steps_in(path) == [1, 2, 3]


def test_numbers_that_are_not_finite_are_null_in_json(tmp_path):
    path = tmp_path / "log.jsonl"
    state, step, _ = train(small_plan(af.log_to(path, path.with_suffix(".csv"))), BATCHES[:1])
    values = {"nan": math.nan, "inf": math.inf, "less": -math.inf}
    af.log_values(step, state, values)
    del step
    _, step = af.build(small_plan(af.log_to(path, path.with_suffix(".csv"))), af.DistState())
    af.log_values(step, state, {"finite": 1})
    [line] = [
        json.loads(each, parse_constant=pytest.fail) for each in path.read_text().splitlines()
    ]
    assert {name: line[name] for name in (*values, "finite")} == {
        **dict.fromkeys(values),
        "finite": 1,
    }
    [run], _ = read_runs("report", [path])
    assert all(math.isnan(run.columns[name].values[0]) for name in values)
    assert path.with_suffix(".csv").read_text().splitlines()[1].endswith(",nan,inf,-inf,1.0")
    assert events_of(tmp_path / "log.events.jsonl")[:2] == ["start", "first_step"]


def test_new_names_make_a_csv_wider(tmp_path):
    path = tmp_path / "log.csv"
    state, step, _ = train(small_plan(af.log_to(path, every=1)), BATCHES[:2])
    af.log_values(step, state, {"accuracy, top 1": 0.5})
    state, _ = step(state, BATCHES[2])
    heading, *rows = path.read_text().splitlines()
    assert heading.endswith(',"accuracy, top 1"')
    assert [row.rpartition(",")[2] for row in rows] == ["", "0.5", ""]
    assert steps_in(path) == [1, 2, 3]
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        *(".log.lock", "log.csv", "log.events.jsonl")
    ]


@pytest.mark.parametrize(("name", "reason"), [("file", "File exists"), ("", "Is a directory")])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_folder_that_cannot_be_written_to_is_refused_on_every_rank(
    world_size, name, reason, tmp_path
):
    (tmp_path / "file").write_text("")
    (tmp_path / "log.jsonl").mkdir()
    path = tmp_path / name / "log.jsonl"

    def run(state):
        plan = af.compose(af.wrap_ddp(), af.log_to(path))(small_plan())
        with pytest.raises(RuntimeError) as caught:
            af.build(plan, state)
        return str(caught.value)

    first, *others = simulate(run, world_size=world_size)
    assert first == f"log_to: writers must be files that can be written, got {path}: {reason}"
    assert all("build: failed on rank 0" in each for each in others)


LOGGING = """
from tests.observe.test_log_files import *
kept = af.build(small_plan(af.log_to(f"{folder}/log.jsonl")), af.DistState())
print("up", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_second_process_that_logs_to_a_file_is_refused_on_every_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(*internals.LOCK_TRIES, 1)

    def run(state):
        plan = af.compose(af.wrap_ddp(), af.log_to(tmp_path / "log.jsonl"))(small_plan())
        try:
            return af.build(plan, state)[0].step
        except RuntimeError as error:
            return str(error)

    with other_run(tmp_path, LOGGING) as other:
        first, second = simulate(run, world_size=2)
    assert re.fullmatch(
        rf"log_to: {tmp_path}/log must be the log of one run at a time, got a second one beside "
        rf"\S+, pid {other.pid}; give each run a file of its own",
        first,
    )
    assert "build: failed on rank 0" in second
    assert simulate(run, world_size=2) == [0, 0]


def test_plans_of_one_process_share_a_file(tmp_path):
    path = tmp_path / "log.jsonl"
    logs = [af.log_to(path, every=2, prefix=f"{name}/") for name in ("critic", "generator")]
    state, critic = af.build(small_plan(logs[0]), af.DistState())
    _, generator = af.build(small_plan(logs[1]), state)
    losses = []
    for batch in BATCHES[:4]:
        for _ in range(2):
            state, report = critic(state, batch, advance=False)
            losses.append(report.loss.item())
        state, report = generator(state, batch)
        losses.append(report.loss.item())
    lines = lines_of(path)
    assert [line["step"] for line in lines] == [2, 4]
    # Of the updates of a batch, the first.
    logged = [(line["critic/loss"], line["generator/loss"]) for line in lines]
    assert logged == [(losses[3], losses[5]), (losses[9], losses[11])]
    assert "loss" not in lines[0]
    steps = {"critic": critic, "generator": generator}
    af.save(steps, state, tmp_path / "checkpoints")
    af.load(steps, state, tmp_path / "checkpoints")
    events = lines_of(tmp_path / "log.events.jsonl")
    names = [each["event"] for each in events]
    assert names == ["start", "first_step", "first_step", "save", "load"]
    assert events[0]["plan"].count("one step on 1 rank") == 2


def test_two_values_of_one_name_and_step_are_warned_of_once(tmp_path):
    path = tmp_path / "log.jsonl"
    state, one = af.build(small_plan(af.log_to(path, path, every=1)), af.DistState())
    _, other = af.build(small_plan(af.log_to(path, every=1)), state)
    with warnings.catch_warnings(record=True, action="always") as caught:
        for batch in BATCHES[:2]:
            other(state, batch, advance=False)
            state, report = one(state, batch)
    [warning] = caught
    assert str(warning.message) == (
        f"log_to: each name should have one value a step in {path}, got two of 'samples_per_second' at "
        "step 1; the newest is kept. Give the plans that share a log, or the calls of log_values, a "
        "prefix each"
    )
    assert warning.filename == __file__
    assert lines_of(path)[-1]["loss"] == report.loss.item()


def test_a_value_that_is_logged_again_is_not_warned_of(tmp_path):
    path = tmp_path / "log.jsonl"
    state, step, _ = train(small_plan(af.log_to(path, path.with_suffix(".csv"))), BATCHES[:1])
    for _ in range(2):
        af.log_values(step, state, {"accuracy": 0.5, "nan": math.nan})


def test_a_plan_that_runs_now_and_then_logs_in_order(tmp_path):
    path = tmp_path / "log.jsonl"
    state, often = late(small_plan(af.log_to(path, every=1)))
    _, rarely = late(small_plan(af.log_to(path, every=1, prefix="rare/")))
    for number, batch in enumerate(BATCHES[:9]):
        if number % 4 == 0:
            state, _ = rarely(state, batch, advance=False)
        state, _ = often(state, batch)
    lines = lines_of(path)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["step"] for line in lines if "rare/loss" in line] == [1, 5]
    assert all("loss" in line for line in lines)


def test_values_of_an_earlier_step_of_another_plan_are_not_written(tmp_path):
    path = tmp_path / "log.jsonl"
    state, one = af.build(small_plan(af.log_to(path, every=1)), af.DistState())
    _, other = af.build(small_plan(af.log_to(path, every=1, prefix="a/")), state)
    early, _ = other(state, BATCHES[0])
    one(early, BATCHES[1])
    with pytest.warns(
        UserWarning, match=rf"newest step in {path}, got step 1 after step 2; the values are not"
    ) as caught:
        af.log_values(other, early, {"mine": 1})
    assert caught[0].filename == __file__
    assert steps_in(path) == [1, 2]


MOVES = {
    "removed": Path.unlink,
    "replaced": lambda path: shutil.copy(path, path.with_name("copy")).rename(path),
    "gone with its folder": lambda path: shutil.rmtree(path.parent),
}


@pytest.mark.parametrize(
    ("move", "suffix"), [*((each, ".jsonl") for each in MOVES), ("removed", ".csv")]
)
def test_a_file_that_is_not_in_its_place_any_more_is_warned_of_once(suffix, move, tmp_path):
    path = tmp_path / "logs" / f"log{suffix}"
    state, step, _ = train(small_plan(af.log_to(path, every=1)), BATCHES[:2])
    MOVES[move](path)
    with warnings.catch_warnings(record=True, action="always") as caught:
        state, _ = step(state, BATCHES[2])
        assert not caught
        for _ in range(2):
            af.save(step, state, tmp_path / "checkpoints")
    [warning] = caught
    assert str(warning.message) == (
        f"log_to: {path} should stay in its place while a run logs to it, it was removed, renamed or "
        "replaced up to step 3; lines of the run are not in it"
    )
    assert warning.filename == __file__


@pytest.mark.slow
def test_a_disk_that_is_full_ends_no_run(tmp_path):
    """The limit of a file's size stands for the disk."""
    path = tmp_path / "log.jsonl"
    script = f"""
from tests.observe.test_log_files import *
import resource, warnings
state, step = af.build(small_plan(af.log_to({str(path)!r}, every=1)), af.DistState())
state, _ = step(state, BATCHES[0])
limit = Path({str(path)!r}).stat().st_size + 50
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
with warnings.catch_warnings(record=True, action="always") as caught:
    for batch in BATCHES[1:5]:
        state, _ = step(state, batch)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
state, _ = step(state, batch)
print(state.step, *(each.message for each in caught))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == (
        f"6 log_to: {path} should be written, got File too large; the run goes on, and lines "
        "that cannot be written are lost\n"
    )
    assert steps_in(path) == [1, 6]


PROGRAM = """
from tests.observe.test_log_files import *
folder = Path(sys.argv[1])
state, step = af.build(af.wrap_ddp()(small_plan(af.log_to(folder / "log.jsonl", every=1))), af.init())
state = af.resume(step, state, folder / "checkpoints")
for batch in BATCHES[state.step :]:
    state, _ = step(state, af.shard_batch(batch, state))
    if state.step % 3 == 0:
        af.save(step, state, folder / "checkpoints")
    if state.step == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_twice_has_one_log(tmp_path):
    for killed_at in (5, 8, -1):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(killed_at)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == (0 if killed_at < 0 else -signal.SIGKILL), done.stderr
    lines = lines_of(tmp_path / "log.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 13))
    _, _, reports = train(small_plan(), BATCHES)
    assert [line["loss"] for line in lines] == [report.loss.item() for report in reports]
    events = lines_of(tmp_path / "log.events.jsonl")
    loads = [(each["step"], each["lost_step"]) for each in events if each["event"] == "load"]
    assert loads == [(3, 5), (6, 8)]
    assert [each["event"] for each in events].count("end") == 1
    starts = [each["process_began"] for each in events if each["event"] == "start"]
    assert starts == sorted(set(starts))
    assert len(starts) == 3
    [run], _ = read_runs("report", [tmp_path])
    assert marks(run).restarts == [3, 6]
    found = goodput(run)
    assert found.processes == 3
    assert found.wall == pytest.approx(1e6 * (events[-1]["time"] - starts[0]), abs=2)
    assert all(found.microseconds[each] > 0 for each in ("updates", "start", "repeated", "down"))


ENDINGS = {
    "in order": ("", None),
    "by an error": ("raise KeyError(3)", "KeyError"),
    "at a prompt": ("sys.ps1 = '>>> '\nraise KeyError(3)", None),
    "by sys.exit": ("sys.exit(3)", None),
    "in a function": ("def main(step=step):\n    raise KeyError(3)\ndel step\nmain()", "KeyError"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "launched"),
    [*((each, False) for each in ENDINGS), ("by an error", True), ("by sys.exit", True)],
)
def test_the_end_of_a_process_is_noted(ending, launched, tmp_path):
    last, error = ENDINGS[ending]
    script = tmp_path / "train.py"
    script.write_text(f"""
from tests.observe.test_log_files import *
state, step, _ = train(small_plan(af.log_to({str(tmp_path / "log.jsonl")!r}, every=2)), BATCHES[:3])
{last}
""")
    launcher = ["-m", "accel_fn", "launch"] * launched
    subprocess.run(
        [sys.executable, *launcher, str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
    )
    end = lines_of(tmp_path / "log.events.jsonl")[-1]
    assert (end["event"], end["step"], end["error"]) == ("end", 3, error)


@pytest.mark.slow
def test_a_tracker_that_the_program_closed_ends_the_process_in_order(tmp_path):
    """The last line is pending then, as with an accelerator."""
    script = f"""
from tests.observe.test_log_to import *
def write(step, values):
    raise RuntimeError("the run is finished")
state, step = late(small_plan(af.log_to(write, {str(tmp_path / "log.jsonl")!r}, every=1)))
step(state, BATCHES[0])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr == (
        "log_to: the line of step 1 is not written: RuntimeError('the run is finished')\n"
    )
    assert steps_in(tmp_path / "log.jsonl") == [1]
    assert events_of(tmp_path / "log.events.jsonl")[-1] == "end"


def test_a_step_that_is_gone_ends_its_log_and_is_not_held(tmp_path):
    plan = small_plan(af.log_to(tmp_path / "log.jsonl"))
    _, step, _ = train(plan, BATCHES[:1])
    alive = weakref.ref(plan.model)
    del plan, step
    gc.collect()
    assert alive() is None
    assert events_of(tmp_path / "log.events.jsonl")[-1] == "end"
