"""The TensorBoard recipe, in a run that is killed and resumes; `nox -s trackers` runs that of W&B."""

import contextlib
import gc

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.recipes import recipe


def test_a_resumed_run_has_each_step_once_in_tensorboard(tmp_path, monkeypatch):
    """An epoch has 32 steps, and a checkpoint follows each."""
    monkeypatch.chdir(tmp_path)
    program, stepping = recipe("SummaryWriter"), "        state, report = step(state, batch)\n"
    assert program.count(stepping) == 1
    stopping = f"{stepping}        if state.step == 55:\n            raise SystemExit\n"
    for each in (program.replace(stepping, stopping), program):
        variables = {}
        with contextlib.suppress(SystemExit):
            exec(each, variables)
        variables["writer"].close()
        del variables
        gc.collect()  # releases the lock of the run's folder
    found = EventAccumulator("runs/a/tensorboard")
    found.Reload()
    assert [each.step for each in found.Scalars("loss")] == list(range(10, 161, 10))
    assert [each.step for each in found.Scalars("validation/loss")] == list(range(32, 161, 32))


def test_the_recipe_of_wandb_is_a_program():
    compile(recipe("wandb"), "wandb.py", "exec")
