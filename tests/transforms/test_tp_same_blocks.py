"""compare_blocks: code that takes a part of a layer's features for all of them is refused."""

import copy
import re
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours

HEADS, HEAD_DIM, WIDTH = 4, 2, 8
STYLES = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "gathered": lambda: ColwiseParallel(output_layouts=Replicate()),
    "dtensor": lambda: ColwiseParallel(use_local_output=False),
    "heads": lambda: SequenceParallel(use_local_output=True),
    "table": lambda: RowwiseParallel(input_layouts=Replicate()),
}
ATTENTION = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
INPUTS = torch.linspace(-1, 1, 48).sin().view(2, 3, WIDTH)
TOKENS = torch.arange(6).view(2, 3)


def within(name, styles):
    return {f"{name}.{each}": style for each, style in styles.items()}


def found(model, styles, *args, **kwargs):
    """Split a model by styles over two ranks, run it, and return the error of each rank."""

    def run(state):
        own = split(model, styles, state)
        try:
            own(*args, **kwargs).isnan()  # torch warns at exit of outputs that nobody waited for
        except af.errors.PlanError as error:
            return str(error)
        return ""

    return simulate(run, mesh={"tp": 2})


def split(model, styles, state, wrap=None):
    own = copy.deepcopy(model)
    tp = af.wrap_tp({name: STYLES[each]() for name, each in styles.items()})
    recipe = af.compose(wrap or af.compose(), tp)
    af.build(recipe(af.Plan(ours.mse, own, ours.sgd(own.parameters()))), state, check_loss=False)
    return own


class Attention(nn.Module):
    """Attention whose code takes the number of heads from the tensor, or knows it."""

    def __init__(self, *shape, dropout=0.0):
        super().__init__()
        self.shape, self.dropout = shape or (-1, HEAD_DIM), nn.Dropout(dropout)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (self.heads(each(x)) for each in (self.q, self.k, self.v))
        weights = self.dropout((q @ k.mT / HEAD_DIM**0.5).softmax(-1))
        return self.dropout(self.o((weights @ v).transpose(1, 2).reshape(b, t, -1)))

    def heads(self, x):
        return x.view(*x.shape[:2], *self.shape).transpose(1, 2)


FIXED = (HEADS, -1)


class OneMatrix(Attention):
    """Attention with one matrix for queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        del self.q, self.k, self.v

    def forward(self, x):
        q, k, v = map(self.heads, self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.o(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, between=F.gelu):
        super().__init__()
        self.up, self.down, self.between = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), between

    def forward(self, x):
        return self.down(self.between(self.up(x)))


PAIR = {"up": "colwise", "down": "rowwise"}


class Model(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.table, self.head = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 10)
        self.blocks = nn.ModuleList(blocks)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in blocks)

    def forward(self, tokens):
        x = self.table(tokens)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.head(x)


WHOLE = {
    "table": "table",
    "blocks.0.q": "colwise",
    "blocks.0.k": "colwise",
    "blocks.0.v": "colwise",
    "blocks.0.o": "rowwise",
    "blocks.1.up": "colwise",
    "blocks.1.down": "rowwise",
    "head": "gathered",
}


class Wrapped(nn.Module):
    """A block in a module around it."""

    def __init__(self, block, call):
        super().__init__()
        self.block, self.call = block, call

    def forward(self, x):
        return self.call(self.block, x)


class SelfAndOutput(nn.Module):
    """As in BERT: the colwise layers are in one module, the rowwise one in another."""

    def __init__(self, *shape):
        super().__init__()
        self.self, self.out = Attention(*shape), nn.Linear(WIDTH, WIDTH)
        self.self.o = nn.Identity()

    def forward(self, x):
        return self.out(self.self(x))


BERT = {"self.q": "colwise", "self.k": "colwise", "self.v": "colwise", "out": "rowwise"}


class Named(Attention):
    def forward(self, *, hidden_states, cache=None, then=None):
        if cache is not None:
            hidden_states = torch.cat([*cache.past, hidden_states], 1)
            cache.past.append(hidden_states.detach())
        return super().forward(hidden_states), torch.zeros(1)


class Scaled(MLP):
    """Has a whole vector beside its parts of layers, and takes all of it or the start."""

    def __init__(self, *, cut):
        super().__init__(self.times)
        self.scale, self.cut = nn.Parameter(torch.ones(16)), cut

    def times(self, x):
        return x * self.scale[: x.shape[-1]] if self.cut else x * self.scale.detach().sum()


class Routed(nn.Module):
    """Gives no token to its first expert."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([MLP(), MLP()])

    def forward(self, x):
        return x + self.experts[0](x[0, :0]).sum() + self.experts[1](x)


