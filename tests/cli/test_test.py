"""`accel-fn test` passes on a correct library and fails on a broken one."""

import json
import math
import re
from dataclasses import replace

import pytest

import accel_fn as af
from accel_fn.errors import RankError
from accel_fn.testing import promises, simulate
from tests.cli.commands import command


@pytest.mark.parametrize(
    "world_size", [2, *[pytest.param(each, marks=pytest.mark.slow) for each in (1, 3, 5)]]
)
def test_every_promise_holds_in_every_world(world_size):
    """Some batches have fewer samples than three or five ranks."""
    for verdicts in simulate(promises.check_promises, world_size=world_size, timeout_s=100):
        assert [each for each in verdicts if not each.holds] == []
        assert len(verdicts) == 15


def reporting(change_report):
    """Return a `build` whose steps give other reports."""

    def build(plan, state):
        state, step = af.build(plan, state)

        def changed(state, batch):
            state, report = step(state, batch)
            return state, replace(report, **change_report(report))

        return state, changed

    return build


class StartsOver:
    """A loader whose epochs do not know where a run has stopped."""

    def __init__(self, loader, state):
        self.loader = af.shard_loader(loader, state)

    def epochs(self, num_epochs, since=None):
        return self.loader.epochs(num_epochs)


DEVICES = "ranks are on devices of their own, and their sums are right"
TRAINING = "W ranks train as one"
SHARDS = "shards train as one"
CLIPPING = "clipping is by the norm of all ranks"
TOKENS = "tokens of all ranks have equal weights"
SCHEDULE = "a schedule follows the updates that are made"
OVERFLOW = "an fp16 overflow on one rank skips the update on all"
PARTITION = "shards partition every epoch, in one order"
LOADING = "training through shard_loader is training through the loader"
RESUMING = "a run resumes where it stopped"
GATHER = "gather gives the order of the data set"
REDUCE = "reduce and broadcast give what one process has"
slightly_more = 1 + 1e-6
FAULTS = {
    "all ranks have the part of rank 0": (
        {"take_part": lambda batch, rank, world_size: af.shard_batch(batch, af.DistState(world_size=2))},
        TRAINING, "a loss scale changes nothing", SHARDS, CLIPPING, TOKENS,
    ),
    "a norm that is off by a millionth": (
        {"clip": lambda max_norm: af.clip(max_norm * slightly_more)}, CLIPPING, SHARDS,
    ),
    "shards that are clipped by value too": (
        {"wrap_fsdp": lambda: af.compose(af.wrap_fsdp(), af.clip_value(0.01))}, SHARDS,
    ),
    "micro-batches that are clipped": (
        {"accumulate": lambda k: af.compose(af.accumulate(k), af.clip(0.5))},
        "micro-batches change nothing",
    ),
    "labels that count though they are ignored": (
        {"count_labels": lambda *_, **__: lambda batch: batch["labels"].numel()}, TOKENS,
    ),
    "a loss of another batch": ({"build": reporting(lambda each: {"loss": each.loss * 2})}, TRAINING),
    "a weight of another batch": (
        {"build": reporting(lambda each: {"weight": each.weight + 1})}, TRAINING,
    ),
    "a schedule that is ahead": (
        {"schedule": lambda rate: af.schedule(lambda count: rate(count + 1))}, SCHEDULE,
    ),
    "updates that are not skipped": ({"skip_nonfinite": lambda: af.compose()}, SCHEDULE),
    "a scale of another size": (
        {"with_amp": lambda kind, init_scale: af.with_amp(kind, init_scale=2 * init_scale)}, OVERFLOW,
    ),
    "an update that is not made": (
        {"build": reporting(lambda each: {"applied": each.applied.new_zeros(())})}, OVERFLOW,
    ),
    "an update that is not skipped": (
        {"build": reporting(lambda each: {"applied": each.applied.new_ones(())})}, OVERFLOW,
    ),
    "a rank that reads the part of another": (
        {"shard_loader": lambda loader, state: af.shard_loader(loader, replace(state, rank=0))},
        PARTITION, LOADING,
    ),
    "a run that starts over": ({"shard_loader": StartsOver}, RESUMING),
    "rows that are not gathered": ({"gather": lambda tree, state: tree}, GATHER),
    "rows in the order of ranks from the last": (
        {"gather": lambda tree, state: af.gather(tree, state).flip(0)}, GATHER,
    ),
    "a mean without weights": (
        {"reduce_mean": lambda tree, state, weight: af.reduce_mean(tree, state)}, REDUCE,
    ),
    "a sum of one more": ({"reduce_sum": lambda tree, state: af.reduce_sum(tree, state) + 1}, REDUCE,
                          DEVICES),
    "a broadcast of rank 0": (
        {"broadcast": lambda tree, state, source: af.broadcast(tree, state)}, REDUCE,
    ),
}  # fmt: skip
"""What takes the place of functions of the library, and the promises that are broken then."""


@pytest.mark.filterwarnings("ignore:step. loss_fn should return the mean")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault, monkeypatch):
    functions, *words = FAULTS[fault]
    every = promises.promises
    monkeypatch.setattr(
        promises, "promises", lambda state: [each for each in every(state) if each.words in words]
    )
    for name, function in functions.items():
        monkeypatch.setattr(promises, name, function)
    for verdicts in simulate(promises.check_promises, world_size=2, timeout_s=100):
        assert {each.promise: each.holds for each in verdicts} == dict.fromkeys(words, False)


def test_replicas_that_are_not_averaged_are_an_error_and_end_the_checks(monkeypatch):
    """The library compares the first gradients over the ranks and raises on both."""

    def apart():
        return lambda plan: replace(plan, strategy=(af.extend.SlotFunction(af.extend.Strategy),))

    monkeypatch.setattr(promises, "wrap_ddp", apart)
    shown = []
    with pytest.raises(RankError) as caught:
        simulate(
            lambda state: promises.check_promises(state, shown.append), world_size=2, timeout_s=100
        )
    words = f"test: the check that {TRAINING} failed on rank "
    assert re.match(rf"{words}\d\nTraceback .*\.ReplicaError: ", str(caught.value), re.DOTALL)
    assert [(each.promise, each.holds) for each in shown] == [(DEVICES, True)] * 2


@pytest.mark.parametrize("largest", [2e-9, math.nan, math.inf])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_is_off_breaks_the_promise(largest, rank, monkeypatch):
    off = promises.Promise("p", 1e-9, lambda state: largest if state.rank == rank else 1e-9)
    monkeypatch.setattr(promises, "promises", lambda state: [off])
    for (verdict,) in simulate(promises.check_promises, world_size=2):
        assert not verdict.holds
        assert verdict.largest == largest or math.isnan(verdict.largest)


def test_the_bound_itself_holds():
    assert promises.Verdict("p", bound=1e-9, largest=1e-9).holds


@pytest.mark.slow
def test_the_command_passes_on_one_rank_and_prints_what_that_leaves_out(launchers, tmp_path):
    done = launchers.command(tmp_path, "test", "-n", "1", "--cpu")
    assert done.exit_code == 0, done.stderr
    assert "\n15 of 15 promises hold on 1 rank, cpu, backend none\n" in done.stdout
    assert done.stdout.count("\nholds ") == 15
    assert "On one rank there is no other to compare with: -n 2 --cpu checks" in done.stdout


@pytest.mark.slow
def test_the_command_runs_over_the_world_that_it_is_started_in(launchers, tmp_path):
    done = launchers.run(tmp_path, "-n", 2, "--cpu", "-m", "accel_fn", "test", "--json")
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
