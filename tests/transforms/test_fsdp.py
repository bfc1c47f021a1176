"""wrap_fsdp: its results, its units and dtypes, and what stays the user's."""

import gc

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import accel_fn as af
from accel_fn.parallel.blocks import find_blocks
from accel_fn.testing import simulate
from tests.support import strategies as ours
from tests.support.block_models import (
    CHOICES,
    LAYERS,
    Block,
    Stack,
    batches,
    is_in,
    part,
    stack,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore:step. model should write the same in its forward")


@pytest.mark.parametrize(("blocks", "units"), CHOICES[::3], ids=str)
def test_what_is_chosen_is_gathered_at_a_time_and_nothing_else(blocks, units):
    """In a layer's forward, its own unit and the parameters outside of all units are whole."""

    def run(state):
        model, seen = stack(), {}
        layers = {name: each for name, each in model.named_modules() if name in LAYERS}

        def look(layer, *_):
            parameters = model.named_parameters()
            seen[layer] = {name for name, each in parameters if not isinstance(each, DTensor)}

        for name, layer in layers.items():
            layer.register_forward_hook(lambda *_, name=name: look(name))
        state, step = ours.built(af.wrap_fsdp(blocks=blocks), state, model=model)
        step.forward(state, part(batches(1)[0], state))
        return seen

    names = [name for name, _ in stack().named_parameters()]
    unit_of = {
        name: max([each for each in units if is_in(name, each)], key=len, default="")
        for name in names
    }
    expected = {
        layer: {n for n in names if not unit_of[n] or is_in(layer, unit_of[n])} for layer in LAYERS
    }
    assert simulate(run, world_size=2) == [expected] * 2


@pytest.mark.parametrize(
    ("settings", "is_exact"),
    [
        ({}, True),
        ({"reduce_dtype": torch.bfloat16}, False),
        ({"param_dtype": torch.bfloat16}, True),
        ({"param_dtype": torch.bfloat16, "reduce_dtype": None}, False),
        ({"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}, False),
    ],
    ids=str,
)
def test_gradients_are_added_up_in_the_given_dtype(settings, is_exact):
    """514 needs ten bits, and bfloat16 has eight; each value that is added up needs one."""

    def run(state):
        model = nn.Linear(1, 1, bias=False)
        loss_fn = lambda model, batch: model(batch).float().mean()
        state, step = ours.built(af.wrap_fsdp(**settings), state, model=model, loss_fn=loss_fn)
        _, grads, _ = step.grads(state, torch.full((1, 1), 1024.0 if state.is_main else 4.0))
        return float(grads.tensors[0].full_tensor())

    assert simulate(run, world_size=2) == [514.0 if is_exact else 512.0] * 2


def test_a_model_that_is_a_mere_container_trains_the_same():
    def run(state, recipe):
        models = nn.ModuleDict({"a": stack(0), "b": nn.ModuleList([stack(1)])})
        loss_fn = lambda models, batch: (
            ours.mse(models["a"], batch) + ours.mse(models["b"][0], batch)
        )
        return ours.whole(train(state, recipe, model=models, loss_fn=loss_fn)[0].state_dict())

    expected = run(af.DistState(), af.compose())
    for actual in simulate(lambda state: run(state, af.wrap_fsdp()), world_size=2):
        for name, value in expected.items():
            if "calls" not in name:
                torch.testing.assert_close(actual[name], value, **ours.EXACT)


def test_ranks_start_from_what_the_first_has():
    def run(state):
        model = stack(seed=state.rank)
        kinds = [torch.float64, torch.int64, torch.bool, torch.complex64]
        for kind in kinds:
            buffer = torch.full((3, 2), state.rank).to(kind).t()
            model.register_buffer(str(kind).partition(".")[2], buffer)
        plan = af.Plan(ours.mse, model, ours.sgd(model.parameters()))
        af.build(af.wrap_fsdp()(plan), state)
        return ours.whole(model.state_dict())

    first, *others = simulate(run, world_size=3)
    ours.assert_identical(first, stack(seed=0).state_dict())
    for other in others:
        ours.assert_identical(other, first)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Stack(), ["blocks.0", "blocks.1", "blocks.2"]),
        (ours.regression_model(), ["0", "2"]),
        (nn.Linear(2, 1), []),
        (nn.Sequential(nn.Linear(2, 2), Block(2), Block(2), nn.ReLU()), ["1", "2"]),
        (
            nn.Sequential(nn.Sequential(Block(2), nn.ReLU()), nn.Sequential(Block(2))),
            ["0.0", "1.0"],
        ),
        (
            nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2), nn.LayerNorm(2)),
            ["0", "2"],
        ),
        (
            nn.ModuleDict({"a": Stack(2), "b": ours.regression_model(), "c": Stack(1)}),
            ["a.blocks.0", "a.blocks.1", "b.0", "b.2", "c.blocks.0"],
        ),
        (nn.ModuleDict({"a": Stack(1), "b": nn.Sequential(nn.Linear(2, 2))}), []),
    ],
    ids=["list", "sequence", "none", "most", "within", "larger", "several", "once"],
)
def test_blocks_are_found(model, names):
    assert list(find_blocks(model, None, "wrap_fsdp")) == names