class DeadUnits(nn.Module):
    """Its rowwise layer is in a module that sees zeros alone, the same on every rank."""

    def __init__(self):
        super().__init__()
        self.up, self.out = nn.Linear(WIDTH, 16), nn.Sequential(nn.Linear(16, WIDTH))
        nn.init.constant_(self.up.bias, -100)

    def forward(self, x):
        return self.out(self.up(x).relu())


class Cache:
    def __init__(self):
        self.past = []


def call_with_cache(block, x):
    cache = Cache()
    out, _ = block(hidden_states=x, cache=cache)
    assert len(cache.past) == 1
    return out


def call_with_closure(block, x):
    return block(hidden_states=x, then=lambda: x)[0]


def by_constant(x):
    """Fails in float64."""
    return torch.eye(x.shape[1]) @ F.gelu(x)


class OfDTensors(nn.Module):
    """Computes with the whole rows of a split layer, as DTensors know them."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 16)

    def forward(self, x):
        return F.layer_norm(self.up(x), (16,))


RIGHT = {
    "as in BERT": (SelfAndOutput(), BERT),
    "a cache": (Wrapped(Named(), call_with_cache), within("block", ATTENTION)),
    "dropout": (Attention(dropout=0.5), ATTENTION),
    "no float64": (MLP(by_constant), PAIR),
    "a DTensor": (OfDTensors(), {"up": "dtensor"}),
    "a closure": (Wrapped(Named(), call_with_closure), within("block", ATTENTION)),
    "a whole vector": (Scaled(cut=False), PAIR),
    "no tokens": (
        Routed(),
        {f"experts.{each}.{name}": PAIR[name] for each in range(2) for name in PAIR},
    ),
    "zeros": (DeadUnits(), {"up": "colwise", "out.0": "rowwise"}),
}


@pytest.mark.parametrize(("model", "styles"), RIGHT.values(), ids=RIGHT)
def test_right_code_passes(model, styles):
    assert found(model, styles, INPUTS) == ["", ""]


WRONG = {
    "a fixed number of heads": (Attention(*FIXED), ATTENTION),
    "as in BERT": (SelfAndOutput(*FIXED), BERT),
    "a norm": (MLP(lambda x: F.layer_norm(x, x.shape[-1:])), PAIR),
    "one matrix in three chunks": (OneMatrix(), {"qkv": "colwise", "o": "rowwise"}),
    "no float64": (MLP(lambda x: by_constant(x).softmax(-1)), PAIR),
    "with a cache": (Wrapped(Named(*FIXED), call_with_cache), within("block", ATTENTION)),
    "the start of a vector": (Scaled(cut=True), PAIR),
    "not a number": (MLP(lambda x: x if x.shape[-1] == 16 else x * torch.nan), PAIR),
}


@pytest.mark.parametrize(("model", "styles"), WRONG.values(), ids=WRONG)
def test_wrong_code_is_refused_on_all_ranks(model, styles):
    first, second = found(model, styles, INPUTS)
    assert first == second
    assert "must return the same with its layers split over 2 ranks as with whole ones" in first


class NormedHeads(Attention):
    """Norms the queries of each head by one vector, and starts as a block that adds nothing."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(HEAD_DIM)
        nn.init.zeros_(self.o.weight)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (self.heads(each(x)) for each in (self.q, self.k, self.v))
        weights = (self.norm(q) @ k.mT).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).reshape(b, t, -1))


