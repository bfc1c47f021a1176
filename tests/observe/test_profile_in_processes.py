"""profile over real processes: a trace of each, and a table that names the one that is waited for."""

import gzip
import json

import pytest

from tests.support.processes import launch

pytestmark = pytest.mark.slow

SLOW_S = 0.1
PROFILE = """
import time, torch
import accel_fn as af
from torch import nn
from tests.support import strategies as ours

state = af.init(device="cpu", timeout_s=60)


def pause(at):
    if state.rank == 1 and at == "{slow}":
        time.sleep({seconds})


def loss_fn(model, batch):
    pause("forward")
    return ours.mse(model, batch)


model = ours.regression_model()
recipe = af.compose({wrap}, af.clip(1.0), af.profile("{folder}", steps=range(3, 6)))
plan = af.Plan(loss_fn, model, ours.sgd(model.parameters()))
state, step = af.build(recipe(plan), state)
for number in range(6):
    pause("data")
    torch.manual_seed(number * state.world_size + state.rank)
    state, report = step(state, (torch.randn(4, 3).double(), torch.randn(4, 1).double()))
"""


@pytest.mark.parametrize(
    ("slow", "wrap"), [("data", "af.wrap_ddp()"), ("forward", "af.wrap_fsdp(blocks=nn.Linear)")]
)
def test_the_rank_that_sleeps_is_the_straggler(tmp_path, slow, wrap):
    script = PROFILE.format(slow=slow, wrap=wrap, folder=tmp_path, seconds=SLOW_S)
    printed = launch(script)
    assert (tmp_path / "phases.txt").read_text() == printed
    heading, columns, *rows, straggler, _ = printed.splitlines()
    assert heading == "profile of steps 3 to 5, milliseconds a step"
    assert straggler.startswith(f"rank 1 is the straggler: its {slow} takes ")
    first, second = (
        dict(zip(columns.split(), map(float, row[9:].split()), strict=True)) for row in rows
    )
    assert second[slow] >= SLOW_S * 1e3
    # The one that sleeps is not waited for anywhere else: the other waits as long in collectives.
    assert first["collectives"] - second["collectives"] == pytest.approx(SLOW_S * 1e3, rel=0.5)
    for rank in range(2):
        with gzip.open(tmp_path / f"rank{rank}.json.gz") as file:
            names = {each.get("name") for each in json.load(file)["traceEvents"]}
        phases = ("data", "step 4", "forward", "backward", "update")
        assert names >= {f"accel_fn.{each}" for each in phases}
