"""Styles "auto": the plan that a model has, and models without one, which are refused with a guess."""

import json
import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import accel_fn as af
from accel_fn.parallel.tp.styles import styles_of


class Block(nn.Module):
    def __init__(self, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)


def planned(plan, **outer):
    """Make two blocks with a plan, as models of transformers keep it."""
    layers = nn.ModuleList(
        Block(q_norm=nn.LayerNorm(4), up=nn.Linear(4, 8), down=nn.Linear(8, 4)) for _ in range(2)
    )
    model = Block(layers=layers, **outer)
    model._tp_plan = plan
    return model


PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("colwise", str(ColwiseParallel())),
        ("colwise_rep", str(ColwiseParallel(output_layouts=Replicate()))),
        ("colwise_gather_output", str(ColwiseParallel(output_layouts=Replicate()))),
        ("rowwise", str(RowwiseParallel())),
        ("rowwise_rep", str(RowwiseParallel(input_layouts=Replicate()))),
        ("rowwise_split_input", str(RowwiseParallel(input_layouts=Replicate()))),
    ],
)
def test_names_of_transformers_stand_for_styles_of_torch(style, expected):
    found = styles_of(planned({"layers.*.up": style}), "auto", 2)
    assert {name: str(each) for name, each in found.items()} == dict.fromkeys(
        ["layers.0.up", "layers.1.up"], expected
    )


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("embedding_rowwise", str(RowwiseParallel(input_layouts=Replicate()))),
        ("embedding_colwise", str(ColwiseParallel(output_layouts=Replicate()))),
    ],
)
def test_names_of_transformers_for_embeddings(style, expected):
    model = planned(PLAN | {"embed": style}, embed=nn.Embedding(6, 4))
    assert str(styles_of(model, "auto", 2)["embed"]) == expected


def test_plan_of_a_child_counts_and_names_what_is_not_there():
    own = PLAN | {"layers.*.experts.*.up": "moe_tp_experts", "layers.*.q_norm": "replicate"}
    model = Block(encoder=planned(own), head=nn.Linear(4, 2))
    names = [f"encoder.layers.{number}.{name}" for number in (0, 1) for name in ("up", "down")]
    assert list(styles_of(model, "auto", 2)) == names


def test_layer_that_is_tied_to_one_without_a_style_stays_whole():
    table = nn.Embedding(6, 4)
    model = planned(
        PLAN | {"head": "colwise_gather_output"}, table=table, head=nn.Linear(4, 6, bias=False)
    )
    assert "head" in styles_of(model, "auto", 2)
    model.head.weight = table.weight
    assert "head" not in styles_of(model, "auto", 2)
    model._tp_plan["table"] = "embedding_rowwise"
    assert {"head", "table"} <= styles_of(model, "auto", 2).keys()


class Conv1D(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8))


def blocks(**layers):
    return Block(layers=nn.ModuleList(Block(**layers) for _ in range(2)))


def square(*names):
    return Block(**{name: nn.Linear(4, 4) for name in names})


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            planned({"layers.*.up": "packed_colwise"}),
            "must be ones that torch has for modules, got 'packed_colwise' for the module layers.*.up in "
            "the plan of Block; give a mapping of the other layers",
        ),
        (
            planned({"layers.*.up.weight": "colwise"}),
            "must be ones that torch has for modules, got 'colwise' for the parameter layers.*.up.weight",
        ),
        (
            blocks(attention=square("q", "k", "v", "o"), mlp=mlp()),
            'must be a mapping for Block, which has no plan of its own, got "auto"; look at this guess '
            'before you use it: wrap_tp({"layers.*.attention.q": "colwise", "layers.*.attention.k": '
            '"colwise", "layers.*.attention.v": "colwise", "layers.*.attention.o": "rowwise", '
            '"layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise"})',
        ),
        (
            blocks(attention=Block(qkv=nn.Linear(4, 12), o=nn.Linear(4, 4)), mlp=mlp()),
            'wrap_tp({"layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise"}); there is no guess for '
            "layers.*.attention.qkv, layers.*.attention.o",
        ),
        (
            blocks(up=Block(dense=nn.Linear(4, 8)), down=Block(dense=nn.Linear(8, 4))),
            'wrap_tp({"layers.*.up.dense": "colwise", "layers.*.down.dense": "rowwise"})',
        ),
        (
            blocks(parts=nn.ModuleList([square("v", "o"), mlp()])),
            'wrap_tp({"layers.*.parts.0.v": "colwise", "layers.*.parts.0.o": "rowwise", '
            '"layers.*.parts.1.0": "colwise", "layers.*.parts.1.2": "rowwise"})',
        ),
        (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, batch_first=True), 2),
            'got "auto"; give one such as',
        ),
        (mlp(), 'wrap_tp({"0": "colwise", "2": "rowwise"})'),
        (
            planned({"head": "colwise_gather_output"}, head=nn.Linear(4, 6)),
            'wrap_tp({"layers.*.up": "colwise", "layers.*.down": "rowwise"})',
        ),
        (
            nn.Linear(4, 4),
            'got "auto"; give one such as {"layers.*.up": "colwise", "layers.*.down": "rowwise"}',
        ),
        (
            blocks(attention=Block(c_attn=Conv1D())),
            "must be for nn.Linear layers, got Block, whose layers.*.attention.c_attn is a Conv1D; its "
            "weight is transposed, so that torch has no style for it",
        ),
    ],
)
def test_model_without_a_plan_that_fits_is_refused(model, words):
    with pytest.raises(
        af.errors.PlanError, match=f"^build: wrap_tp's styles .*{re.escape(words)}"
    ) as caught:
        styles_of(model, "auto", 2)
    # The guess can be given as it is printed.
    for guess in re.findall(r"wrap_tp\((\{.*?\})\)", str(caught.value)):
        assert styles_of(model, json.loads(guess), 2)