class OneKey(NormedHeads):
    """All heads share one head of keys and values."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Identity()
        self.k, self.v = nn.Linear(WIDTH, HEAD_DIM), nn.Linear(WIDTH, HEAD_DIM)


class Gated(MLP):
    """Gates split features by one number of each token."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1).requires_grad_(requires_grad=False)

    def forward(self, x):
        return self.down(self.up(x) * self.gate(x).sigmoid())


WHOLE_KEY = {"q": "colwise", "o": "rowwise"}
WRONG_GRADIENTS = {
    "a norm of heads": (NormedHeads(), ATTENTION, "norm.weight"),
    "a whole key": (OneKey(), WHOLE_KEY, "k.weight"),
    "a gathered key": (OneKey(), WHOLE_KEY | {"k": "gathered", "v": "gathered"}, "k.weight"),
    "an input": (Wrapped(Gated(), nn.Module.__call__), within("block", PAIR), "its input"),
}


@pytest.mark.parametrize(("model", "styles", "name"), WRONG_GRADIENTS.values(), ids=WRONG_GRADIENTS)
def test_code_whose_gradients_are_those_of_a_part_is_refused(model, styles, name):
    first, second = found(model, styles, INPUTS.clone().requires_grad_())
    assert first == second
    assert re.search(
        r"must have the same gradients with its layers split over 2 ranks as with whole ones, got "
        rf"gradients of (k\.|v\.|{name}).* that differ by \d\S* of the largest; split what is used "
        r"between a colwise layer and the rowwise one after it, give a norm of heads there "
        r"SequenceParallel\(use_local_output=True\), or leave out the styles of",
        first,
    )


def test_a_norm_of_heads_whose_gradients_are_added_up_passes():
    assert found(NormedHeads(), ATTENTION | {"norm": "heads"}, INPUTS) == ["", ""]


def test_the_message_names_the_block_and_the_repair():
    first, _ = found(Model(Attention(*FIXED), MLP()), WHOLE, TOKENS)
    assert re.fullmatch(
        r"wrap_tp: blocks\.0 \(Attention\) must return the same with its layers split over 2 ranks as with "
        r"whole ones, got outputs that differ by 0\.\d+ of the largest; take sizes from the tensors, as in "
        r"q\.view\(b, t, -1, head_dim\), follow each colwise layer by a rowwise one, or leave out the styles "
        r"of blocks\.0\.k, blocks\.0\.o, blocks\.0\.q, blocks\.0\.v",
        first,
    )


def test_an_output_of_another_shape_is_refused():
    first, second = found(Model(), {"head": "colwise"}, TOKENS)
    assert first == second
    assert "the model (Model)" in first
    assert "got the shape [2, 3, 5] instead of [2, 3, 10];" in first


def test_a_model_is_compared_at_a_constant_input_too():
    model, styles = WRONG["a norm"]
    assert all(found(model, styles, torch.ones(2, 3, WIDTH)))


def hidden(*shape):
    """Attention whose heads look alike: its weights are small, and its last layer starts at zero."""
    model = Attention(*shape)
    with torch.no_grad():
        for each in (model.q, model.k, model.v):
            each.weight.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
            each.bias.zero_()
        model.o.weight.zero_()
        model.o.bias.zero_()
    return model.bfloat16()


def test_wrong_heads_of_a_new_model_in_half_precision_are_found():
    inputs = INPUTS.bfloat16()
    assert found(hidden(), ATTENTION, inputs) == ["", ""]
    assert all(found(hidden(*FIXED), ATTENTION, inputs))


@pytest.mark.parametrize(("shape", "is_right"), [((), True), (FIXED, False)])
def test_a_model_that_was_split_by_hand_is_compared_too(shape, is_right):
    model = Attention(*shape)

    def run(state):
        own, mesh = copy.deepcopy(model), af.device_mesh(state)["tp"]
        plan = {name: STYLES[style]() for name, style in ATTENTION.items()}
        parallelize_module(own, mesh, plan, src_data_rank=None)
        af.build(af.wrap_tp()(af.Plan(ours.mse, own, ours.sgd(own.parameters()))), state)
        with nullcontext() if is_right else pytest.raises(af.errors.PlanError, match="the same"):
            own(INPUTS).isnan()

    simulate(run, mesh={"tp": 2})


