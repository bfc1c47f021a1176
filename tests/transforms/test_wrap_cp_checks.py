"""The check of wrap_cp: a program that needs whole sequences is refused, and a right one is not."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel_fn as af
from accel_fn.checks.sequences import SequenceCheck
from accel_fn.testing import simulate
from tests.support import long_sequences as long
from tests.support import strategies as ours

CUT = af.wrap_cp(long.DIMS)
WRAPS = {"wrap_ddp": af.wrap_ddp(), "wrap_fsdp": af.wrap_fsdp()}
both = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of outputs that are views


class OwnPositions(long.LongModel):
    def forward(self, batch):
        tokens = batch["input_ids"]
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        return super().forward({**batch, "position_ids": places})


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, hidden):
        return self.layer(hidden.transpose(1, 2)).transpose(1, 2)


class Recurrence(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(16, 16, batch_first=True)

    def forward(self, hidden):
        return self.layer(hidden)[0]


class MeanOfTokens(nn.Module):
    def forward(self, hidden):
        return hidden - hidden.mean(1, keepdim=True)


def with_layer(layer):
    """Return a model whose first block ends with this layer."""
    torch.manual_seed(0)
    model = long.long_model()
    model.blocks[0].down = nn.Sequential(model.blocks[0].down, layer.double())
    return model


def shifted_loss(model, batch):
    logits, labels = model(batch)[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(state, wrap, model, loss_fn=long.loss_fn, *, batch=None, weight_fn=None, **checks):
    """Make two steps; return what the check says."""
    mine = copy.deepcopy(model)
    weight_fn = weight_fn or af.count_labels("labels")
    plan = af.Plan(loss_fn, mine, ours.sgd(mine.parameters()), weight_fn)
    state, step = af.build(af.compose(wrap, CUT)(plan), state, **checks)
    for each in long.batches(4, 4) if batch is None else [batch]:
        state, _ = step(state, af.shard_batch(each, state))
    return [each.text for each in step.observers.every if isinstance(each, SequenceCheck)]


@both
@pytest.mark.parametrize(
    ("model", "name"),
    [
        (OwnPositions().double(), "blocks.0.norm"),
        (with_layer(Convolution()), "blocks.0.down.1.layer"),
        (with_layer(Recurrence()), "blocks.0.down.1.layer"),
        (with_layer(MeanOfTokens()), "blocks.0.down.1"),
    ],
    ids=["own positions", "convolution", "recurrence", "mean of tokens"],
)
def test_a_layer_that_needs_the_whole_sequence_is_refused_by_its_name(wrap, model, name):
    match = f"model must compute each token by itself but for attention, with wrap_cp, got {name}, whose"
    with pytest.raises(ValueError, match=match):
        simulate(lambda state: train(state, wrap, model), mesh={"dp": 2, "cp": 2})


def test_a_loss_that_shifts_labels_is_refused():
    def count(batch):
        return float((batch["labels"] != -100).sum())

    match = "loss_fn must be the mean over the tokens .* shift labels before the batch is cut"
    model = long.long_model(depth=1)
    with pytest.raises(ValueError, match=match):
        simulate(
            lambda state: train(state, af.wrap_ddp(), model, shifted_loss, weight_fn=count),
            mesh={"cp": 2},
        )


@both
def test_a_right_program_is_compared_and_left_alone(wrap):
    recipe = af.compose(wrap, af.wrap_tp(long.STYLES))
    model = long.long_model()
    for found in simulate(
        lambda state: train(state, recipe, model), mesh={"dp": 1, "cp": 2, "tp": 2}
    ):
        assert found == ["is that of the whole one, in step 2"]


def test_dropout_is_left_out_of_the_comparison():
    model = with_layer(nn.Dropout(0.5))
    for found in simulate(lambda state: train(state, af.wrap_ddp(), model), mesh={"cp": 2}):
        assert found == ["is that of the whole one, in step 2"]


def test_only_the_start_of_a_long_sequence_is_compared():
    batch = long.batches(4, length=300)[0]
    batch["position_ids"] = batch["position_ids"] % long.MAX_TOKENS
    batch["documents"] = torch.ones_like(batch["labels"])
    lengths = set()

    def loss_fn(model, batch):
        lengths.add(batch["labels"].shape[1])
        return long.loss_fn(model, batch)

    model = long.long_model(depth=1)

    def run(state):
        (text,) = train(state, af.wrap_ddp(), model, loss_fn, batch=batch)
        assert text == "is that of the whole one, in step 1"

    simulate(run, mesh={"cp": 2})
    assert lengths == {128, 64, 150}


@pytest.mark.parametrize("first", [140, 299], ids=["one window", "the last token"])
def test_a_window_with_labels_is_compared_where_prompts_fill_the_start(first):
    batch = long.batches(4, length=300)[0]
    batch["position_ids"] = batch["position_ids"] % long.MAX_TOKENS
    batch["labels"][:, :first] = -100
    batch["labels"][:, -1] = 1
    model = with_layer(MeanOfTokens())
    with pytest.raises(ValueError, match="model must compute each token by itself"):
        simulate(lambda state: train(state, af.wrap_ddp(), model, batch=batch), mesh={"cp": 2})


def test_a_plan_without_wrap_cp_makes_no_such_check():
    plan = ours.plan()
    _, step = af.build(plan, af.DistState())
    assert not any(isinstance(each, SequenceCheck) for each in step.observers.every)
