"""save(wait=False) writes a copy while the run continues; failures are raised, and nothing is
lost."""

from __future__ import annotations

import errno
import threading
import time
from dataclasses import replace

import pytest
import torch

import accel_fn as af
from accel_fn.errors import CheckpointError
from accel_fn.testing import simulate
from accel_fn.testing.internals import Share, failing, limited
from tests.checkpoint.test_checkpoint import advance
from tests.checkpoint.test_checkpoint import make as make_step
from tests.support import strategies as ours
from tests.support.forked_ranks import run_worlds
from tests.support.processes import launch


def make(state=None, seed=0):
    return make_step(seed, recipe=af.wrap_ddp(), state=state)


def loaded(folder, at="latest"):
    """Return what a new program loads."""
    state, step = make(seed=7)
    af.load(step, state, folder, at=at)
    return ours.kept_tensors(step)


def join_writing():
    """Wait for the threads that write, without a call to their runs."""
    for thread in threading.enumerate():
        if thread.name == "accel_fn save":
            thread.join()


def wait_for(folder, step):
    """Wait until the checkpoint exists, without a call to the run that writes it."""
    deadline = time.monotonic() + 100
    while not (found := af.latest(folder)) or found.name != f"step_{step:08d}":
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


@pytest.fixture
def held(monkeypatch):
    """Let writing wait until this event is set."""
    event, write = threading.Event(), Share.write

    def writing(share, *arguments):
        assert event.wait(20)
        return write(share, *arguments)

    monkeypatch.setattr(Share, "write", writing)
    yield event
    event.set()


def test_what_is_written_is_the_run_as_it_was(tmp_path, held):
    """The run may have continued meanwhile; the checkpoint does not exist before it is complete."""
    state, step = make()
    state = advance(state, step)
    there, expected = af.save(step, state, tmp_path, wait=False), ours.kept_tensors(step)
    advance(state, step)
    assert af.checkpoint.list_checkpoints(tmp_path) == []
    held.set()
    assert wait_for(tmp_path, 2) == there
    ours.assert_identical(loaded(tmp_path), expected)


def test_the_next_save_waits_for_the_one_before(tmp_path, held):
    state, step = make()
    af.save(step, state, tmp_path, wait=False)
    threading.Timer(0.2, held.set).start()
    state = advance(state, step)
    af.save(step, state, tmp_path, wait=False, keep=5)
    assert af.checkpoint.list_checkpoints(tmp_path)[0].step == 0
    state = advance(state, step)
    af.save(step, state, tmp_path, keep=2)
    assert [each.step for each in af.checkpoint.list_checkpoints(tmp_path)] == [2, 4]


def test_a_write_that_lasts_is_named_by_the_call_that_waits_for_it(tmp_path, held, capsys):
    state, step = make()
    path = af.save(step, state, tmp_path, wait=False)
    threading.Timer(0.5, held.set).start()
    with limited("report of a write", 0.05):
        af.load(step, state, tmp_path)
    text = f"{path} has been waited for for more than 0.05 s: it is being "
    assert capsys.readouterr().err.startswith(text)


def test_the_copy_is_kept_for_the_next_time(tmp_path, monkeypatch):
    """Tensors of one size are copied into the same buffers as before."""
    places, write = [], Share.write

    def noting(share, draft, *count):
        places.append([part.tensor.data_ptr() for part in share.parts])
        return write(share, draft, *count)

    monkeypatch.setattr(Share, "write", noting)
    state, step = make()
    state = advance(state, step)
    own = {each.data_ptr() for each in step.plan.model.parameters()}
    for _ in range(3):
        af.save(step, state, tmp_path, wait=False)
        state = advance(state, step)
    af.save(step, state, tmp_path)
    assert places[0] == places[1] == places[2]
    assert len(set(places[0])) == len(places[0])
    assert not own & set(places[0])
    assert own <= set(places[3])  # a save that waits needs no copy


