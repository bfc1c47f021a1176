"""resume loads the newest checkpoint or starts a new run; a finished run that is started again logs
that."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import accel_fn as af
from accel_fn.testing import simulate
from tests.checkpoint.test_checkpoint import BATCH, Counter, advance, kept, make
from tests.support import strategies as ours


def test_a_new_run_has_its_own_state_and_a_later_one_what_was_saved(tmp_path):
    state, step = make()
    assert af.resume(step, state, tmp_path / "run") is state
    assert not (tmp_path / "run").exists()
    state = advance(state, step)
    af.save(step, state, tmp_path / "run", extras={"counter": Counter(4)})
    other_state, other = make(7)
    other_state = af.resume(other, other_state, tmp_path / "run", {"counter": (extra := Counter())})
    assert (other_state.step, extra.number) == (2, 4)
    assert str(kept(other)) == str(kept(step))


def test_ranks_do_as_rank_0_which_looks(tmp_path, monkeypatch):
    """A shared file system may show a new folder to some machines first."""

    def run(state):
        state, step = make(recipe=af.wrap_ddp(), state=state)
        af.resume(step, state, tmp_path)
        return step.plan.model[0].weight.tolist()

    def files(folder):
        if left and threading.current_thread().name.startswith(left[0]):
            left.clear()
            raise FileNotFoundError
        return look(folder)

    look, left = Path.iterdir, ["rank 1 "]
    af.save(*reversed(make(3)), tmp_path)
    monkeypatch.setattr(Path, "iterdir", files)
    expected = ours.regression_model(3)[0].weight.tolist()
    assert simulate(run, world_size=2) == [expected] * 2


MISTAKES = {
    "folder": ((3,), {}, "folder must be the path of a folder, got 3"),
    "other folder": (("elsewhere",), {}, "folder must be the same on every rank, got 'elsewhere'"),
    "step": (("run", {"a": 3}), {}, "step must be a Step or a dict of Steps"),
    "extras": (("run",), {"extras": {"n": Counter()}}, "extras must be the same on every rank"),
    "no extra": (("run",), {"extras": {"n": 3}}, r"extras\['n'\] must have state_dict and load_st"),
}


@pytest.mark.parametrize(("given", "options", "text"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_refused_on_all_ranks_in_the_first_run_too(
    tmp_path, monkeypatch, given, options, text
):
    monkeypatch.chdir(tmp_path)

    def run(state):
        state, step = make(recipe=af.wrap_ddp(), state=state)
        folder, steps = (*given, step)[:2] if state.rank else ("run", step)
        with pytest.raises((ValueError, RuntimeError), match=f"resume: .*{text}"):
            af.resume(steps, state, folder, **(options if state.rank else {}))

    simulate(run, world_size=2)


NEW_RUN = "begin a new run with a state at step 0, such as init returns"


@pytest.mark.parametrize(
    ("num_epochs", "finished"),
    [(2, [f"the run has finished: 2 epochs, 10 steps; {NEW_RUN}"]), (3, [])],
)
def test_a_run_logs_once_where_it_resumes_and_that_it_has_finished(
    tmp_path, capsys, num_epochs, finished
):
    def run(state, num_epochs):
        state, step = make(recipe=af.wrap_ddp(), state=state)
        loader = af.shard_loader(DataLoader(range(20), 4), state)
        state = af.resume(step, state, tmp_path, {"data": loader})
        start = state.step
        for epoch in loader.epochs(num_epochs, since=state):
            for _ in epoch:
                state, _ = step(state, ours.dealt_evenly([BATCH], state.world_size)[state.rank][0])
        af.save(step, state, tmp_path, extras={"data": loader})
        return start, state.step

    assert simulate(lambda state: run(state, 2), world_size=2) == [(0, 10)] * 2
    assert capsys.readouterr().err == ""
    assert (
        simulate(lambda state: run(state, num_epochs), world_size=2) == [(10, 5 * num_epochs)] * 2
    )
    resumed = f"the run resumes at step 10, from {tmp_path / 'step_00000010'}"
    assert capsys.readouterr().err.splitlines() == [resumed, *finished]


def test_a_run_that_resumes_between_two_steps_of_a_batch_logs_how_many_were_made(tmp_path, capsys):
    state, step = make()
    state, _ = step(state, BATCH)
    state, _ = step(state, BATCH, advance=False)
    af.save(step, state, tmp_path)
    af.resume(*reversed(make()), tmp_path)
    resumed = f"the run resumes at step 1, call 1, from {tmp_path / 'step_00000001'}\n"
    assert capsys.readouterr().err == resumed
