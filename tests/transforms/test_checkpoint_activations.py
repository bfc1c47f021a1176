"""checkpoint_activations: what is computed again, what memory holds, and what is refused."""

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import accel_fn as af
from tests.laws.law02_checkpoint_activations import Noisy, noisy_model, train
from tests.support import strategies as ours
from tests.support.block_models import CHOICES, LAYERS, Block, is_in, stack
from tests.support.compilers import compiles

pytestmark = pytest.mark.filterwarnings("ignore:step. model should write the same in its forward")


@compiles
# torch's compiler reads the gradients of tensors that have none, which warns.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(("scope", "offload"), [("blocks", True), ("loss", False)])
def test_compiled_blocks_compute_again_what_they_have_computed(scope, offload):
    """There are more steps than graphs that torch makes of one function."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        tuple(torch.randn(4, width, generator=generator).double() for width in (3, 1))
        for _ in range(10)
    ]
    compiling = af.compiled(scope=scope)
    expected = train(noisy_model(), compiling, batches)
    graphs = counters["stats"]["unique_graphs"]
    recipe = af.compose(af.checkpoint_activations(offload=offload), compiling)
    found = train(noisy_model(), recipe, batches)
    assert counters["stats"]["unique_graphs"] - graphs <= 4
    # Where compiled code ends, BatchNorm is rounded, since its eps is in single precision there.
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-6)
    assert torch.equal(found[2], expected[2])


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"scope": "step"}, r"compiled\(scope='step'\)"),
        ({"fullgraph": True}, r"compiled\(fullgraph=True\)"),
    ],
    ids=str,
)
def test_a_graph_without_a_break_around_blocks_is_refused(settings, name):
    recipe = af.compose(af.checkpoint_activations(), af.compiled(**settings))
    plan = recipe(ours.plan(model=stack(), optimizer=ours.adamw))
    text = rf"checkpoint_activations must have blocks that .* outside of a graph, got {name}.*; use compiled"
    with pytest.raises(ValueError, match=text):
        af.build(plan, af.DistState())


@pytest.mark.parametrize(("blocks", "chosen"), CHOICES, ids=[str(each) for each, _ in CHOICES])
def test_what_is_chosen_is_computed_again_and_nothing_else(blocks, chosen):
    model, calls = stack(), Counter()
    for name in LAYERS:
        layer = model.get_submodule(name)
        layer.forward = partial(counted, calls, name, layer.forward)
    state, step = ours.built(
        af.checkpoint_activations(blocks=blocks), model=model, optimizer=ours.adamw
    )
    step(state, (torch.ones(4, 3).double(), torch.ones(4, 1).double()))
    again = {name for name, number in calls.items() if number > 1}
    assert again == {name for name in LAYERS if any(is_in(name, each) for each in chosen)}
    assert set(calls) == set(LAYERS)


class Outer(nn.Module):
    """Two blocks that draw, in a list of their own."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.ModuleList(Noisy(width) for _ in range(2))

    def forward(self, inputs):
        for block in self.inner:
            inputs = block(inputs)
        return inputs


class Checkpointing(nn.Module):
    """A model that checkpoints its blocks, or some of them, itself."""

    def __init__(self, around, blocks):
        super().__init__()
        self.first, self.blocks = nn.Linear(3, 5), nn.ModuleList(blocks)
        self.around, self.last = around, nn.Linear(5, 1)

    def through(self, block, inputs):
        return block(inputs).tanh()

    def forward(self, inputs):
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = self.around(partial(self.through, block), hidden)
        return self.last(hidden)


def with_a_norm_of_gradients(model, batch):
    """A loss with a backward of its own, inside the contexts of the step."""
    inputs, targets = batch
    inputs = inputs.clone().requires_grad_()
    loss = nn.functional.mse_loss(model(inputs), targets)
    (grad,) = torch.autograd.grad(loss, inputs, create_graph=True)
    return loss + grad.square().sum()


AROUND = {
    "one": partial(checkpoint, use_reentrant=False),
    "one in another": lambda run, hidden: checkpoint(
        partial(checkpoint, use_reentrant=False), run, hidden, use_reentrant=False
    ),
}


@pytest.mark.parametrize(
    ("around", "loss_fn", "chosen", "offload"),
    [
        ("one", ours.mse, Noisy, False),
        ("one", with_a_norm_of_gradients, (Outer, Noisy), False),
        ("one in another", with_a_norm_of_gradients, Outer, True),
    ],
)
def test_blocks_that_the_model_checkpoints_itself_train_as_without_it(
    around, loss_fn, chosen, offload
):
    """The blocks draw, and change buffers whenever they are computed."""
    generator = torch.Generator().manual_seed(0)
    batch = tuple(torch.randn(4, width, generator=generator).double() for width in (3, 1))

    def run(recipe):
        torch.manual_seed(0)
        model = Checkpointing(AROUND[around], [Outer(5) for _ in range(3)]).double()
        torch.manual_seed(1)
        state, step = ours.built(recipe, model=model, optimizer=ours.adamw, loss_fn=loss_fn)
        losses = []
        for _ in range(2):
            state, report = step(state, batch)
            losses.append(float(report.loss))
        return losses, model.state_dict()

    expected = run(af.compose())
    found = run(af.checkpoint_activations(blocks=chosen, offload=offload))
    assert found[0] == expected[0]
    ours.assert_identical(found[1], expected[1])