@pytest.mark.parametrize(("dtype", "world_size"), [(torch.bfloat16, 2), (torch.float16, 1)])
def test_blocks_compute_in_the_given_dtype_and_shards_keep_theirs(dtype, world_size):
    seen = set()

    class Looking(Block):
        def forward(self, inputs):
            seen.add((inputs.dtype, self.inner[0].weight.dtype))
            return super().forward(inputs)

    def run(state):
        model = stack(block=Looking).float()
        wrap = af.wrap_fsdp(param_dtype=dtype, reduce_dtype=None)
        state, step = ours.built(
            wrap, state, model=model, loss_fn=lambda model, batch: ours.mse(model, batch).float()
        )
        inputs, losses = torch.ones(4, 3), []
        for _ in range(5):
            state, report = step(state, (inputs, inputs[:, :1].to(dtype)))
            losses.append(float(report.loss))
        return losses[-1] < losses[0], {each.dtype for each in model.parameters()}

    assert simulate(run, world_size=world_size) == [(True, {torch.float32})] * world_size
    assert seen == {(dtype, dtype)}


def test_in_a_world_of_one_nothing_is_sharded():
    model, *_ = train(af.DistState(), af.wrap_fsdp())
    assert not any(isinstance(each, DTensor) for each in model.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("settings", [{"param_dtype": torch.float32}, {"offload": True}], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_one_accelerator_trains_as_the_cpu_does(settings, fused):
    found = []
    accelerator = torch.accelerator.current_accelerator()
    for device, wrap in (("cpu", af.compose()), (accelerator, af.wrap_fsdp(**settings))):
        model = stack().float()
        plan = af.Plan(ours.mse, model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused))
        recipe = af.compose(af.place(), wrap, af.accumulate(2), af.clip(0.5))
        state, step = af.build(recipe(plan), af.init(device=device))
        for batch in batches():
            state, _ = step(state, tuple(each.float() for each in batch))
        found.append(ours.whole(dict(model.named_parameters())))
    kept = [
        value for each in plan.optimizer.state.values() for value in each.values() if value.ndim
    ]
    held = {each.device.type for each in (*model.parameters(), *kept)}
    assert held == {"cpu" if settings.get("offload") else accelerator.type}
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name].cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_with_offload_an_accelerator_holds_no_part_of_the_model_between_steps():
    def held_after(recipe):
        state, step = ours.built(
            af.compose(af.place(), recipe),
            af.init(),
            model=Stack(depth=4, width=1024),
            optimizer=ours.adamw,
        )
        batch = torch.ones(2, 3), torch.ones(2, 1)
        for _ in range(2):
            state, _ = step(state, batch)
        _, grads, _ = step.grads(state, batch)
        return torch.accelerator.memory_allocated(), [state, step, grads]

    before = held_after(af.compose())[0]  # loads the kernels of the products
    gc.collect()
    freed = torch.accelerator.memory_allocated()
    number = sum(each.numel() for each in Stack(depth=4, width=1024).parameters())
    assert before - freed >= 4 * 4 * number  # float32: parameters, gradients, and two of AdamW
    assert held_after(af.wrap_fsdp(offload=True))[0] - freed < 4 * number / 4  # less than a block
