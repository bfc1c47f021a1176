"""estimate_memory where ranks share a model, compared with the same steps on real processes."""

import json

import pytest
import torch
from torch import nn

import accel_fn as af
from tests.support.processes import ROOT, launch

STYLES = {"*.up": "colwise", "*.down": "rowwise"}
MODEL = """
import torch
from torch import nn
import accel_fn as af

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, rows):
        return rows + self.down(torch.relu(self.up(rows)))

def make():
    return nn.Sequential(*[Block() for _ in range(4)], nn.Linear(128, 7)), torch.randn(64, 128)

def loss_fn(model, rows):
    return model(rows).square().mean()

def make_plan(name):
    model, _ = make()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=False)
    plan = af.Plan(loss_fn, model, optimizer)
    tp = af.wrap_tp({"*.up": "colwise", "*.down": "rowwise"})
    kinds = {"fsdp": af.wrap_fsdp(), "whole": af.wrap_fsdp(blocks=""), "tp": tp}
    kinds |= {"accumulated": af.compose(af.wrap_fsdp(), af.accumulate(2))}
    kinds["plain"] = lambda plan: plan
    return kinds[name](plan)
"""
RANK = """
import json
from torch.profiler import ProfilerActivity, profile

def num_bytes(tensors):
    parts = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in parts}
    return sum(each.numel() * each.element_size() for each in parts), sum(held.values())

for name in CASES:
    mesh = {"tp": -1} if name == "tp" else None
    plan = make_plan(name)
    with af.distributed(device="cpu", mesh=mesh) as state:
        _, batch = make()
        batch = af.shard_batch(batch, state)
        grads = []
        keep = lambda state, found: grads.append(num_bytes(found.tensors)[0]) or found
        from dataclasses import replace
        state, step = af.build(replace(plan, gradients=(keep,)), state, checks=())
        for _ in range(3):
            state, _ = step(state, batch)
        held = [v for each in plan.optimizer.state.values() for v in each.values()]
        found = {"parameters": num_bytes(plan.model.parameters())[0]}
        found |= {"gradients": grads[-1], "optimizer": num_bytes(held)[0]}
        left = [p.grad for p in plan.model.parameters() if p.grad is not None]
        before = sum(num_bytes(each)[1] for each in (plan.model.parameters(), held, [batch], left))
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            step(state, batch)
        events = seen.profiler.kineto_results.events()
        events = [each for each in events if each.name() == "[memory]"]
        alive = peak = 0
        for event in sorted(events, key=lambda each: each.start_ns()):
            alive += event.nbytes()
            peak = max(peak, alive)
        found |= {"peak": before + peak, "left": bool(left)}
        if state.rank == 0:
            say(json.dumps([name, found]))
"""
CASES = ("fsdp", "whole", "accumulated", "tp")
SPACE: dict = {}
exec(MODEL, SPACE)


def estimated(name, world_size=2, **options):
    """Estimate the step of a plan by its name."""
    mesh = {"dp": -1, "tp": 2 if world_size > 1 else 1} if name == "tp" else None
    [found] = af.contrib.estimate.estimate_memory(
        lambda: SPACE["make_plan"](name),
        make_batch=lambda: SPACE["make"]()[1],
        world_sizes=[world_size],
        mesh=mesh,
        device="cpu",
        **options,
    )
    return found


@pytest.fixture(scope="module")
def real():
    """Return the bytes of the first of two real ranks, by the name of the plan."""
    said = launch(MODEL + RANK.replace("CASES", repr(CASES)), num_processes=2)
    return dict(map(json.loads, said.splitlines()))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_bytes_are_those_of_a_rank_of_two(real, name):
    """Gloo copies what it gathers and sums, so the real peak is up to 15% higher."""
    found = estimated(name, num_microbatches=[2 if name == "accumulated" else 1])
    assert found.parameters == real[name]["parameters"]
    assert found.optimizer == real[name]["optimizer"]
    # While micro-batches are accumulated, gradients are whole; the last backward leaves shards.
    whole = estimated(name, world_size=1).gradients
    assert found.gradients == (whole if name == "accumulated" else real[name]["gradients"])
    assert found.peak <= real[name]["peak"] <= 1.15 * found.peak


@pytest.mark.parametrize("name", ["fsdp", "tp"])
def test_on_one_rank_each_is_the_whole(name):
    assert estimated(name, world_size=1) == estimated("plain", world_size=1)


