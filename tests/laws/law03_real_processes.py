"""Laws 2, 3 and 7 over real processes give the numbers of the loop by hand in this process."""

import json
from typing import Any, NamedTuple

import pytest

from tests.support import strategies as ours
from tests.support.processes import launch

TRAIN = """
import json, sys, torch
from torch._dynamo.utils import counters
import accel_fn as af
from tests.support import strategies as ours
from tests.laws.law03_real_processes import batches, shard
from tests.laws.law07_scaling import scaled

state = af.init(device="cpu", timeout_s=60)
model = ours.{model}()
plan = af.Plan(ours.{loss}, model, ours.adamw(model.parameters()), {weight_fn})
state, step = af.build(af.compose(af.place(), {wrap}, {transforms})(plan), state)
built = counters["stats"]["unique_graphs"]
losses, applied = [], []
for index, batch in enumerate(batches("{loss}")):
    part = shard(batch, state, index)
    if index == {poisoned} and state.rank == state.world_size - 1:
        part = (part[0] * float("nan"), part[1])
    state, report = step(state, part)
    losses.append(float(report.loss))
    applied.append(bool(report.applied))
scale = None if state.scaler is None else float(state.scaler.scale)
parameters = {{name: value.tolist() for name, value in ours.whole(model.state_dict()).items()}}
num_graphs = counters["stats"]["unique_graphs"] - built
say(json.dumps([losses, applied, scale, parameters, num_graphs]))
"""


class Told(NamedTuple):
    """Results of a rank; graphs are the number that its steps had compiled."""

    losses: list[float]
    applied: list[bool]
    scale: float | None
    parameters: dict[str, Any]
    num_graphs: int


def batches(kind):
    """Return five global batches of odd sizes, the last one smaller than three ranks."""
    import torch

    generator = torch.Generator().manual_seed(0)
    found = []
    for size in (7, 6, 5, 9, 2):
        inputs = torch.randn(size, 3, 3, generator=generator).double()
        labels = torch.randint(0, 4, (size, 3), generator=generator)
        labels[torch.rand(size, 3, generator=generator) < 0.4] = -100
        labels[0, 0] = 1
        tokens = {"inputs": inputs, "labels": labels}
        targets = torch.randn(size, 1, generator=generator).double()
        found.append(tokens if kind == "token_loss" else (inputs[:, 0], targets))
    return found


def shard(batch, state, index):
    """Split unevenly: every other batch leaves rank 0 without samples."""
    from accel_fn import count_samples

    if index % 2:
        size = count_samples(batch)
        cuts = [0, *[size * rank // (state.world_size - 1) for rank in range(state.world_size)]]
    else:
        size = count_samples(batch)
        cuts = [size * rank // state.world_size for rank in range(state.world_size + 1)]
    return ours.rows(batch, cuts[state.rank], cuts[state.rank + 1])


def run(num_processes, **settings):
    """Train in real processes; return the results of every rank."""
    import torch

    defaults = {"model": "regression_model", "loss": "mse", "weight_fn": "", "poisoned": -1}
    defaults["wrap"] = "af.wrap_ddp()"
    output = launch(TRAIN.format(**{**defaults, **settings}), num_processes=num_processes)
    results = [Told(*json.loads(line)) for line in output.splitlines()]
    assert len(results) == num_processes
    for told in results:
        for name, value in told.parameters.items():
            told.parameters[name] = torch.tensor(value, dtype=torch.float64)
    return results


MORE_WORLDS = pytest.mark.parametrize(
    ("num_processes", "wrap"),
    [
        (3, "af.wrap_ddp()"),
        (4, "af.wrap_fsdp(replicate=2, reshard_after_forward=False)"),
        (2, "af.wrap_fsdp(offload=True, blocks='0')"),
    ],
)


def check(num_processes, wrap):
    losses, expected = ours.trained_by_hand(ours.regression_model(), batches("mse"), max_norm=0.5)
    for told in run(num_processes, wrap=wrap, transforms="af.accumulate(2), af.clip(0.5)"):
        ours.assert_close(told.parameters, expected)
        assert told.losses == pytest.approx(losses, rel=1e-6)  # the report is in float32
        assert (told.applied, told.scale) == ([True] * 5, None)


@pytest.mark.parametrize(
    "wrap", [pytest.param("af.wrap_ddp()", marks=pytest.mark.slow), "af.wrap_fsdp()"]
)
def test_processes_and_microbatches_are_one_process_and_one_batch(wrap):
    check(2, wrap)


@pytest.mark.slow
@MORE_WORLDS
def test_more_processes_are_one_process(num_processes, wrap):
    check(num_processes, wrap)


@pytest.mark.slow
@MORE_WORLDS
def test_an_overflow_in_one_process_skips_the_update_in_all(num_processes, wrap):
    clean = [batch for index, batch in enumerate(batches("mse")) if index != 2]
    _, expected = ours.trained_by_hand(ours.regression_model(), clean)
    for told in run(num_processes, wrap=wrap, transforms="scaled(256.0)", poisoned=2):
        assert told.applied == [True, True, False, True, True]
        assert told.scale == 128.0
        ours.assert_close(told.parameters, expected)


def test_ranks_report_the_same_and_restore_the_order_of_the_data_set():
    launch(
        """
        import torch, accel_fn as af
        from torch.utils.data import DataLoader, TensorDataset

        state = af.init(device="cpu", timeout_s=60)
        data = TensorDataset(torch.arange(11))
        loader = af.shard_loader(DataLoader(data, batch_size=4, num_workers=2), state)
        rows = torch.cat([af.gather(batch[0], state) for batch in loader]).tolist()
        assert rows == list(range(11)), rows
        assert af.gather({"names": [f"r{state.rank}"] * state.rank}, state) == {"names": ["r1"]}
        assert af.reduce_mean(float(state.rank), state, weight=1 + 2 * state.rank) == 0.75
        assert torch.equal(af.broadcast(torch.full((2,), state.rank), state, source=1), torch.ones(2).long())
        try:
            af.on_main(lambda: {}["absent"], state)
        except KeyError as error:
            say("on_main", error)
        try:
            af.gather(torch.ones(2, 3 + state.rank), state)
        except ValueError as error:
            say("gather refused", "trailing shape" in str(error))
        af.barrier(state)
        """,
        expect=["on_main 'absent'"] * 2 + ["gather refused True"] * 2,
    )
