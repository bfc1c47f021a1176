"""wrap_tp and losses beyond one forward: parameters and activations of split layers in them."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours
from tests.transforms.test_wrap_tp import (
    SQUARE,
    STYLES,
    TWO,
    assert_one_process,
    perceptron,
    split_by_hand,
)

BATCH = (torch.linspace(-1, 1, 12).double().view(4, 3), torch.ones(4, 1).double())


def whole(parameter):
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def squares(model):
    return 0.1 * sum(whole(each).square().sum() for each in model.parameters())


def test_a_penalty_on_whole_parameters_is_that_of_one_process():
    def loss_fn(model, batch):
        return ours.mse(model, batch) + squares(model)

    assert_one_process(af.compose(af.wrap_ddp(), af.wrap_tp(STYLES)), SQUARE, loss_fn=loss_fn)


def refused(loss_fn, styles=STYLES, model_of=lambda state: perceptron()):
    """Take a step of this loss on two ranks, and return the error of each."""

    def run(state):
        plan = ours.plan(model=model_of(state), loss_fn=loss_fn)
        state, step = af.build(state, af.wrap_tp(styles)(plan))
        with pytest.raises(af.errors.AccelError) as caught:
            step(state, BATCH)
        return str(caught.value)

    return simulate(run, mesh=TWO)


MIXED = {
    "squares": lambda model: sum(each.square().sum() for each in model.parameters()),
    "a product": lambda model: (model[2].weight @ torch.ones(6, 1).double()).sum(),
}


@pytest.mark.parametrize("penalty", MIXED.values(), ids=MIXED)
def test_a_loss_that_mixes_dtensors_and_plain_tensors_is_refused(penalty):
    for text in refused(lambda model, batch: ours.mse(model, batch) + penalty(model)):
        assert "mixes them with plain tensors; call full_tensor() on each" in text


def loss_of_a_part(model, batch):
    return ours.mse(model, batch) + model[0](batch[0]).square().mean()


def metric_of_a_part(model, batch):
    return ours.mse(model, batch), {"active": (model[0](batch[0]) > 0).double().mean()}


@pytest.mark.parametrize(
    ("loss_fn", "name"), [(loss_of_a_part, "the loss"), (metric_of_a_part, "the metric 'active'")]
)
def test_what_is_computed_from_a_part_of_a_layer_is_refused(loss_fn, name):
    for text in refused(loss_fn):
        assert f"on ranks that differ in other axes than dp, {name} differs on rank 1;" in text


def test_a_metric_may_be_computed_from_parameters():
    def loss_fn(model, batch):
        return ours.mse(model, batch), {
            "norm": model[0].weight.norm(),
            "pair": (model[2].weight.square().sum(), 2),
            "whole": whole(model[0].weight).mean(),
        }

    def run(state):
        plan = ours.plan(model=perceptron(), loss_fn=loss_fn)
        state, step = af.build(state, af.wrap_tp(STYLES)(plan))
        _, report = step(state, BATCH)
        return {name: float(each) for name, each in report.metrics.items()}

    (expected,) = simulate(run, world_size=1)
    assert simulate(run, mesh=TWO) == [pytest.approx(expected)] * 2


def test_replicas_of_a_split_model_need_a_loss_that_reaches_every_parameter():
    def run(state):
        model = perceptron().append(nn.Linear(1, 1).double())
        plan = ours.plan(model=model, loss_fn=lambda model, batch: ours.mse(model[:3], batch))
        state, step = af.build(state, af.compose(af.wrap_ddp(), af.wrap_tp(STYLES))(plan))
        with pytest.raises(af.errors.LossError, match=r"got no gradient for 3\.weight, 3\.bias;"):
            step(state, af.part(BATCH, state))

    simulate(run, mesh=SQUARE)


def of_gradients(model, batch):
    inputs = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return ours.mse(model, batch) + slope.square().mean()


class WrongSize(nn.Sequential):
    """Code that fails with parts of the features, and with all of them."""

    def forward(self, x):
        return self[2](self[0](x).view(2, 12))


NOTE = (
    "wrap_tp: a colwise layer returns a part of its features on each rank, and a rowwise one takes a part; "
    "take sizes from the tensors, as in q.view(b, t, -1, head_dim), or leave out styles"
)


@pytest.mark.parametrize(
    ("transform", "has_note"), [(af.wrap_tp(STYLES), True), (af.wrap_fsdp(), False)]
)
def test_a_wrong_size_in_the_users_code_has_a_note_where_layers_are_split(transform, has_note):
    def run(state):
        plan = ours.plan(model=WrongSize(*perceptron()))
        state, step = af.build(state, transform(plan))
        with pytest.raises(RuntimeError) as caught:
            step(state, BATCH)
        return NOTE in getattr(caught.value, "__notes__", ())

    assert simulate(run, mesh=TWO) == [has_note] * 2


@pytest.mark.parametrize(
    ("styles", "model_of"),
    [(STYLES, lambda state: perceptron()), ("auto", split_by_hand)],
    ids=["by wrap_tp", "by hand"],
)
def test_gradients_of_gradients_are_refused(styles, model_of):
    for text in refused(of_gradients, styles, model_of):
        assert "wrap_tp must have a loss_fn without gradients of gradients" in text


class Attention(nn.Module):
    """Torch's attention, whole on every rank, beside a split layer."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2)
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0)
        self.up, self.down = nn.Linear(3, 12), nn.Linear(6, 1)

    def forward(self, x):
        # Over one token, the gradients of queries and keys would be rounding alone.
        tokens = self.layer(self.up(x).view(-1, 2, 6).transpose(0, 1))
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return self.down(mixed.mean(0))


def attention():
    torch.manual_seed(0)
    return Attention().double()


@pytest.mark.slow
def test_attention_of_torch_stays_whole():
    styles = {"up": ColwiseParallel(output_layouts=Replicate())}
    # The gradient of a bias of keys is rounding alone, which AdamW turns into whole updates.
    assert_one_process(af.wrap_tp(styles), TWO, make=attention, optimizer=ours.sgd)

    def run(state):
        model = attention()
        af.build(state, af.wrap_tp(styles)(ours.plan(model=model)))
        with torch.no_grad():
            return model.eval()(BATCH[0])

    with torch.no_grad():
        expected = attention().eval()(BATCH[0])
    for actual in simulate(run, mesh=TWO):
        torch.testing.assert_close(actual, expected)


class Listed(nn.Module):
    """Split layers, and parameters of its own in a list and a dict."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(3, 6), nn.Linear(6, 1)
        self.scales = nn.ParameterList([torch.ones(1), 2 * torch.ones(1)])
        self.shifts = nn.ParameterDict({"first": torch.ones(1)})

    def forward(self, x):
        y = self.down(self.up(x).tanh())
        for scale in self.scales:
            y = y * scale
        return y + self.shifts["first"]


def listed():
    torch.manual_seed(0)
    return Listed().double()


@pytest.mark.slow
def test_a_module_may_use_its_lists_and_dicts_of_parameters():
    recipe = af.compose(af.wrap_fsdp(), af.wrap_tp({"up": "colwise", "down": "rowwise"}))
    assert_one_process(recipe, SQUARE, make=listed)
