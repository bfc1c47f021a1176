"""`accel-fn test` passes on a correct library and fails on a broken one."""

import json
import math
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch

import accel_fn as af
from accel_fn.base import weights
from accel_fn.data.indexed.indexed_source import IndexedSource
from accel_fn.step import grads as grads_module
from accel_fn.step import loop, metric_sums, update
from accel_fn.step.global_mean import GlobalMean
from accel_fn.testing import promises, simulate
from accel_fn.testing.outcomes import NOT_RUN, Outcome, merge
from accel_fn.testing.promises import check_promises
from accel_fn.transforms import clip, ddp
from accel_fn.transforms.fsdp import fsdp
from accel_fn.transforms.schedule.advance import Schedule
from tests.cli.commands import ROOT, run_command, surroundings

TRAINING = {
    "W ranks train as one",
    "shards train as one",
    "micro-batches change nothing",
    "tokens of all ranks have equal weights",
    "a loss scale changes nothing",
    "training through shard_loader is training through the loader",
}


@pytest.mark.parametrize(
    "world_size", [2, *[pytest.param(each, marks=pytest.mark.slow) for each in (1, 3, 5)]]
)
def test_every_promise_holds_in_every_world(world_size):
    """Some batches have fewer samples than three or five ranks."""
    for report in simulate(check_promises, world_size=world_size, timeout_s=100):
        assert (report.world_size, report.device) == (world_size, "cpu")
        assert [each for each in report.outcomes if not each.holds] == []
        assert len(report.outcomes) == 15


def broken(**outcomes):
    """Return the promises that two ranks find broken together."""
    reports = simulate(check_promises, world_size=2, timeout_s=100)
    accept = [merge(ranks) for ranks in zip(*[each.outcomes for each in reports], strict=True)]
    assert not any(verdict.error for verdict in accept)
    return {verdict.promise for verdict in accept if not verdict.holds}


def test_a_mean_of_means_is_found(monkeypatch):
    monkeypatch.setattr(GlobalMean, "share", lambda mean, weight: 1.0)
    assert broken() >= TRAINING


def test_gradients_that_are_wrong_by_a_factor_are_found(monkeypatch):
    take_gradients = loop.take_gradients

    def doubled(strategy, state, weight):
        return take_gradients(strategy, state, weight).scaled(2.0)

    monkeypatch.setattr(loop, "take_gradients", doubled)
    assert broken() >= TRAINING


@pytest.mark.slow
def test_a_norm_that_is_off_by_a_millionth_is_found(monkeypatch):
    clip_norm = clip.clip_norm

    def off(state, grads, *, max_norm):
        return clip_norm(state, grads, max_norm=max_norm * (1 + 1e-6))

    monkeypatch.setattr(clip, "clip_norm", off)
    assert broken() == {"clipping is by the norm of all ranks", "shards train as one"}


def test_a_norm_that_takes_shards_for_replicas_is_found(monkeypatch):
    over_shards = grads_module.norm_over_shards

    def mean(norm, groups):
        return over_shards(norm, groups) / math.prod(each.size() for each in groups) ** 0.5

    monkeypatch.setattr(grads_module, "norm_over_shards", mean)
    assert broken() == {"shards train as one"}