def test_tp_and_fsdp_divide_by_both_axes():
    def make():
        model, rows = SPACE["make"]()
        return model[:4], rows

    whole, divided = (
        af.contrib.estimate.estimate_memory(make, device="cpu", **options)[0]
        for options in (
            {"optimizer": "SGD"},
            {
                "optimizer": "SGD",
                "shard": af.compose(af.wrap_tp(STYLES), af.wrap_fsdp()),
                "mesh": {"dp": -1, "tp": 2},
                "world_sizes": [8],
            },
        )
    )
    # A row-wise layer's bias is whole along tp.
    biases = 4 * 128 * 4
    assert divided.parameters == divided.gradients == (whole.parameters + biases) // 8


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_divides_by_its_stages(stage):
    """Rajbhandari et al. 2020, figure 1, with all in float32 and two moments."""
    [found] = af.contrib.estimate.estimate_memory(
        lambda: nn.Linear(100, 64, bias=False),
        shard=af.wrap_deepspeed(stage=stage),
        world_sizes=[4],
        device="cpu",
    )
    whole, scalar = 100 * 64 * 4, 4
    assert found.optimizer == 3 * whole // 4 + scalar
    assert found.gradients == (whole // 4 if stage >= 2 else whole)
    assert found.parameters == (whole // 4 if stage == 3 else whole)


def test_each_stage_of_zero_lowers_the_peak_of_a_deep_model():
    peaks = [
        af.contrib.estimate.estimate_memory(
            SPACE["make"], shard=af.wrap_deepspeed(stage=stage), world_sizes=[8], device="cpu"
        )[0].peak
        for stage in range(4)
    ]
    assert peaks == sorted(set(peaks), reverse=True)


def test_replicas_of_shards_hold_what_each_group_of_shards_does():
    def found(replicate, world_size):
        shard = af.wrap_fsdp(replicate=replicate)
        return af.contrib.estimate.estimate_memory(
            SPACE["make"], shard=shard, world_sizes=[world_size], device="cpu"
        )[0]

    two, four = found(1, 2), found(2, 4)
    assert (four.parameters, four.optimizer) == (two.parameters, two.optimizer)


def test_fsdp_shards_an_unsplit_model_over_all_axes():
    def found(mesh, *others):
        [found] = af.contrib.estimate.estimate_memory(
            lambda: SPACE["make"]()[0],
            shard=af.compose(af.wrap_fsdp(), *others),
            world_sizes=[4],
            mesh=mesh,
            device="cpu",
        )
        return found

    assert found({"dp": 2, "cp": 2}, af.wrap_cp({"rows": 1})) == found(None)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shard": af.wrap_tp(STYLES), "world_sizes": [2]}, "mesh must name the axis of wrap_tp"),
        (
            {"shard": af.compose(af.wrap_fsdp(), af.wrap_ddp())},
            "shard must be left out of a plan with a strategy, got",
        ),
        ({"shard": af.wrap_fsdp(blocks="no"), "world_sizes": [2]}, "must match modules with"),
        ({"shard": af.wrap_fsdp(replicate=2), "world_sizes": [3]}, "divide the number of ranks, 3"),
        (
            {"shard": af.wrap_tp(), "world_sizes": [2], "mesh": {"tp": 2}},
            "styles must be a mapping for Sequential",
        ),
    ],
)
def test_a_model_that_cannot_be_divided_so_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
        af.contrib.estimate.estimate_memory(SPACE["make"], device="cpu", **options)


@pytest.mark.parametrize("num_ranks", [1, 8, 64])
def test_the_table_of_larger_models_is_what_is_estimated(num_ranks):
    """Its 13 billion parameters, as four equal layers; its figures have two digits or more."""
    lines = (ROOT / "docs/larger-models.md").read_text().splitlines()
    cells = [line.strip("|").split("|") for line in lines if line.startswith("| ")]
    column = next(row for row in cells if " 64 ranks " in row).index(
        f" {num_ranks} rank{'s' * (num_ranks > 1)} "
    )
    row = next(row for row in cells if row[0] == " 13 billion ")
    side = int((13e9 / 4) ** 0.5)
    [found] = af.contrib.estimate.estimate_memory(
        lambda: nn.Sequential(*[nn.Linear(side, side, bias=False) for _ in range(4)]),
        shard=af.wrap_fsdp(),
        world_sizes=[num_ranks],
        device="cpu",
    )
    total = found.parameters + found.gradients + found.optimizer
    assert total == pytest.approx(float(row[column].split()[0]) * 1e9, rel=0.02)


def test_ranks_that_share_sequences_hold_activations_of_a_block():
    def plan():
        model = nn.Sequential(nn.Embedding(100, 16), *[nn.Linear(16, 16) for _ in range(6)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss_fn(model, batch):
            found = model(batch["tokens"]) * batch["seen"][..., None]
            return found.square().mean()

        recipe = af.compose(af.wrap_ddp(), af.wrap_cp({"tokens": 1}))
        return recipe(af.Plan(loss_fn, model, optimizer))

    def batch():
        return {"tokens": torch.zeros(2, 4096, dtype=torch.int64), "seen": torch.ones(2, 4096)}

    alone, shared = (
        af.contrib.estimate.estimate_memory(
            plan, make_batch=batch, world_sizes=[cp], mesh={"dp": -1, "cp": cp}
        )[0]
        for cp in (1, 4)
    )
    assert alone.parameters == shared.parameters
    assert alone.batch == 4 * shared.batch
    assert alone.activations == pytest.approx(4 * shared.activations, rel=0.01)