@pytest.mark.parametrize("limit", [1, 100, 2**28])
def test_copies_lie_in_blocks_and_tensors_of_another_size_or_kind_have_new_ones(tmp_path, limit):
    state, step = make()
    model, number = step.plan.model, 0
    model.register_buffer("seen", torch.zeros(3, 5))
    for seen in (torch.randn(3, 5), torch.randn(4, 5), torch.arange(20).view(4, 5), torch.ones(0)):
        model.seen = seen
        with limited("bytes of a block", limit):
            af.save(step, replace(state, step=number), tmp_path, wait=False)
        expected = ours.kept_tensors(step)
        model.seen = torch.zeros_like(seen)
        state, number = af.load(step, state, tmp_path), number + 1
        ours.assert_identical(ours.kept_tensors(step), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_what_an_accelerator_continues_to_compute_is_not_saved(tmp_path, held):
    """The copy is still under way when `save` returns."""
    device = torch.accelerator.current_accelerator()
    model = torch.nn.Linear(2048, 2048, device=device)
    plan = af.Plan(
        lambda model, batch: model(batch).mean(),
        model,
        torch.optim.SGD([*model.parameters()], lr=1.0),
    )
    state, step = af.build(plan, af.DistState(device=device))
    expected = model.weight.detach().clone()
    af.save(step, state, tmp_path, wait=False)
    for _ in range(10):
        state, _ = step(state, torch.ones(8, 2048, device=device))
    held.set()
    af.load(step, state, tmp_path)
    torch.testing.assert_close(model.weight.detach(), expected, rtol=0, atol=0)


# -- failures in the background


def failing_on(rank, monkeypatch):
    """Let the first write of this rank find the disk full."""
    write, left = Share.write, [rank]

    def full(share, draft, *count):
        if share.rank in left:
            left.remove(share.rank)
            (draft / f"tensors_{share.rank:05d}.bin").write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(share, draft, *count)

    monkeypatch.setattr(Share, "write", full)


@pytest.mark.parametrize(("rank", "call"), [(0, "load"), (2, "save")])
def test_a_failure_is_raised_on_every_rank_by_the_next_call(tmp_path, monkeypatch, rank, call):
    failing_on(rank, monkeypatch)

    def run(state):
        state, step = make(state)
        state = advance(state, step)
        af.save(step, state, tmp_path, wait=False)
        with pytest.raises(CheckpointError) as caught:
            getattr(af, call)(step, state, tmp_path)
        af.barrier(state)
        names = sorted(path.name for path in tmp_path.iterdir())
        state = advance(state, step)
        af.save(step, state, tmp_path)
        return str(caught.value), names

    ranks = simulate(run, world_size=3)
    assert len(set(map(str, ranks))) == 1
    text, names = ranks[0]
    assert text.startswith(f"{call}: ")
    assert "step_00000002 must have been written in the background" in text
    assert f"on rank {rank}: " in text
    assert "No space left on device" in text
    assert names == [".lock"]
    assert [each.step for each in af.checkpoint.list_checkpoints(tmp_path)] == [4]


@pytest.mark.parametrize(
    ("step", "error"),
    [("copy", MemoryError("no room")), ("start", RuntimeError("can't start new thread"))],
)
def test_a_rank_that_cannot_start_to_write_fails_on_all_at_once(tmp_path, step, error):
    """The rank has no memory for a copy, or cannot start a thread."""

    def run(state):
        state, step = make(state)
        with pytest.raises((MemoryError, RuntimeError), match=str(error)):
            af.save(step, state, tmp_path, wait=False)
        af.barrier(state)
        af.save(step, state, tmp_path, wait=False)
        af.load(step, state, tmp_path)

    with failing(step, error, in_thread="rank 1 "):
        simulate(run, world_size=2)
    assert [each.step for each in af.checkpoint.list_checkpoints(tmp_path)] == [0]


def test_a_rank_that_never_writes_is_named(tmp_path, monkeypatch):
    write = Share.write

    def late(share, draft, *count):
        while share.rank == 1 and draft.exists():  # until rank 0 gives up
            time.sleep(0.01)
        return write(share, draft, *count)

    monkeypatch.setattr(Share, "write", late)

    def run(state):
        state, step = make(state)
        af.save(step, state, tmp_path, wait=False)
        with pytest.raises(CheckpointError, match=r"got nothing of \[1\] for 0.3 s") as caught:
            af.save(step, state, tmp_path)
        return str(caught.value)

    with limited("share of a rank", 0.3):
        text, other_text = simulate(run, world_size=2)
    assert text == other_text
    assert af.latest(tmp_path) is None


@pytest.mark.slow
def test_a_process_whose_checkpoint_failed_ends_as_any_other_but_for_its_exit_code(tmp_path):
    """Handlers of the user run, each once, and open files are flushed."""
    script = f"""
        import atexit, sys
        atexit.register(say, "first handler")
        import accel_fn as af
        from accel_fn.testing.internals import Share
        from tests.checkpoint.test_saving_in_background import join_writing, make
        def full(share, draft, *count):
            raise OSError("full")
        Share.write = full
        runs = [make() for _ in range(2)]
        for number, (state, step) in enumerate(runs):
            af.save(step, state, {str(tmp_path)!r} + f"/run{{number}}", wait=False)
            join_writing()
        atexit.register(say, "last handler")
        sys.log = open({str(tmp_path / "log")!r}, "w")  # Python lets go of what is there
        print("last line", file=sys.log)
        print("last word")
    """
    (ended,) = run_worlds({"script": script}, tmp_path, num_processes=1)["script"]
    assert ended.exit_code == 1
    assert ended.stderr.count("step_00000000 was not written: full") == 2
    assert sorted(ended.stdout.splitlines()) == ["first handler", "last handler", "last word"]
    assert (tmp_path / "log").read_text() == "last line\n"


@pytest.mark.slow
def test_a_process_that_ends_waits_for_its_checkpoint(tmp_path):
    """The checkpoint has some megabytes."""
    script = f"""
        import torch
        import accel_fn as af
        state = af.init(device="cpu", timeout_s=60)
        model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])
        plan = af.Plan(lambda model, batch: model(batch).mean(), model, torch.optim.SGD(model.parameters()))
        state, step = af.build(af.wrap_ddp()(plan), state)
        af.save(step, state, {str(tmp_path)!r}, wait=False)
    """
    launch(script, num_processes=1)
    (found,) = af.checkpoint.list_checkpoints(tmp_path)
    assert not found.damage
    assert found.size > 8 * 1024 * 1024 * 4


@pytest.mark.slow
def test_nobody_waits_for_long_for_a_rank_that_was_killed(tmp_path):
    """A collective of rank 0 detects it while its thread waits for that rank's files."""
    script = f"""
        import os, signal, time
        from pathlib import Path
        from tests.checkpoint.test_saving_in_background import make
        from accel_fn.testing.internals import Share, set_limit
        import accel_fn as af
        set_limit("share of a lost rank", 0.1)
        state, step = make(af.init(device="cpu", timeout_s=60))
        through = Path({str(tmp_path / "through")!r})
        def die(share, draft):
            while not through.exists():  # save has its own collectives
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if state.rank == 1:
            Share.write = die
        af.save(step, state, {str(tmp_path / "run")!r}, wait=False)
        if state.rank == 0:
            through.touch()
        while True:
            af.barrier(state)
    """
    first, second = run_worlds({"script": script}, tmp_path)["script"]
    assert (first.exit_code, second.exit_code) == (1, -9)
    assert "every rank must stay until all have finished, got one that is gone" in first.stderr
    text = "was not written: save: every rank must write its share, got nothing of [1] for 0.1 s"
    assert text in first.stderr


def test_a_failure_without_a_message_is_named(tmp_path, monkeypatch):
    def failing(share, draft):
        raise MemoryError

    state, step = make()
    with monkeypatch.context() as patched:
        patched.setattr(Share, "write", failing)
        af.save(step, state, tmp_path, wait=False)
        join_writing()
    with pytest.raises(CheckpointError, match=r"on rank 0: MemoryError\(\)"):
        af.save(step, state, tmp_path)


def test_steps_are_one_run_however_they_are_listed(tmp_path, held):
    (state, first), (_, second) = make(), make()
    af.save({"a": first, "b": second}, state, tmp_path, wait=False)
    held.set()
    af.save({"b": second, "a": first}, state, tmp_path)
    assert [each.step for each in af.checkpoint.list_checkpoints(tmp_path)] == [0]