@pytest.mark.slow
def test_shards_whose_gradients_are_added_up_roughly_are_found(monkeypatch):
    monkeypatch.setattr(fsdp, "_adding", lambda *given: torch.float32)
    assert broken() == {"shards train as one"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:step. loss_fn should return the mean")
def test_labels_that_count_though_they_are_ignored_are_found(monkeypatch):
    def all_labels(batch, *, path, ignore_index):
        return batch["labels"].numel()

    monkeypatch.setattr(weights, "count_labels", all_labels)
    assert broken() == {"tokens of all ranks have equal weights"}


def test_an_update_that_should_have_been_skipped_is_found(monkeypatch):
    apply_update = update.apply_update
    monkeypatch.setattr(update, "apply_update", lambda *given: apply_update(*given[:3], None))
    assert broken() == {
        "an fp16 overflow on one rank skips the update on all",
        "a schedule follows the updates that are made",
    }


def test_ranks_that_start_from_their_own_parameters_are_found(monkeypatch):
    ddp = torch.nn.parallel.distributed
    monkeypatch.setattr(ddp, "_sync_module_states", lambda *given, **options: None)
    for report in simulate(check_promises, world_size=2, timeout_s=100):
        assert not report.outcomes[1].holds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loss", "weight"])
def test_a_report_that_is_not_of_the_global_batch_is_found(monkeypatch, name):
    def off(**fields):
        return af.Report(**{**fields, name: fields[name] * 2})

    monkeypatch.setattr(metric_sums, "Report", off)
    assert broken() >= TRAINING - {"training through shard_loader is training through the loader"}


@pytest.mark.slow
def test_a_schedule_that_counts_batches_is_found(monkeypatch):
    monkeypatch.setattr(Schedule, "_always", True, raising=False)
    monkeypatch.setattr(
        Schedule,
        "__init__",
        lambda schedule, advance, always: setattr(schedule, "_advance", advance),
    )
    assert broken() == {"a schedule follows the updates that are made"}


@pytest.mark.slow
def test_a_scale_that_stays_is_found(monkeypatch):
    monkeypatch.setattr(af.LossScale, "adjust", lambda scale, ok: scale)
    assert broken() == {"an fp16 overflow on one rank skips the update on all"}


@pytest.mark.slow
def test_a_rank_that_reads_another_ranks_part_is_found(monkeypatch):
    init = IndexedSource.__init__
    monkeypatch.setattr(
        IndexedSource,
        "__init__",
        lambda source, loader, order, rank, *sizes: init(source, loader, order, 0, *sizes),
    )
    found = broken()
    assert "shards partition every epoch, in one order" in found
    assert "training through shard_loader is training through the loader" in found


@pytest.mark.slow
def test_a_run_that_starts_over_is_found(monkeypatch):
    monkeypatch.setattr(IndexedSource, "position", lambda source, step: (0, 0))
    assert broken() == {"a run resumes where it stopped"}


@pytest.mark.slow
def test_rows_that_are_not_gathered_are_found(monkeypatch):
    monkeypatch.setattr(promises, "gather", lambda tree, state: tree)
    assert broken() == {"gather gives the order of the data set"}


@pytest.mark.slow
def test_a_mean_without_weights_is_found(monkeypatch):
    mean = promises.reduce_mean
    monkeypatch.setattr(promises, "reduce_mean", lambda tree, state, weight: mean(tree, state))
    assert broken() == {"reduce and broadcast give what one process has"}


def test_replicas_that_are_not_averaged_are_an_error_and_end_the_checks(monkeypatch):
    """The library compares the first gradients over the ranks and raises on both."""
    monkeypatch.setattr(ddp, "DDP", lambda *given, **options: af.Strategy(*given))
    for report in simulate(check_promises, world_size=2, timeout_s=100):
        first, second, *rest = report.outcomes
        assert first.holds
        assert second.error.startswith("accel_fn.errors.ReplicaError: ")
        assert "Traceback" in second.traceback
        assert {each.error for each in rest} == {NOT_RUN}
        assert not any(each.holds for each in (second, *rest))


def outcome(largest=None, error="", time=0.0):
    return Outcome(
        promise="p", bound=1e-9, largest=largest, error=error, traceback=error, time=time
    )


@pytest.mark.parametrize("largest", [2e-9, math.nan, math.inf])
def test_one_rank_that_is_off_breaks_the_promise(largest):
    verdict = merge([outcome(0.0), outcome(largest), outcome(1e-10)])
    assert not verdict.holds
    assert verdict.largest == largest or math.isnan(verdict.largest)


def test_the_bound_itself_holds():
    verdict = merge([outcome(1e-9), outcome(0.0)])
    assert (verdict.holds, verdict.largest, verdict.error) == (True, 1e-9, "")


def test_of_several_errors_the_cause_is_reported():
    """A rank that lost its peer is not the cause, though it was the first to report."""
    lost = outcome(error="RuntimeError: Connection closed by peer [127.0.0.1]", time=1.0)
    cause = outcome(error="ValueError: the cause", time=2.0)
    verdict = merge([lost, cause, outcome(0.0)])
    assert not verdict.holds
    assert (verdict.error, verdict.largest) == ("ValueError: the cause", None)


@pytest.mark.slow
def test_the_command_is_red_on_a_library_that_is_broken(tmp_path):
    """In a copy of the package a resumed run starts over; nothing else is changed."""
    shutil.copytree(ROOT / "accel_fn", tmp_path / "accel_fn")
    assert callable(IndexedSource.position)
    with (tmp_path / "accel_fn" / "data" / "indexed" / "indexed_source.py").open("a") as module:
        module.write("\n\nIndexedSource.position = lambda self, step, window=1: (0, 0)\n")
    done = run_command(tmp_path, "test", "-n", "2", "--cpu", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    rows, last = done.stdout.splitlines()[1:-1], done.stdout.splitlines()[-1]
    assert last == "14 of 15 promises hold on 2 ranks, cpu, backend gloo"
    broken = [row for row in rows if row.startswith("broken")]
    assert [row.split("  ")[-1] for row in broken] == ["a run resumes where it stopped"]
    assert sum(row.startswith("holds") for row in rows) == 14
    assert max(map(len, rows)) <= 80


@pytest.mark.slow
def test_a_row_is_printed_as_each_promise_ends(tmp_path):
    """In a copy of the package, the last check waits until the rows before it have been read."""
    code = """
        import pathlib, sys, time
        from accel_fn.testing import promises
        from accel_fn.cli import test

        def check(state):
            while not pathlib.Path("read").exists(): time.sleep(0.02)
            return 0.0

        def in_rank(folder):
            at_once = promises.Promise("at once", 0.0, lambda state: 0.0)
            late = promises.Promise("late", 0.0, check)
            promises.promises = lambda state: (at_once, late)
            return promises.check_this_rank(folder)

        test._check_in_rank = in_rank
        sys.argv = ["accel-fn", "-n", "2", "--cpu"]
        test.test()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(
        command, cwd=tmp_path, env=surroundings(tmp_path), stdout=subprocess.PIPE, text=True
    ) as process:
        lines = [process.stdout.readline() for _ in range(2)]
        (tmp_path / "read").touch()
        lines += process.stdout.readlines()
    assert [line.split()[-1] for line in lines[:3]] == ["promise", "once", "late"]
    assert lines[3] == "2 of 2 promises hold on 2 ranks, cpu, backend gloo\n"


@pytest.mark.slow
def test_the_command_passes_on_one_rank_and_prints_what_that_leaves_out(tmp_path):
    done = command(tmp_path, "test", "-n", "1", "--cpu")
    assert done.exit_code == 0, done.stderr
    assert "\n15 of 15 promises hold on 1 rank, cpu, backend none\n" in done.stdout
    assert done.stdout.count("\nholds ") == 15
    assert "On one rank there is no other to compare with: -n 2 --cpu checks" in done.stdout


@pytest.mark.slow
def test_the_command_runs_over_the_world_that_it_is_started_in(tmp_path):
    ours = ["-m", "accel_fn.cli", "test", "--json"]
    done = command(tmp_path, "launch", "-n", "2", "--cpu", *ours)
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)  # the report of one rank
    assert (report["holds"], report["num_processes"], report["device"]) == (True, 2, "cpu")
    assert report["backend"] == "gloo"
    assert len(report["promises"]) == 15
    for promise in report["promises"]:
        assert promise["holds"]
        assert promise["largest"] <= promise["bound"]


@pytest.mark.parametrize(
    ("settings", "arguments", "text"),
    [
        ("num_machines: 2\nmain_process_ip: 10.0.0.1\n", ["--cpu"], "num_machines must be 1 for processes"),
        ("", ["-n", "0"], "0 is not in the range x>=1"),
        ("num_proceses: 2\n", [], "did you mean num_processes?"),
        ("", ["--config", "no.yaml"], "config: file must exist, got 'no.yaml'"),
        ("num_proceses: 2\n", ["--config", "other.yaml"], "num_machines must be 1 for processes of its own"),
    ],
)  # fmt: skip
def test_mistakes_are_errors_before_anything_runs(tmp_path, settings, arguments, text):
    (tmp_path / "accel_fn.yaml").write_text(settings or "cpu: true\n")
    (tmp_path / "other.yaml").write_text("{cpu: true, num_machines: 2, main_process_ip: 10.0.0.1}")
    done = command(tmp_path, "test", *arguments)
    assert done.exit_code in (1, 2)
    assert text in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("option", [("-n", "2"), ("--cpu",), ("--config", "other.yaml")])
def test_a_rank_has_no_processes_of_its_own(tmp_path, option):
    done = command(tmp_path, "test", *option, RANK="0", WORLD_SIZE="2")
    assert done.exit_code == 2
    assert (
        "-n, --cpu and --config are for ranks of its own, and this is a rank already" in done.stderr
    )