def test_a_block_in_a_block_is_computed_again_for_its_own_backward_too():
    """Otherwise the recomputed outer block would keep all that its inner ones hold."""
    model, calls = stack(), Counter()
    inner = model.blocks[0].inner[0]
    inner.forward = partial(counted, calls, "inner", inner.forward)
    recipe = af.checkpoint_activations(blocks=(Block, nn.Linear))
    state, step = ours.built(recipe, model=model, optimizer=ours.adamw)
    step(state, (torch.ones(1, 3).double(), torch.ones(1, 1).double()))
    assert calls["inner"] == 3


def counted(calls, name, forward, *inputs):
    calls[name] += 1
    return forward(*inputs)


def saved_bytes(recipe):
    """Return the bytes that a forward keeps for the backward and does not pass to `save_on_cpu`."""
    sizes = []
    model = stack()
    model.blocks.extend(copy.deepcopy(model.blocks[0]) for _ in range(9))

    def loss_fn(model, batch):
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            return ours.mse(model, batch)

    def keep(tensor):
        sizes.append(tensor.nbytes if tensor.data_ptr() not in held else 0)
        return tensor

    held = {each.data_ptr() for each in model.parameters()}
    state, step = ours.built(recipe, model=model, optimizer=ours.adamw, loss_fn=loss_fn)
    step(state, (torch.ones(64, 3).double(), torch.ones(64, 1).double()))
    return sum(sizes)


def test_it_keeps_what_goes_into_each_block_and_no_more():
    """Without it, each of 12 blocks keeps three more activations: two inputs of layers, and tanh's
    output."""
    plain, found = saved_bytes(af.compose()), saved_bytes(af.checkpoint_activations())
    assert found <= 0.6 * plain


def test_with_offload_what_goes_into_the_blocks_is_handed_to_the_host():
    plain, found = (
        saved_bytes(af.checkpoint_activations(offload=offload)) for offload in (False, True)
    )
    assert plain - found == 12 * 64 * 5 * 8  # 12 blocks, 64 samples, 5 numbers in float64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_with_offload_an_accelerator_holds_nothing_of_what_goes_into_the_blocks():
    width, size, depth = 64, 1 << 14, 8
    held = {}

    def loss_fn(model, batch):
        before = torch.accelerator.memory_allocated()
        loss = model(batch).square().mean()
        held[offload] = torch.accelerator.memory_allocated() - before
        return loss

    for offload in (False, True):
        model = nn.Sequential(*[Block(width) for _ in range(depth)])
        plan = af.Plan(loss_fn, model, ours.sgd(model.parameters()))
        recipe = af.compose(af.place(), af.checkpoint_activations(offload=offload))
        state, step = af.build(recipe(plan), af.init())
        for _ in range(3):  # steps 1 and 2 keep the outputs, to compare them
            state, _ = step(state, torch.ones(size, width))
    # The first block's input is the batch, and the loss keeps the last block's output anyway.
    assert held[False] - held[True] >= (depth - 1) * size * width * 4


def test_a_forward_of_an_instance_s_own_stays():
    model = stack()
    own = model.blocks[0].forward
    model.blocks[0].forward = lambda inputs: own(inputs) * 2
    held = vars(model.blocks[0])["forward"]
    state, step = ours.built(af.checkpoint_activations(), model=model, optimizer=ours.adamw)
    step(state, (torch.ones(4, 3).double(), torch.ones(4, 1).double()))
    assert vars(model.blocks[0])["forward"] is held


def test_a_model_that_repeats_nothing_must_name_them():
    model = Block(3).inner[0].double()
    plan = af.Plan(
        lambda model, batch: model(batch[0]).mean(), model, ours.adamw(model.parameters())
    )
    with pytest.raises(
        ValueError, match="repeated in a list or sequence, got none in Linear; name"
    ):
        af.build(af.checkpoint_activations()(plan), af.DistState())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"blocks": 3}, "checkpoint_activations: blocks must be a class of modules, a name"),
        ({"offload": "yes"}, "checkpoint_activations: offload must be True or False, got 'yes'"),
    ],
)
def test_what_is_no_choice_is_refused(options, text):
    with pytest.raises(TypeError, match=text):
        af.checkpoint_activations(**options)
