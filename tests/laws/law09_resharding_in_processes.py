"""Law 9 over real processes: a run continues as replicas, as shards and on one rank, in any
order."""

import json

import pytest

import accel_fn as af
from tests.laws.law03_real_processes import batches
from tests.support import strategies as ours
from tests.support.processes import from_lists, launch

LIFE = """
import json
import accel_fn as af
from tests.support import strategies as ours
from tests.laws.law03_real_processes import batches

state = af.init(device="cpu", timeout_s=60)
model = ours.regression_model(seed=9)
plan = af.Plan(ours.mse, model, ours.adamw(model.parameters()))
state, step = af.build(af.compose({wrap}, af.accumulate(2), af.clip(0.5))(plan), state)
if af.latest({folder!r}):
    state = af.load(step, state, {folder!r})
else:
    af.load_model(model, {start!r})
for inputs, targets in batches("mse")[state.step : state.step + {steps}]:
    mine = [each.tensor_split(state.world_size)[state.rank] for each in (inputs, targets)]
    state, _ = step(state, tuple(mine))
af.save(step, state, {folder!r})
whole = ours.whole(model.state_dict())
say(json.dumps({{name: value.tolist() for name, value in whole.items()}}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "lives",
    [
        [(2, "af.wrap_ddp()", 2), (4, "af.wrap_fsdp()", 1), (1, "af.compose()", 2)],
        [(4, "af.wrap_fsdp(replicate=2)", 2), (2, "af.wrap_fsdp(offload=True)", 3)],
    ],
    ids=["replicas first", "groups of shards first"],
)
def test_a_run_resumes_as_replicas_as_shards_and_alone(tmp_path, lives):
    _, expected = ours.trained_by_hand(ours.regression_model(), batches("mse"), max_norm=0.5)
    for found in last_of(lives, tmp_path):
        ours.assert_close(found, expected)


def last_of(lives, folder):
    """Run one world after the other; return the parameters of every rank of the last one."""
    start, run = str(folder / "start"), str(folder / "run")
    af.save_model(ours.regression_model(), start)
    for world_size, wrap, steps in lives:
        script = LIFE.format(wrap=wrap, folder=run, start=start, steps=steps)
        lines = launch(script, num_processes=world_size).splitlines()
        assert len(lines) == world_size
    return [from_lists(json.loads(line)) for line in lines]
