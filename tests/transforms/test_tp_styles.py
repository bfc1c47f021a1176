"""Parallel styles by pattern of names: each module's style, and mappings that are refused."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.utils.parametrizations import weight_norm

import accel_fn as af
from accel_fn.parallel.tp.styles import styles_of
from accel_fn.testing import simulate


class Attention(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))


class Layer(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)


class Words(nn.Module):
    """The parts of a language model whose head is tied to its embedding."""

    def __init__(self, width=8, num_heads=4, depth=2):
        super().__init__()
        self.embed = nn.Embedding(12, width)
        self.layers = nn.ModuleList(Layer(width, num_heads) for _ in range(depth))
        self.head = nn.Linear(width, 12, bias=False)
        self.head.weight = self.embed.weight


class Conv1D(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8))


class Holder(nn.Module):
    """Modules by name, and attributes."""

    def __init__(self, attributes=(), **modules):
        super().__init__()
        for name, value in (*dict(attributes).items(), *modules.items()):
            setattr(self, name, value)


STYLES = {
    "layers.*.norm": "sequence",
    "layers.*.attention.[qkv]": "colwise",
    "layers.*.attention.o": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
}


(BY_SEQUENCE,) = styles_of(nn.Sequential(nn.LayerNorm(4)), {"0": "sequence"}, 2).values()


def test_styles_are_those_of_torch_in_the_order_of_the_model():
    with torch.device("meta"):
        model = Words(depth=1)
    found = styles_of(
        model, dict(reversed((STYLES | {"embed": "rowwise", "head": "colwise"}).items())), 2
    )
    kinds = {name: type(style) for name, style in found.items()}
    assert list(kinds.items()) == [
        ("embed", RowwiseParallel),
        ("layers.0.norm", type(BY_SEQUENCE)),
        *((f"layers.0.attention.{name}", ColwiseParallel) for name in "qkv"),
        ("layers.0.attention.o", RowwiseParallel),
        ("layers.0.up", ColwiseParallel),
        ("layers.0.down", RowwiseParallel),
        ("head", ColwiseParallel),
    ]
    assert found["embed"].input_layouts == (Replicate(),)
    assert found["layers.0.down"].input_layouts == (Shard(-1),)


def test_each_module_has_a_copy_of_a_given_style():
    given = ColwiseParallel(output_layouts=Replicate())
    first, second = styles_of(Words(), {"layers.*.up": given}, 2).values()
    assert first.output_layouts == second.output_layouts == (Replicate(),)
    assert len({id(given), id(first), id(second)}) == 3


def test_another_style_of_torch_may_name_any_module():
    given = {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        "layers.*": SequenceParallel(),
    }
    assert list(styles_of(Words(), given, 2)) == ["", "layers.0", "layers.1"]


def test_a_star_stands_for_one_name_and_not_for_the_model():
    assert list(styles_of(nn.Sequential(nn.Linear(4, 4)), {"*": "colwise"}, 2)) == ["0"]
    nested = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    assert list(styles_of(nested, {"*.0": "colwise"}, 2)) == ["1.0"]


def test_module_in_two_places_has_one_style():
    layer = nn.Linear(4, 4)
    model = Holder(first=layer, second=layer)
    assert list(styles_of(model, {"first": "colwise", "second": "colwise"}, 2)) == ["first"]


def test_bias_of_a_rowwise_layer_is_whole_so_it_may_be_tied_to_one_that_is():
    model = Holder(norm=nn.LayerNorm(4), down=nn.Linear(4, 4))
    model.down.bias = model.norm.bias
    assert list(styles_of(model, {"down": "rowwise"}, 2)) == ["down"]


def test_gathered_features_need_not_divide():
    given = {
        "up": ColwiseParallel(output_layouts=Replicate()),
        "down": RowwiseParallel(input_layouts=Replicate()),
    }
    model = Holder({"num_heads": 3}, up=nn.Linear(4, 1), down=nn.Linear(1, 4))
    assert list(styles_of(model, given, 2)) == ["up", "down"]


def test_configuration_counts_for_attention_alone():
    config = Holder({"num_attention_heads": 3})
    model = Holder(mlp=Holder({"config": config}, up=nn.Linear(4, 8)))
    assert list(styles_of(model, {"mlp.up": "colwise"}, 2)) == ["mlp.up"]


@pytest.mark.parametrize(
    ("model", "styles", "words"),
    [
        (
            Words(),
            {"layers.*.atention.q": "colwise"},
            "match modules of the model, got 'layers.*.atention.q'; did you mean layers.*.attention.q or",
        ),
        (Words(), {"zzz": "colwise"}, "match modules of the model, got 'zzz'"),
        (
            Words(),
            {"layers.*.up": "colwise", "layers.0.*": "rowwise"},
            "give layers.0.up one style, got {'layers.*.up': 'colwise', 'layers.0.*': 'rowwise'}",
        ),
        (
            Words(),
            {"layers.0.up": "columns"},
            'be "colwise", "rowwise", "sequence" or one of torch\'s ParallelStyle objects, '
            "got {'layers.0.up': 'columns'}",
        ),
        (
            Words(),
            {"layers.*.norm": "colwise"},
            'give "colwise" to nn.Linear and nn.Embedding alone, got layers.0.norm, of class LayerNorm',
        ),
        (
            Holder(c_attn=Conv1D()),
            {"c_attn": RowwiseParallel()},
            'give "rowwise" to nn.Linear and nn.Embedding alone, got c_attn, of class Conv1D, whose '
            "weight is transposed, so that torch has no style for it",
        ),
        (
            Words(),
            {"layers.*": "sequence"},
            'give "sequence" to norms alone, which have no matrix, got layers.0, of class Layer',
        ),
        (
            nn.Sequential(nn.LayerNorm(4), nn.Dropout(0.1)),
            {"*": "sequence"},
            'give "sequence" to norms alone, which have no matrix, got 1, of class Dropout',
        ),
        (
            Words(),
            {"embed": RowwiseParallel()},
            "take the tokens of an embedding whole, got embed: RowwiseParallel(input_layouts="
            "(Shard(dim=-1),), output_layouts=(Replicate(),), use_local_output=True); use "
            "RowwiseParallel(input_layouts=Replicate())",
        ),
        (
            nn.TransformerEncoderLayer(8, 2),
            {"self_attn.out_proj": "rowwise"},
            "leave out the layers of MultiheadAttention, which reads their weights without calling them, "
            "got self_attn.out_proj, of class NonDynamicallyQuantizableLinear; write it with nn.Linear "
            "layers",
        ),
        (
            nn.TransformerEncoderLayer(8, 2),
            {"linear1": "colwise"},
            "leave out the layers of TransformerEncoderLayer, which reads their weights without calling "
            "them, got linear1, of class Linear; write it with nn.Linear layers",
        ),
        (
            nn.Sequential(weight_norm(nn.Linear(4, 8))),
            {"0": "colwise"},
            "leave out layers whose weight is computed from others, as by weight_norm, got 0, of class "
            "ParametrizedLinear",
        ),
        (
            nn.Sequential(nn.Linear(4, 7)),
            {"0": "colwise"},
            "have output features that the number of ranks along the axis, 2, divides, got 7 of 0",
        ),
        (
            nn.Sequential(nn.Embedding(4, 7)),
            {"0": "colwise"},
            "have output features that the number of ranks along the axis, 2, divides, got 7 of 0",
        ),
        (
            nn.Sequential(nn.Linear(7, 4)),
            {"0": "rowwise"},
            "have input features that the number of ranks along the axis, 2, divides, got 7 of 0",
        ),
        (
            nn.Sequential(nn.Embedding(1, 4)),
            {"0": "rowwise"},
            "leave every rank a row of an embedding, got 1 rows of 0 for 2 ranks",
        ),
        (
            Words(6, num_heads=3),
            {"layers.*.attention.q": "colwise"},
            "have heads that the number of ranks along the axis, 2, divides, got num_heads=3 of "
            "layers.0.attention; leave out its layers, or choose another size of the axis",
        ),
        (
            Holder({"n_kv_heads": 1}, q=nn.Linear(4, 4)),
            {"q": "colwise"},
            "got n_kv_heads=1 of the model; leave out",
        ),
        (
            Holder(
                a=Holder(
                    {"head_dim": 4, "config": Holder({"num_key_value_heads": 1})}, k=nn.Linear(4, 4)
                )
            ),
            {"a.k": "colwise"},
            "got config.num_key_value_heads=1 of a; leave out",
        ),
        (
            Words(),
            {"head": "colwise"},
            "cut a tied parameter in one way, got embed.weight whole and head.weight cut along dimension "
            '0; "rowwise" cuts an embedding as "colwise" cuts a linear layer',
        ),
        (
            Words(),
            {"head": "colwise", "embed": "colwise"},
            "got embed.weight cut along dimension 1 and head.weight cut along dimension 0",
        ),
    ],
)
def test_styles_that_do_not_fit_are_refused(model, styles, words):
    with pytest.raises(
        af.errors.PlanError, match=f"^build: wrap_tp's styles must .*{re.escape(words)}"
    ):
        styles_of(model, styles, 2)


@pytest.mark.parametrize("inputs", [(), (torch.ones(4),)], ids=["none", "one dimension"])
def test_module_that_splits_the_sequence_needs_a_sequence(inputs):
    def run(state):
        model = parallelize_module(nn.LayerNorm(4), af.device_mesh(state), copy.copy(BY_SEQUENCE))
        got = f"LayerNorm({', '.join('Tensor' for _ in inputs)})"
        words = f'^step: a module of style "sequence" must be called with a tensor .*, got {re.escape(got)}$'
        with pytest.raises(af.errors.PlanError, match=words):
            model(*inputs)

    simulate(run, world_size=2)


class Length(nn.Module):
    """Its output is its input; it keeps the length of this rank's part."""

    def forward(self, inputs):
        self.length = inputs.to_local().shape[1]
        return inputs


def test_each_rank_runs_its_part_of_the_sequence():
    inputs = torch.arange(10.0).reshape(2, 5, 1)

    def run(state):
        model = parallelize_module(Length(), af.device_mesh(state), copy.copy(BY_SEQUENCE))
        assert torch.equal(model(inputs), inputs)
        return model.length

    assert simulate(run, world_size=2) == [3, 2]