class Counted(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.calls = []

    def forward(self, x):
        self.calls.append(None)
        return super().forward(x)


def test_the_layers_of_the_first_block_of_a_kind_run_twice_more():
    model = Model(*(MLP() for _ in range(3)))
    for each in model.blocks:
        each.up = Counted(WIDTH, 16)

    def run(state):
        styles = {f"blocks.{each}.{name}": PAIR[name] for each in range(3) for name in PAIR}
        own = split(model, styles, state)
        for _ in range(2):
            own(TOKENS).isnan()
        return [len(each.up.calls) for each in own.blocks]

    assert simulate(run, mesh={"tp": 2}) == [[4, 2, 2]] * 2


class Drawing(MLP):
    """Draws in evaluation mode too, counts its forwards in a buffer, and has a part in its own mode."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.norm = nn.LayerNorm(WIDTH).eval()

    def forward(self, x):
        self.count.add_(1)
        return self.norm(super().forward(x)) + 0 * torch.rand(())


def test_a_comparison_leaves_no_trace():
    """Generators, buffers, parameters and modes are those of a forward without it."""
    model = Drawing()

    def run(state):
        own = split(model, PAIR, state)
        before = [*own.parameters(), own.count]
        own(INPUTS).isnan()
        assert all(a is b for a, b in zip(before, (*own.parameters(), own.count), strict=True))
        assert own.count == 1
        assert own.training
        assert own.up.training
        assert not own.norm.training

    torch.manual_seed(0)
    simulate(run, mesh={"tp": 2})
    found = torch.rand(())
    torch.manual_seed(0)
    assert found == torch.rand(3)[2]  # each of the two ranks has drawn once


def drawing(x):
    return F.dropout(x, 0.5)


class Failing(nn.Module):
    def forward(self, x):
        if not self.training:
            raise RuntimeError("no second time")
        return x


@pytest.mark.parametrize(
    ("between", "failure"),
    [(drawing, "another output each time"), (Failing(), "RuntimeError: no second time")],
)
def test_a_block_that_cannot_be_compared_is_warned_of_on_the_main_rank(between, failure):
    with pytest.warns(UserWarning, match="wrap_tp") as caught:
        assert found(MLP(between), PAIR, INPUTS) == ["", ""]
    (warning,) = caught
    assert str(warning.message) == (
        "wrap_tp: the model (MLP) should run a second time in evaluation mode, to be compared with its "
        f"layers unsplit, got {failure}; train a few steps with and without wrap_tp and compare the losses"
    )
    assert warning.filename == __file__


def test_ranks_of_one_batch_are_compared_in_a_mesh_of_two_axes():
    def run(state):
        own = split(Attention(*FIXED), ATTENTION, state, af.wrap_ddp())
        with pytest.raises(af.errors.PlanError, match="split over 2 ranks"):
            own(INPUTS + state.along("dp").rank)

    simulate(run, mesh={"dp": 2, "tp": 2})


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize(("shape", "is_right"), [((), True), (FIXED, False)])
def test_parameters_that_fsdp_shards_are_compared_too(shape, is_right):
    model = Model(Attention(*shape), MLP())

    def run(state):
        own = split(model, WHOLE, state, af.wrap_fsdp(blocks=nn.Linear))
        match = r"blocks\.0 \(Attention\) must return the same"
        with nullcontext() if is_right else pytest.raises(af.errors.PlanError, match=match):
            own(TOKENS).isnan()

    simulate(run, mesh={"dp": 2, "tp": 2})


ACTIVATIONS = st.sampled_from([F.relu, F.gelu, F.silu, torch.tanh])


@given(
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    activation=ACTIVATIONS,
    scale=st.floats(1e-3, 1e3),
    seed=st.integers(0, 2**16),
    autocast=st.booleans(),
)
@ours.share(0.1)
def test_right_models_of_any_values_pass(dtype, activation, scale, seed, autocast):
    torch.manual_seed(seed)
    model = Model(Attention(dropout=0.1), MLP(activation)).to(dtype)
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(scale)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert found(model, WHOLE, TOKENS) == ["", ""]
