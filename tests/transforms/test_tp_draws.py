"""Dropout of activations that are split over an axis: each rank has a mask of its own, from one generator."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.checkpoint import checkpoint

import accel_fn as af
from accel_fn.testing import simulate
from accel_fn.testing.internals import draw_by_shard, may_draw
from tests.support import strategies as ours

STYLES = {"up": "colwise", "down": "rowwise"}
ONES = torch.ones(64, 8, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _own_generators():
    with torch.random.fork_rng(devices=[]):
        yield


class Attention(nn.Module):
    """Several column-wise layers, a draw of their outputs, and a row-wise layer, as in an attention."""

    def __init__(self, rate=0.5):
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))
        self.attention_dropout = rate
        self.seen = None
        self.run = lambda fn, x: fn(x)

    def core(self, x):
        drawn = nn.functional.dropout(
            torch.ones_like(self.q(x) + self.k(x)), self.attention_dropout, self.training
        )
        self.seen = drawn.detach()
        return drawn * x

    def forward(self, x):
        return self.o(self.run(self.core, x))


class Block(nn.Module):
    """An attention, and dropout of a sum that all ranks hold."""

    def __init__(self, rate=0.5):
        super().__init__()
        self.attention, self.dropout = Attention(rate), nn.Dropout(0.25)
        self.seen = None

    def forward(self, x):
        drawn = self.dropout(torch.ones_like(x))
        self.seen = drawn.detach()
        return x + drawn * self.attention(x)


class Model(nn.Module):
    def __init__(self, rate=0.5):
        super().__init__()
        self.blocks = nn.ModuleList([Block(rate), Block(rate)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def masks(self):
        """Return what each block has drawn: of split activations, and of those that all ranks hold."""
        return [block.attention.seen for block in self.blocks], [each.seen for each in self.blocks]


def split(rank, model=None):
    """Make the model of a rank, whose draws are those of a rank that holds other features."""
    torch.manual_seed(1)
    model = model or Model()
    attentions = [block.attention for block in model.blocks]
    layers = {layer: ColwiseParallel() for each in attentions for layer in (each.q, each.k)}
    draw_by_shard(model, layers | {each.o: RowwiseParallel() for each in attentions}, rank)
    return model


def drawn(rank, model=None, seed=2):
    model = split(rank, model)
    torch.manual_seed(seed)
    model(ONES)
    return model.masks()


def test_masks_of_split_activations_differ_and_those_of_whole_ones_do_not():
    of_shards, of_whole = zip(drawn(0), drawn(1), strict=True)
    assert not any(map(torch.equal, *of_shards))
    assert all(map(torch.equal, *of_whole))
    assert not torch.equal(*of_shards[0])  # each block has its own
    assert not torch.equal(*of_whole[0])


def test_nothing_is_drawn_in_evaluation():
    before = torch.get_rng_state()
    model = split(1).eval()
    torch.set_rng_state(before)
    model(ONES)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_region_ends_with_the_model_s_forward():
    def after(rank):
        model = split(rank)
        last = model.blocks[-1].attention
        last.forward = last.core  # without the row-wise layer
        torch.manual_seed(2)
        model(ONES)
        return torch.get_rng_state()

    assert torch.equal(after(0), after(1))


def test_a_region_that_the_next_forward_finds_open_is_a_new_one():
    """As where a recomputation began it, and torch then restored the generator."""
    model = split(1)
    torch.manual_seed(2)
    model(ONES)
    expected = model.masks()
    with torch.random.fork_rng(devices=[]):
        model.blocks[0].attention.q(ONES)
    torch.manual_seed(2)
    model(ONES)
    assert all(map(torch.equal, model.masks()[0], expected[0]))
    assert all(map(torch.equal, model.masks()[1], expected[1]))


def gradients(model):
    torch.manual_seed(2)
    inputs = ONES.clone().requires_grad_()
    model(inputs).square().sum().backward()
    rest = torch.get_rng_state()
    return [inputs.grad, *(each.grad for each in model.parameters() if each.grad is not None)], rest


@pytest.mark.parametrize(("part", "reentrant"), [("block", True), ("core", False)])
def test_a_recomputation_draws_the_same_again(part, reentrant):
    """Also one of a part that begins a region and does not end it."""
    expected, rest = gradients(split(1))
    model = split(1)
    for block in model.blocks:
        if part == "core":
            block.attention.run = lambda fn, x: checkpoint(fn, x, use_reentrant=reentrant)
        else:
            plain = block.forward
            block.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=reentrant)
    found, after = gradients(model)
    assert torch.equal(after, rest)
    for actual, other in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), True),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), False),
        (nn.Sequential(nn.Linear(2, 2), nn.AlphaDropout(0.1)), True),
        (nn.MultiheadAttention(4, 2, dropout=0.1), True),
        (nn.MultiheadAttention(4, 2), False),
        (Attention(0.1), True),
        (Attention(0.0), False),
    ],
    ids=lambda each: type(each).__name__,
)
def test_dropout_of_a_model_is_found(module, expected):
    assert may_draw(module) == expected


def test_dropout_that_only_the_config_has_is_found():
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(attn_pdrop=0.1)
    assert may_draw(model)
    model.config.attn_pdrop = 0.0
    assert not may_draw(model)


class Layers(nn.Module):
    """Dropout between two layers, and beside them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.before, self.between = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x):
        x = self.before(x)
        self.seen = x, self.between(self.up(x))
        return self.down(self.seen[1])


def test_wrap_tp_draws_by_rank_where_activations_are_split():
    def run(state):
        model = Layers().double()
        nn.init.ones_(model.up.weight)
        plan = af.Plan(ours.mse, model, ours.sgd(model.parameters()))
        af.build(af.wrap_tp(STYLES)(plan), state)
        torch.manual_seed(2)  # a rank's turn: up to its next collective
        model(ONES).sum().item()
        return model.seen

    (one, of_shard), (other, its) = simulate(run, mesh={"tp": 2})
    assert torch.equal(one, other)
    assert of_shard.shape == (64, 16)
    assert not torch.equal(of_shard != 0, its != 0)


def test_dropout_that_would_break_whole_graphs_is_refused():
    def run(state):
        model = Model()
        plan = af.Plan(ours.mse, model, ours.sgd(model.parameters()))
        styles = {"blocks.*.attention.q": "colwise", "blocks.*.attention.o": "rowwise"}
        recipe = af.compose(af.wrap_tp(styles), af.compiled(scope="blocks", fullgraph=True))
        af.build(recipe(plan), state)

    text = (
        r"build: compiled\(.*fullgraph=True.*\) must not be used with wrap_tp and dropout, whose draws "
        "break graphs; leave fullgraph out"
    )
    with pytest.raises(ValueError, match=text):
        simulate(run, mesh={"tp": 2})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_masks_on_a_device_differ_between_ranks_and_its_generator_does_not():
    device = torch.accelerator.current_accelerator()
    device = torch.device(device.type, torch.accelerator.current_device_index())

    def run(rank):
        model = split(rank).to(device)
        torch.manual_seed(2)
        model(ONES.to(device))
        return model.masks(), torch.rand(3, device=device)

    (one, after), (other, its) = run(0), run(1)
    assert not any(map(torch.equal, one[0], other[0]))
    assert all(map(torch.equal, one[1], other[1]))
    assert torch.equal(after, its)
