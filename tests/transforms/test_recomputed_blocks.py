"""checkpoint_activations: what a block reads in its forward, it reads again when it is recomputed."""

import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours

X = torch.linspace(-1, 1, 24).sin().double().reshape(8, 3)


class Adapter(nn.Module):
    """Two layers, of which an attribute chooses one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(3, 3) for name in "ab"})
        self.active = "a"

    def forward(self, inputs):
        return self.layers[self.active](inputs)


class Block(nn.Module):
    """Reads attributes, its mode, an object that an attribute holds, and its parent."""

    def __init__(self, parent):
        super().__init__()
        self.parent = [parent]  # no module of this block
        self.adapter, self.act, self.dropout = Adapter(), nn.Tanh(), nn.Dropout(0.0)
        self.scale = torch.ones(()).double()
        self.config = SimpleNamespace(power=1.0)

    def forward(self, inputs):
        found = self.act(self.adapter(inputs)) * self.scale * self.parent[0].scale
        found = found.sign() * found.abs() ** self.config.power
        return inputs + self.dropout(found) * (2.0 if self.training else 3.0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = 1.0
        self.blocks = nn.ModuleList(Block(self) for _ in range(2))
        self.head = nn.Linear(3, 1)
        self.double()

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)

    def again(self, change, inputs):
        """Run once, change each block, and run again."""
        first = self(inputs)
        for block in self.blocks:
            change(block)
        return first, self(inputs)


def switch(block):
    block.adapter.active = "b" if block.adapter.active == "a" else "a"


def rescale(block):
    block.scale = block.scale * 2


def mode(block):
    block.train(not block.training)


def drop(block):
    block.dropout.p = 1.0 - block.dropout.p


def replace_act(block):
    block.act = nn.Sigmoid() if isinstance(block.act, nn.Tanh) else nn.Tanh()


def configure(block):
    block.config.power = 3.0 - block.config.power


def parent(block):
    block.parent[0].scale *= 1.5


def write(block):
    block.scale.mul_(1.25)


def trained(change, recipe, state=None):
    """Train for three steps; return the tensors."""
    model = Model()

    def loss_fn(model, inputs):
        first, second = model.again(change, inputs)
        return first.square().mean() + (second - 1).square().mean()

    plan = af.Plan(loss_fn, model, ours.sgd(model.parameters()))
    # both outputs of a loss that changes the model depend on how often it is called
    state, step = af.build(recipe(plan), state or af.DistState(), check_loss=False)
    for _ in range(3):
        state, _ = step(state, af.shard_batch(X, state))
    return (
        ours.whole(model.state_dict()),
        float(model.scale),
        [each.training for each in model.modules()],
    )


SEEN_AGAIN = [switch, rescale, mode, drop, replace_act]


@pytest.mark.parametrize("change", SEEN_AGAIN, ids=lambda each: each.__name__)
def test_what_changes_before_the_backward_is_put_back_for_it(change):
    expected = trained(change, af.compose())
    found = trained(change, af.checkpoint_activations())
    ours.assert_identical(found[0], expected[0])
    assert found[1:] == expected[1:]


@pytest.mark.parametrize(("change", "wrap"), [(switch, af.wrap_ddp), (mode, af.wrap_fsdp)])
def test_it_is_put_back_over_ranks_and_micro_batches(change, wrap):
    expected = trained(change, af.compose())
    options = {"find_unused_parameters": True} if wrap is af.wrap_ddp else {}
    recipe = af.compose(wrap(**options), af.checkpoint_activations())
    for found in simulate(lambda state: trained(change, recipe, state), world_size=2):
        ours.assert_close(found[0], expected[0])


def test_parameters_that_were_frozen_for_one_forward_get_no_gradient_of_it():
    def run(recipe):
        model = Model()

        def loss_fn(model, inputs):
            frozen = model.blocks[1].requires_grad_(False)
            first = model(inputs)
            frozen.requires_grad_(True)
            return first.square().mean() + (model(inputs) - 1).square().mean()

        plan = af.Plan(loss_fn, model, ours.sgd(model.parameters()))
        state, step = af.build(recipe(plan), af.DistState())
        step(state, X)
        return model.state_dict()

    ours.assert_identical(run(af.checkpoint_activations()), run(af.compose()))


@pytest.mark.parametrize(("change", "offload"), [(configure, True), (parent, False), (write, True)])
def test_what_cannot_be_put_back_is_refused_with_the_block_and_the_repair(change, offload):
    recipe = af.checkpoint_activations(offload=offload)
    with pytest.raises(af.errors.LossError, match=r"another output of blocks\.[01]; give it what"):
        trained(change, recipe)


def test_numbers_of_pythons_generator_are_refused():
    class Noisy(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs).tanh() * random.random()

    model = nn.Sequential(nn.Sequential(Noisy(3, 3), Noisy(3, 3)), nn.Linear(3, 1)).double()
    plan = af.Plan(lambda model, x: model(x).square().mean(), model, ours.sgd(model.parameters()))
    recipe = af.checkpoint_activations(blocks=Noisy)
    state, step = af.build(recipe(plan), af.DistState(), check_loss=False)
    with pytest.raises(af.errors.LossError, match="draw random numbers from torch"):
        step(state, X)


def test_outputs_written_in_place_are_not_taken_for_others():
    class Halved(Model):
        def forward(self, inputs):
            for block in self.blocks:
                inputs = block(inputs)
                inputs.mul_(0.5)
            return self.head(inputs)

    model = Halved()
    plan = af.Plan(lambda model, x: model(x).square().mean(), model, ours.sgd(model.parameters()))
    state, step = af.build(af.checkpoint_activations()(plan), af.DistState())
    step(state, X)


def test_attributes_that_a_recomputation_writes_stay_those_of_the_forward():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls = nn.Linear(3, 3), 0

        def forward(self, inputs):
            self.calls += 1
            return self.layer(inputs).tanh()

    model = nn.Sequential(nn.Sequential(Counting(), Counting()), nn.Linear(3, 1)).double()
    plan = af.Plan(lambda model, x: model(x).square().mean(), model, ours.sgd(model.parameters()))
    state, step = af.build(af.checkpoint_activations()(plan), af.DistState())
    for _ in range(3):
        state, _ = step(state, X)
    assert [each.calls for each in model[0]] == [3, 3]
