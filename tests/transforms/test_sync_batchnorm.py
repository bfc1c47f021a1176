"""sync_batchnorm: what its layers compute beside other transforms, and what it refuses."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import accel_fn as af
from accel_fn.testing import simulate
from tests.laws.law03_batch_norm import ROWS, Normed, by_hand, loss_fn, over_ranks, sgd, weight_fn
from tests.support import strategies as ours
from tests.support.processes import launch

wraps = pytest.mark.parametrize("wrap", [af.wrap_ddp, af.wrap_fsdp], ids=lambda each: each.__name__)
# a single row, a rank without rows, and one whose rows weigh nothing, so that its loss is 0 / 0
PARTS = [[ROWS[:1], ROWS[1:]], [ROWS[:0], ROWS[1:]], [ROWS[2:4], ROWS[[0, 1, 4, 5]]]]


class Checkpointed(Normed):
    """Its layers run again in the backward."""

    def forward(self, inputs):
        return checkpoint(super().forward, inputs, use_reentrant=False)


class Blocks(nn.Module):
    """Two blocks with layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        block = partial(nn.Linear, 3, 3)
        self.blocks = nn.Sequential(
            *(nn.Sequential(block(), nn.BatchNorm1d(3), nn.Tanh()) for _ in range(2))
        )
        self.head = nn.Linear(3, 2)
        self.double()

    def forward(self, inputs):
        return self.head(self.blocks(inputs))


def expected(model):
    return by_hand(model, [[torch.cat(ranks)] for ranks in PARTS])


# Torch hides a warning of its own for the time of a look, which another thread ends.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    ("wrap", "model", "transform"),
    [
        (af.wrap_ddp, Checkpointed, af.compose()),
        (af.wrap_fsdp, Blocks, af.checkpoint_activations()),
        pytest.param(af.wrap_ddp, Blocks, af.compiled(), marks=pytest.mark.slow),
        pytest.param(af.wrap_fsdp, Blocks, af.compiled(scope="blocks"), marks=pytest.mark.slow),
    ],
    ids=["checkpoint", "checkpoint_activations", "compiled", "compiled blocks"],
)
def test_layers_use_all_rows_where_they_run_again_or_beside_a_compiler(wrap, model, transform):
    model = model()
    losses, tensors = expected(model)
    recipe = af.compose(wrap(sync_batchnorm=True), transform)
    for found, actual in over_ranks(model, PARTS, recipe, world_size=2):
        ours.assert_close(actual, tensors)
        torch.testing.assert_close(found, losses, **ours.EXACT)


@wraps
def test_the_model_keeps_its_layers_and_its_keys(wrap):
    def run(state):
        model = Normed()
        layers, keys = [*model.modules()], [*model.state_dict()]
        plan = af.Plan(loss_fn, model, sgd(model), weight_fn=weight_fn)
        state, step = af.build(wrap(sync_batchnorm=True)(plan), state, check_loss=False)
        step(state, PARTS[0][state.rank])
        assert not any("forward" in vars(each) for each in model.modules())
        return (
            all(map(isinstance, model.modules(), map(type, layers))),
            [*model.state_dict()] == keys,
        )

    assert simulate(run, world_size=2) == [(True, True)] * 2


def test_frozen_layers_use_their_running_statistics():
    def run(state, recipe):
        model = Normed()
        model.norm.eval()
        model.inner.eval()
        plan = af.Plan(loss_fn, model, sgd(model), weight_fn=weight_fn)
        state, step = af.build(recipe(plan), state, check_loss=False)
        for ranks in PARTS:
            rows = ranks[state.rank] if state.world_size > 1 else torch.cat(ranks)
            state, _ = step(state, rows)
        return model.state_dict()

    right = run(af.DistState(), af.compose())
    recipe = af.wrap_ddp(sync_batchnorm=True)
    for actual in simulate(lambda state: run(state, recipe), world_size=2):
        ours.assert_close(actual, right)


def test_ranks_that_call_other_layers_are_refused_on_all_ranks():
    class TwoNorms(Normed):
        def forward(self, inputs):
            return self.head((self.norm if inputs[0, 0] > 0 else self.inner)(self.first(inputs)))

    def run(state):
        model = TwoNorms()
        plan = af.Plan(loss_fn, model, sgd(model), weight_fn=weight_fn)
        state, step = af.build(af.wrap_ddp(sync_batchnorm=True)(plan), state, check_loss=False)
        rows = (
            ROWS.abs() if state.is_main else torch.cat([-ROWS[:, :3].abs(), ROWS[:, 3:].abs()], 1)
        )
        with pytest.raises(af.errors.LossError, match="call each layer on every rank") as caught:
            step(state, rows)
        return str(caught.value)

    first, second = simulate(run, world_size=2)
    assert "the same BatchNorm layers in the same order" in first
    assert first == second


def test_a_batch_of_one_row_is_refused_on_all_ranks_as_torch_does():
    def run(state):
        model = Normed()
        plan = af.Plan(loss_fn, model, sgd(model), weight_fn=weight_fn)
        state, step = af.build(af.wrap_ddp(sync_batchnorm=True)(plan), state, check_loss=False)
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            step(state, ROWS[:1] if state.is_main else ROWS[:0])

    simulate(run, world_size=2)


class Activated(nn.BatchNorm1d):
    """A layer with an activation in it, as timm has."""

    def forward(self, inputs):
        return super().forward(inputs).relu()


@pytest.mark.parametrize(
    ("layer", "transform", "reason"),
    [
        (Activated(3), af.compose(), "got 1, a Activated; use torch's class, or GroupNorm"),
        (nn.BatchNorm1d(3), af.accumulate("auto"), 'accumulate\\("auto"\\), .* give a number'),
        (nn.BatchNorm1d(3), af.compiled(fullgraph=True), "fullgraph=True.* leave that out"),
    ],
    ids=["own forward", "auto", "fullgraph"],
)
@wraps
def test_build_refuses_what_statistics_over_ranks_do_not_go_with(wrap, layer, transform, reason):
    def run(state):
        model = nn.Sequential(nn.Linear(3, 3), copy.deepcopy(layer))
        plan = af.Plan(ours.mse, model, sgd(model))
        recipe = af.compose(wrap(sync_batchnorm=True), transform)
        with pytest.raises(af.errors.PlanError, match=f"sync_batchnorm.*{reason}"):
            af.build(recipe(plan), state)

    simulate(run, world_size=2)


@pytest.mark.slow
def test_processes_are_one_process():
    text = launch(
        """
        import torch, accel_fn as af
        from tests.laws.law03_batch_norm import Normed, loss_fn, sgd, weight_fn
        from tests.support import strategies as ours
        from tests.transforms.test_sync_batchnorm import PARTS

        state, model = af.init(device="cpu", timeout_s=60), Normed()
        plan = af.Plan(loss_fn, model, sgd(model), weight_fn=weight_fn)
        state, step = af.build(af.wrap_fsdp(sync_batchnorm=True)(plan), state)
        for ranks in PARTS:
            state, _ = step(state, ranks[state.rank])
        values = torch.cat([each.flatten() for each in ours.whole(model.state_dict()).values()])
        say(values.tolist())
        """
    )
    _, tensors = expected(Normed())
    right = torch.cat([each.flatten() for each in tensors.values()])
    for line in text.splitlines():
        found = torch.tensor([float(each) for each in line.strip("[]").split(",")]).double()
        torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)


@wraps
def test_sync_batchnorm_is_true_or_false(wrap):
    with pytest.raises(TypeError, match="sync_batchnorm must be True or False, got 1"):
        wrap(sync_batchnorm=1)
